"""Searches vectors exactly, by inner product, with faiss."""

import dataclasses
from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Float, Int

from synthq_jax import extras

with extras.required("run"):
  import faiss

__all__ = [
  "Index",
  "exact",
  "search_documents",
]

_MARGIN = (
  16  # least candidates beyond k, so that ties at the border are rarely cut
)
_RESCORED = 1 << 22  # numbers of candidate vectors: 32 MiB in float64
_FOUND = 1 << 20  # candidates of queries that are searched together: 50 MiB


def _check_finite(
  name: str, vectors: Float[np.ndarray, "row dim"]
) -> Float[np.ndarray, "row dim"]:
  """Converts vectors to float32; raises ValueError unless they are finite."""
  array = np.ascontiguousarray(vectors, np.float32)
  if array.ndim != 2 or not np.isfinite(array).all():
    raise ValueError(
      f"expected finite {name} of two axes, got shape {array.shape}; look at "
      "the encoder"
    )
  return array


def _blocks(
  rows: Int[np.ndarray, " query"], width: int
) -> Iterator[Int[np.ndarray, " part"]]:
  """Yields positions of queries in parts whose `width` candidates each fit into
  memory."""
  size = max(1, _FOUND // width)
  for start in range(0, len(rows), size):
    yield rows[start : start + size]


def _rescore(
  queries: Float[np.ndarray, "query dim"],
  vectors: Float[np.ndarray, "document dim"],
  at: Int[np.ndarray, "query k"],
) -> Float[np.ndarray, "query k"]:
  """Computes the inner products with the documents at `at`, in float64."""
  rows = max(1, _RESCORED // max(1, at.shape[1] * queries.shape[1]))
  scores = np.zeros(at.shape)
  for start in range(0, len(queries), rows):
    part = slice(start, start + rows)
    scores[part] = np.einsum(
      "qd,qkd->qk",
      queries[part].astype(np.float64),
      vectors[at[part]].astype(np.float64),
    )
  return scores


@dataclasses.dataclass(frozen=True)
class Index:
  """An index of document vectors, made by `exact`.

  faiss finds candidates in single precision, and their last bits depend on the
  number of queries in a call. So the candidates are scored again in double
  precision, and the search is widened until rounding cannot hide a better document.
  The result depends on the vectors alone.

  Attributes:
    vectors: the document vectors.
    flat: the faiss index of the same vectors.
    longest: the largest norm of a document vector.
  """

  vectors: Float[np.ndarray, "document dim"]
  flat: faiss.IndexFlatIP = dataclasses.field(repr=False)
  longest: float

  def search(
    self, queries: Float[np.ndarray, "query dim"], k: int
  ) -> tuple[Float[np.ndarray, "query k"], Int[np.ndarray, "query k"]]:
    """Finds the documents with the largest inner products.

    Equal scores keep the order of the documents.

    Args:
      queries: the query vectors, float32.
      k: the number of documents, or all if there are fewer.

    Returns:
      Scores in float64, descending, and positions of the documents.

    Raises:
      ValueError: if k < 1, or the queries have another dim or are not finite.
    """
    queries = _check_finite("queries", queries)
    dim = self.vectors.shape[1]
    if k < 1 or queries.shape[1] != dim:
      raise ValueError(
        f"expected k >= 1 and queries of dim={dim}, got "
        f"k={k} and dim={queries.shape[1]}; use the encoder of the index"
      )
    k = min(k, len(self.vectors))
    scores = np.zeros((len(queries), k))
    positions = np.zeros((len(queries), k), np.int64)
    open_, width = np.arange(len(queries)), k
    while len(open_):
      width = min(width + max(width, _MARGIN), len(self.vectors))
      unsure = []
      for part in _blocks(open_, width):
        values, at, sure = self._search_candidates(queries[part], k, width)
        scores[part], positions[part] = values, at
        unsure.append(part[~sure])
      open_ = np.concatenate(unsure)
    return scores, positions

  def _search_candidates(
    self, queries: np.ndarray, k: int, width: int
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns scores, positions, and the mask of queries that are final."""
    rough, at = self.flat.search(queries, width)
    at = np.sort(at, axis=1)  # by position, the order of ties in a stable sort
    scores = _rescore(queries, self.vectors, at)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    scores = np.take_along_axis(scores, order, axis=1)
    at = np.take_along_axis(at, order, axis=1)
    # Other documents scored at most rough[:, -1] in faiss. A float32 sum of dim
    # products is off by at most dim * 2^-24 times the norms, and faiss rounds the
    # last product once more.
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

  Raises:
    ValueError: if there are no vectors, or one is not finite.
  """
  vectors = _check_finite("vectors", vectors)
  if not vectors.size:
    raise ValueError(
      f"expected document vectors, got shape {vectors.shape}; encode some"
    )
  flat = faiss.IndexFlatIP(vectors.shape[1])
  flat.add(vectors)
  longest = float(np.linalg.norm(vectors, axis=1).max())
  return Index(vectors, flat, longest)


def search_documents(
  built: Index,
  queries: Float[np.ndarray, "query dim"],
  owners: Int[np.ndarray, " passage"],
  depth: int,
) -> tuple[Float[np.ndarray, "query k"], Int[np.ndarray, "query k"]]:
  """Finds the documents whose best passages score highest.

  The search of a query is widened until it has enough documents. So a document
  with many good passages does not crowd out other documents.

  Args:
    built: an index of the passages.
    queries: the query vectors.
    owners: the position of each passage's document, ascending.
    depth: the number of documents for each query, or all if there are fewer.

  Returns:
    Scores, descending, and positions of the documents.
  """
  depth = min(depth, 1 + int(np.count_nonzero(np.diff(owners))))
  scores = np.zeros((len(queries), depth))
  documents = np.zeros((len(queries), depth), owners.dtype)
  open_, width = np.arange(len(queries)), 0
  while len(open_):
    width = min(max(2 * width, depth), len(owners))
    unmet = []
    for part in _blocks(open_, width):
      values, at = built.search(queries[part], width)
      ranked = owners[at]
      is_best = _is_first(ranked)
      is_met = is_best.sum(axis=1) >= depth
      columns = [np.flatnonzero(row)[:depth] for row in is_best[is_met]]
      picked = np.reshape(columns, (-1, depth)).astype(np.int64)
      done = part[is_met]
      scores[done] = np.take_along_axis(values[is_met], picked, axis=1)
      documents[done] = np.take_along_axis(ranked[is_met], picked, axis=1)
      unmet.append(part[~is_met])
    open_ = np.concatenate(unmet)
  return scores, documents


def _is_first(
  ranked: Int[np.ndarray, "query k"],
) -> Bool[np.ndarray, "query k"]:
  """Returns the mask of the first occurrence of each document in its row."""
  order = np.argsort(ranked, axis=1, kind="stable")
  ordered = np.take_along_axis(ranked, order, axis=1)
  first = np.ones_like(ordered, bool)
  first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
  is_first = np.zeros_like(first)
  np.put_along_axis(is_first, order, first, axis=1)
  return is_first
