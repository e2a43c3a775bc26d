"""Whether a reranker remembers the documents that were leaked to it.

A reranker that learned from a test query's relevant document may rank that
document higher afterwards because it has seen it, and not because it understood
the query. So the same documents are looked at under a model that was trained
with them and under one that was trained without.

References:
  Fröbe, Akiki, Potthast and Hagen, "How Train-Test Leakage Affects Zero-shot
  Retrieval", SPIRE 2022, arXiv:2206.14759.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping

from synthq_jax.retrieval import trec

__all__ = ["DEPTH", "Memory", "average", "measure"]

DEPTH = 100
"""Documents of a ranking that count; one outside has the rank after them."""

Triple = tuple[str, str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
  """How a run treats leaked documents, one value for each test query.

  A value is the mean over the query's leaked instances. What it leaves out: a
  document that BM25 did not find cannot be ranked, however well it is known.

  Attributes:
    ranks: query id -> mean rank of the leaked relevant documents, 101 for one
      outside of the top 100. Less is better.
    offsets: query id -> mean of the rank of the leaked non-relevant document
      minus that of the relevant one; more is better.
    scores: query id -> mean score of the leaked relevant documents. Queries
      none of whose documents have a score are left out; scores of two kinds of
      models cannot be compared.
  """

  ranks: dict[str, float]
  offsets: dict[str, float]
  scores: dict[str, float]


def measure(
  run: trec.Run, triples: Iterable[Triple], *, depth: int = DEPTH
) -> Memory:
  """Looks leaked documents up in a run.

  >>> run = {"q": {"a": 3.0, "b": 1.0}}
  >>> measure(run, [("q", "b", "a"), ("q", "c", "a")])
  Memory(ranks={'q': 51.5}, offsets={'q': -50.5}, scores={'q': 1.0})

  Args:
    run: test query id -> document id -> score, of whichever model.
    triples: test query id, leaked relevant document, leaked non-relevant one;
      a document that stands in several counts in each.
    depth: documents of a ranking that count.

  Returns:
    Values for each test query of `triples`, in their order.

  Raises:
    ValueError: if there are no triples.
  """
  of_query: dict[str, list[Triple]] = {}
  for triple in triples:
    of_query.setdefault(triple[0], []).append(triple)
  if not of_query:
    raise ValueError(
      "expected leaked documents to look up, got none: build the training set"
      " with leakage"
    )
  ranks, offsets, scores = {}, {}, {}
  for query, group in of_query.items():
    found = trec.ranking(run.get(query, {}))[:depth]
    place = {document: rank for rank, document in enumerate(found, 1)}
    good = [place.get(each[1], depth + 1) for each in group]
    bad = [place.get(each[2], depth + 1) for each in group]
    ranks[query] = _mean(good)
    offsets[query] = _mean([b - g for g, b in zip(good, bad, strict=True)])
    known = [run[query][each[1]] for each in group if each[1] in place]
    if known:
      scores[query] = _mean(known)
  return Memory(ranks=ranks, offsets=offsets, scores=scores)


def average(values: Iterable[Mapping[str, float]]) -> dict[str, float]:
  """Averages repetitions query by query.

  >>> average([{"q": 1.0}, {"q": 2.0}])
  {'q': 1.5}

  Args:
    values: query id -> value, one mapping for each repetition.

  Returns:
    Query id -> mean over the repetitions.

  Raises:
    ValueError: if there are none, or their queries differ.
  """
  values = list(values)
  if not values or any(each.keys() != values[0].keys() for each in values):
    raise ValueError(
      f"expected repetitions on the same queries, got {len(values)} of them"
      " with other queries: score all on one test set"
    )
  return {query: _mean([v[query] for v in values]) for query in values[0]}


def _mean(values: list[float]) -> float:
  return math.fsum(values) / len(values)
