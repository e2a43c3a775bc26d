"""Finds documents by their best passages."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from synthq_jax.retrieval import index

__all__ = ["documents", "nearest"]


def documents(
  built: index.Index | index.Graph,
  queries: Float[np.ndarray, "query dim"],
  owners: Int[np.ndarray, " passage"],
  depth: int,
) -> tuple[Float[np.ndarray, "query k"], Int[np.ndarray, "query k"]]:
  """Finds the documents whose best passages score highest.

  The search is widened until every query has found enough documents, so that
  one of many good passages takes no place of another.

  Args:
    built: an index of the passages.
    queries: the query vectors.
    owners: the position of each passage's document, ascending.
    depth: documents of each query; all of them where there are fewer.

  Returns:
    Scores, descending, and positions of the documents.
  """
  depth, width = min(depth, int(owners[-1]) + 1), 0
  while True:
    width = min(max(2 * width, depth), len(owners))
    scores, at = built.search(queries, width)
    found = owners[at]
    order = np.argsort(found, axis=1, kind="stable")
    ordered = np.take_along_axis(found, order, axis=1)
    first = np.ones_like(ordered, bool)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    is_best = np.zeros_like(first)
    np.put_along_axis(is_best, order, first, axis=1)
    if width == len(owners) or is_best.sum(axis=1).min(initial=depth) >= depth:
      break
  kept = [np.flatnonzero(row)[:depth] for row in is_best]
  if not kept:
    return scores[:, :depth], found[:, :depth]
  picked = np.stack(kept)
  return (
    np.take_along_axis(scores, picked, axis=1),
    np.take_along_axis(found, picked, axis=1),
  )


def nearest(
  passages: Any,
  queries: Float[np.ndarray, "query dim"],
  documents: Sequence[Int[np.ndarray, " candidate"]],
  vectors: Float[np.ndarray, "passage dim"],
) -> list[Int[np.ndarray, " candidate"]]:
  """Returns which passage stands for each document: the one nearest the query.

  Args:
    passages: a `data.passages.Passages`.
    queries: their vectors.
    documents: positions of some documents for each query.
    vectors: of all passages.
  """
  chosen = []
  for query, places in zip(queries, documents, strict=True):
    starts, ends = passages.of(places)
    for place in np.flatnonzero(ends - starts > 1):
      first, end = starts[place], ends[place]
      starts[place] = first + np.argmax(vectors[first:end] @ query)
    chosen.append(starts)
  return chosen
