"""Puts the candidates of queries, such as BM25's best 100, in a new order."""

import functools
from collections.abc import Mapping

import jax
import numpy as np
from jaxtyping import Array, Float

from synthq_jax import typing
from synthq_jax.leakage.rerankers import _batches, interface
from synthq_jax.retrieval import trec

__all__ = ["rerank"]


def rerank(
  reranker: interface.Reranker,
  params: typing.Params,
  candidates: trec.Run,
  queries: Mapping[str, str],
  documents: Mapping[str, str],
  *,
  batch_size: int = 16,
  depth: int = 100,
) -> trec.Run:
  """Scores the best candidates of each query.

  Rows are batched by their own length, and batches are of one size, so that
  the score of a document depends on nothing but its query and its text.

  Args:
    reranker: whose parameters they are.
    params: from `train`, or from the reranker's `init`.
    candidates: query id -> document id -> score, of which only the order
      counts, as `trec.ranking` sees it.
    queries: the text of each query, by its id.
    documents: the text of each candidate, by its id.
    batch_size: rows scored at a time.
    depth: candidates of a query that are scored; the others are left out.

  Returns:
    The run: each query's documents by descending score, and by ascending
    document id where scores are equal, which `trec.ranking` keeps.

  Raises:
    ValueError: if a query or a candidate has no text, a score is not finite, or
      `batch_size` or `depth` is below 1.
  """
  if batch_size < 1 or depth < 1:
    raise ValueError(
      "expected batch_size and depth of at least 1, got"
      f" batch_size={batch_size}, depth={depth}"
    )
  kept = {id_: trec.ranking(run)[:depth] for id_, run in candidates.items()}
  pairs = [(query, document) for query in kept for document in kept[query]]
  _check_texts(pairs, queries, documents)
  scores = _score(
    reranker,
    params,
    reranker.featurize(
      [queries[query] for query, _ in pairs],
      [documents[document] for _, document in pairs],
    ),
    batch_size,
  )
  found: dict[str, dict[str, float]] = {query: {} for query in kept}
  for (query, document), score in zip(pairs, scores.tolist(), strict=True):
    found[query][document] = score
  return {query: _sorted(run) for query, run in found.items()}


def _check_texts(
  pairs: list[tuple[str, str]],
  queries: Mapping[str, str],
  documents: Mapping[str, str],
) -> None:
  for query, document in pairs:
    if query not in queries or document not in documents:
      kind, id_ = (
        ("document", document) if query in queries else ("query", query)
      )
      raise ValueError(
        f"expected a text for every candidate and its query, got none for"
        f" {kind} {id_!r}; give the collection that the candidates are from"
      )


def _sorted(run: Mapping[str, float]) -> dict[str, float]:
  """Orders documents by score, and by their id where scores are equal."""
  by_id = {document: run[document] for document in sorted(run)}
  return {document: run[document] for document in trec.ranking(by_id)}


def _score(
  reranker: interface.Reranker,
  params: typing.Params,
  features: interface.Features,
  batch_size: int,
) -> Float[np.ndarray, " row"]:
  """Scores rows in batches of one size and few widths, the widest first."""
  widths = _batches.widths(features, reranker.padded)
  scores = np.zeros(len(widths), np.float32)
  for width in sorted(set(widths.tolist()), reverse=True):
    members = np.flatnonzero(widths == width)
    for start in range(0, len(members), batch_size):
      rows = members[start : start + batch_size]
      batch = _batches.cut(
        features, reranker.padded, rows, width, size=batch_size
      )
      found = _score_batch(params, batch, reranker=reranker)
      scores[rows] = np.asarray(found)[: len(rows)]
  return scores


@functools.partial(jax.jit, static_argnames="reranker")
def _score_batch(
  params: typing.Params,
  batch: Mapping[str, Array],
  *,
  reranker: interface.Reranker,
) -> Float[Array, " batch"]:
  return reranker.score(params, batch)
