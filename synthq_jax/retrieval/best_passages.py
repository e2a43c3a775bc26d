"""Finds documents by their best passages."""

import numpy as np
from jaxtyping import Bool, Float, Int

from synthq_jax.retrieval import index

__all__ = ["documents"]


def documents(
  built: index.Index,
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
    for part in index.blocks(open_, width):
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
