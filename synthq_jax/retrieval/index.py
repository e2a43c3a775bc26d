"""Exact search by inner product, with faiss."""

import dataclasses

import faiss
import numpy as np
from jaxtyping import Float, Int

from synthq_jax.retrieval import _vectors

__all__ = ["Index", "exact"]

_MARGIN = 16  # candidates beyond k, so that ties at the border are rarely cut


@dataclasses.dataclass(frozen=True)
class Index:
  """Vectors that `exact` indexed.

  faiss finds candidates in single precision, where the last bits depend on how
  many queries come at once; these are scored again in double precision, and the
  search is widened until rounding cannot have hidden a better one. So the result
  depends on the vectors alone.

  Attributes:
    vectors: the documents.
    flat: the faiss index of the same vectors.
    longest: the largest norm of a document.
  """

  vectors: Float[np.ndarray, "document dim"]
  flat: faiss.IndexFlatIP = dataclasses.field(repr=False)
  longest: float

  def search(
    self, queries: Float[np.ndarray, "query dim"], k: int
  ) -> tuple[Float[np.ndarray, "query k"], Int[np.ndarray, "query k"]]:
    """Finds the documents with the largest inner products.

    Equal scores stand in the order of the documents.

    Args:
      queries: the query vectors, float32.
      k: how many documents; all of them where there are fewer.

    Returns:
      Scores in float64, descending, and positions of the documents.

    Raises:
      ValueError: if k < 1, or the queries have another dim or are not finite.
    """
    queries = _vectors.finite("queries", queries)
    _vectors.check_search(queries, k, self.vectors.shape[1])
    k = min(k, len(self.vectors))
    scores = np.zeros((len(queries), k))
    places = np.zeros((len(queries), k), np.int64)
    open_, width = np.arange(len(queries)), k
    while len(open_):
      width = min(width + max(width, _MARGIN), len(self.vectors))
      found, at, sure = self._candidates(queries[open_], k, width)
      scores[open_], places[open_] = found, at
      open_ = open_[~sure]
    return scores, places

  def _candidates(
    self, queries: np.ndarray, k: int, width: int
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns scores, positions, and for which queries these are final."""
    rough, at = self.flat.search(queries, width)
    at = np.sort(at, axis=1)  # by position, which a stable sort keeps for ties
    scores = _vectors.rescore(queries, self.vectors, at)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    scores = np.take_along_axis(scores, order, axis=1)
    at = np.take_along_axis(at, order, axis=1)
    # A document left out scored at most rough[:, -1] in faiss; a float32 sum
    # of dim products is off by at most dim * 2^-24 times the norms (and faiss
    # rounds the last product once more).
    slack = (queries.shape[1] + 2) * 2.0**-24 * self.longest
    slack = slack * np.linalg.norm(queries.astype(np.float64), axis=1)
    sure = scores[:, -1] > rough[:, -1] + slack
    return scores, at, sure | (width == len(self.vectors))


def exact(vectors: Float[np.ndarray, "document dim"]) -> Index:
  """Indexes document vectors for exact search.

  >>> index = exact(np.eye(3, dtype=np.float32))
  >>> index.search(np.array([[0.0, 2.0, 1.0]], np.float32), k=2)[1]
  array([[1, 2]])

  Args:
    vectors: one per document, float32; normalise them for cosines.

  Returns:
    The index.

  Raises:
    ValueError: if there are no vectors, or one is not finite.
  """
  vectors = _vectors.finite("vectors", vectors)
  if not vectors.size:
    raise ValueError(
      f"expected document vectors, got shape {vectors.shape}; encode some"
    )
  flat = faiss.IndexFlatIP(vectors.shape[1])
  flat.add(vectors)
  longest = float(np.linalg.norm(vectors, axis=1).max())
  return Index(vectors, flat, longest)
