"""Reads a collection once for all generators whose encoder is the same.

Formal guarantee: each output is of one document by the encoder that is given. Of a
public collection all are computed or none, so that no time tells whose documents were
asked for.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from synthq_jax.data import passages as passages_lib
from synthq_jax.models import encodings, t5_config
from synthq_jax.runtime import inputs

__all__ = ["encode_collection", "encode_records"]


def encode_collection(
  params: Mapping[str, Any],
  config: t5_config.T5Config,
  passages: passages_lib.Passages,
  vocabulary: Any,
  *,
  prefix: str,
  number: int | None = None,
) -> encodings.Encodings | None:
  """Returns the outputs for all documents, where it pays and they have room.

  Args:
    params: of a T5, by path; only those of its encoder are read.
    config: its shape; without dropout.
    passages: of the collection.
    vocabulary: whose tokens these are.
    prefix: stands before each document.
    number: of documents that are read, less than half of all do not pay; None: it
      is not public, and whether all are encoded must not tell.
  """
  total = len(passages.owners)
  if number is not None and total > 2 * number:
    return None
  head = len(vocabulary.encode(prefix))
  size = total * (passages.tokens.shape[1] + head)
  if encodings.num_bytes(size, config) > encodings.MOST_BYTES:
    return None
  tokens = inputs.with_prefix(passages.tokens[:], vocabulary, prefix)
  return encodings.kept(params, config, tokens)


def encode_records(
  public: Mapping[str, Any],
  shape: t5_config.T5Config,
  read: np.ndarray,
  collection: Callable[[Any, Any], encodings.Encodings | None] | None,
) -> np.ndarray:
  """Returns the outputs for records, those of the collection where it has them.

  Args:
    public: parameters of a T5, by path.
    shape: its own; without dropout.
    read: what the encoder reads, [record, length].
    collection: from both to the outputs for all documents; None: there are none.
  """
  known = None if collection is None else collection(public, shape)
  if known is None:
    return encodings.encode(public, shape, read)
  every = known.rows(np.arange(len(known.tokens)))
  places = {row.tobytes(): place for place, row in enumerate(known.tokens)}
  found = np.array([places.get(row.tobytes(), -1) for row in read])
  encoded, others = every[found], np.flatnonzero(found < 0)
  if len(others):  # canaries'
    encoded[others] = encodings.encode(public, shape, read[others])
  return encoded
