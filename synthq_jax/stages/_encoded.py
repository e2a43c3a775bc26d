"""Reads a collection once for all generators whose encoder is the same.

Formal guarantee: outputs are of public documents by the encoder that is given. All of
them are computed or none, so that no time tells whose documents were asked for.
"""

from collections.abc import Mapping
from typing import Any

from synthq_jax.data import passages as passages_lib
from synthq_jax.models import encodings, t5_config
from synthq_jax.pipeline import inputs

__all__ = ["of_collection"]


def of_collection(
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
