"""Ranks of each query's own document for a dual encoder, resumable.

Vectors and ranks are written to disk part by part: a kill costs one part, and
memory holds two parts at a time whatever the size of the collection.
"""

import pathlib
from typing import Any

import numpy as np
from jaxtyping import Int

from synthq_jax.data import blocks
from synthq_jax.models import t5_config
from synthq_jax.pipeline import _parts
from synthq_jax.retrieval import encode, ranks

__all__ = ["of"]

_PART = 8192
"""Rows between two saves."""


def of(
  params: Any,
  model_config: t5_config.T5Config,
  queries: Int[np.ndarray, "query length"],
  documents: Int[np.ndarray, "document longer"],
  owners: Int[np.ndarray, " query"],
  *,
  directory: pathlib.Path,
  description: str,
  batch_size: int,
  progress: bool,
) -> Int[np.ndarray, " query"]:
  """Returns how many documents the encoder scores above each query's own.

  Args:
    params: of the encoder.
    model_config: its shape.
    queries: tokens.
    documents: tokens of the whole collection.
    owners: the position of each query's own document.
    directory: where parts are saved; that of this encoder and these queries.
    description: stands before the progress bars.
    batch_size: rows encoded at once.
    progress: whether bars are shown.

  Returns:
    Ranks, 0 for the best; equal scores share the best rank among them.
  """
  vectors = []
  for kind, tokens in (("documents", documents), ("queries", queries)):
    parts = blocks.Blocks(directory / kind)
    with _parts.bar(f"{description}: {kind}", len(tokens), progress) as bar:
      for first in range(0, len(tokens), _PART):
        rows = tokens[first : first + _PART]
        if parts.read(first, mapped=True) is None:
          encoded = encode.encode(
            params, model_config, np.asarray(rows), batch_size=batch_size
          )
          parts.write(first, encoded)
        bar.update(len(rows))
    vectors.append(parts)
  found = blocks.Blocks(directory / "ranks")
  with _parts.bar(f"{description}: ranks", len(queries), progress) as bar:
    for first in range(0, len(queries), _PART):
      own = owners[first : first + _PART]
      if found.read(first) is None:
        found.write(first, _ranks(*vectors, first, own, len(documents)))
      bar.update(len(own))
  return np.concatenate(
    [found.read(first) for first in range(0, len(queries), _PART)]
  )


def _ranks(
  documents: blocks.Blocks,
  queries: blocks.Blocks,
  first: int,
  owners: np.ndarray,
  total: int,
) -> np.ndarray:
  """Counts over all parts of the collection for one part of the queries."""
  asked = queries.read(first)
  starts = range(0, total, _PART)
  own = blocks.Rows([documents.path(start) for start in starts])[owners]
  scores = ranks.own_scores(asked, own)
  counts = [
    ranks.count_better(asked, scores, documents.read(start)) for start in starts
  ]
  return np.sum(counts, axis=0)
