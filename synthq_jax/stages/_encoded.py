"""Encodes a collection once for all generators with the same encoder.

Formal guarantee: each output is of one document by the given encoder. Of a
public collection all documents are encoded or none, so that no timing tells
whose documents were asked for.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from synthq_jax.data import passages as passages_lib
from synthq_jax.models import encodings, t5_config
from synthq_jax.runtime import prepared_files

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
  """Encodes all documents, if this saves time and the outputs fit into memory.

  Args:
    params: parameters of a T5, by path; only those of its encoder are read.
    config: its shape; without dropout.
    passages: passages of the collection.
    vocabulary: vocabulary of their tokens.
    prefix: text before each document.
    number: number of documents that will be read; encoding all does not pay if
      it is less than half. None: the number is not public, and the choice to
      encode must not reveal it.
  """
  total = len(passages.owners)
  if number is not None and total > 2 * number:
    return None
  head = len(vocabulary.encode(prefix))
  size = total * (passages.tokens.shape[1] + head)
  if encodings.num_bytes(size, config) > encodings.MOST_BYTES:
    return None
  tokens = prepared_files.add_prefix(passages.tokens[:], vocabulary, prefix)
  return encodings.kept(params, config, tokens)


def encode_records(
  public: Mapping[str, Any],
  shape: t5_config.T5Config,
  read: np.ndarray,
  collection: Callable[[Any, Any], encodings.Encodings | None] | None,
) -> np.ndarray:
  """Encodes records, with the outputs of the collection where it has them.

  Args:
    public: parameters of a T5, by path.
    shape: shape of that T5; without dropout.
    read: input tokens of the encoder, [record, length].
    collection: function from parameters and shape to the outputs for all
      documents; None: there is none.
  """
  shared = None if collection is None else collection(public, shape)
  if shared is None:
    return encodings.encode(public, shape, read)
  outputs = shared.rows(np.arange(len(shared.tokens)))
  positions = {
    row.tobytes(): position for position, row in enumerate(shared.tokens)
  }
  matches = np.array([positions.get(row.tobytes(), -1) for row in read])
  encoded, others = outputs[matches], np.flatnonzero(matches < 0)
  if len(others):  # records of canaries
    encoded[others] = encodings.encode(public, shape, read[others])
  return encoded
