"""Computes the exact rank of one document per query, over blocks of documents.

If only a query's own document matters, no list of results is needed. Its rank is
the number of documents that score higher, which can be counted block by block.
"""

import numpy as np
from jaxtyping import Float, Int

__all__ = ["count_better", "own_scores"]

_TIE = 1e-9  # scores of unit vectors in double precision are off by 1e-13
_TILE = 1 << 22  # scores in memory at a time: 32 MiB


def own_scores(
  queries: Float[np.ndarray, "query dim"], own: Float[np.ndarray, "query dim"]
) -> Float[np.ndarray, " query"]:
  """Computes each query's inner product with its own document, in float64.

  Args:
    queries: unit vectors.
    own: the vector of each query's document.

  Raises:
    ValueError: if shapes differ or a vector is not finite.
  """
  queries, own = _check_vectors("queries", queries), _check_vectors("own", own)
  if queries.shape != own.shape:
    raise ValueError(
      f"expected one own document per query, got shapes {queries.shape} and"
      f" {own.shape}"
    )
  return np.einsum("qd,qd->q", queries, own)


def count_better(
  queries: Float[np.ndarray, "query dim"],
  scores: Float[np.ndarray, " query"],
  documents: Float[np.ndarray, "document dim"],
) -> Int[np.ndarray, " query"]:
  """Counts the documents of a block that score above each query's own document.

  The sum over all blocks is the rank, 0 for the best. Equal scores do not count, so
  documents with equal vectors all have the best of their ranks. Scores are compared
  in double precision with a tolerance for rounding. So the counts depend on the
  vectors, not on the division into blocks.

  Args:
    queries: unit vectors.
    scores: the score of each query's own document (`own_scores`).
    documents: unit vectors of a block of the collection.

  Returns:
    One count per query.

  Raises:
    ValueError: if a vector is not finite.

  >>> documents = np.eye(3, dtype=np.float32)
  >>> queries = np.array([[0.6, 0.8, 0.0]], np.float32)
  >>> count_better(queries, own_scores(queries, documents[:1]), documents)
  array([1])
  """
  queries = _check_vectors("queries", queries)
  documents = _check_vectors("documents", documents).T
  rows = max(1, _TILE // max(1, documents.shape[1]))
  counts = np.zeros(len(queries), np.int64)
  for start in range(0, len(queries), rows):
    part = slice(start, start + rows)
    better = queries[part] @ documents > scores[part, None] + _TIE
    counts[part] = np.count_nonzero(better, axis=1)
  return counts


def _check_vectors(name: str, vectors: np.ndarray) -> np.ndarray:
  """Converts vectors to double precision; refuses vectors that are not finite."""
  array = np.asarray(vectors, np.float64)
  if not np.isfinite(array).all():
    raise ValueError(
      f"expected finite {name}, got shape {array.shape} with infinite or"
      " undefined numbers: the training of the encoder diverged"
    )
  return array
