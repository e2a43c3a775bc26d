"""Statistics of the leakage study: chosen sizes and memorisation.

The size of a training set is a setting, so it is chosen on other queries than
those that are scored. The test queries are cut into folds. The queries of a fold
are scored with the size that is best on the other folds. The study then compares
one value for each test query, with and without leakage. Test queries are the
units of every test; repetitions of a training are averaged before.

A reranker that learned from a test query's relevant document may rank it higher
because it has seen the document, not because it understood the query. So
`measure_memory` ranks the same documents under a model that was trained with
them and under one that was trained without.

References:
  Fröbe, Akiki, Potthast and Hagen, "How Train-Test Leakage Affects Zero-shot
  Retrieval", SPIRE 2022, arXiv:2206.14759.
  Stone, "Cross-Validatory Choice and Assessment of Statistical Predictions",
  Journal of the Royal Statistical Society B, 1974.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from synthq_jax.retrieval import trec

__all__ = [
  "FEWER_IS_BETTER",
  "Chosen",
  "Memory",
  "average",
  "choose_sizes",
  "make_folds",
  "measure_memory",
]

Leaked = tuple[str, str, str]

FEWER_IS_BETTER = frozenset({"MFR"})
"""Measures for which a smaller value is better."""

PerQuery = Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
  """The result of a cross-validated choice of sizes.

  Attributes:
    per_query: query id -> value, under the size chosen without its fold.
    sizes: size chosen for each fold.
  """

  per_query: dict[str, float]
  sizes: tuple[int, ...]


def make_folds(
  queries: Sequence[str], number: int, *, seed: int
) -> tuple[tuple[str, ...], ...]:
  """Divides queries into random folds whose sizes differ by at most one.

  >>> [len(fold) for fold in make_folds(["a", "b", "c", "d", "e"], 2, seed=0)]
  [3, 2]

  Args:
    queries: ids of queries; their order does not matter.
    number: number of folds, from 2 to the number of queries.
    seed: seed of the folds.

  Raises:
    ValueError: if there are too few queries or folds.
  """
  if not 2 <= number <= len(queries):
    raise ValueError(
      f"expected 2 to {len(queries)} folds of {len(queries)} queries, got"
      f" {number}: change the number of folds, or give more test queries"
    )
  ordered = sorted(queries)
  order = np.random.default_rng(seed).permutation(len(ordered))
  return tuple(
    tuple(ordered[index] for index in order[first::number])
    for first in range(number)
  )


def choose_sizes(
  of_size: Mapping[int, PerQuery],
  folds: Sequence[Sequence[str]],
  *,
  fewer_is_better: bool = False,
) -> Chosen:
  """Scores every query with the size that is best on the other folds.

  Of two equally good sizes, the smaller is chosen.

  >>> of_size = {1: {"a": 1.0, "b": 0.0}, 2: {"a": 0.5, "b": 0.5}}
  >>> choose_sizes(of_size, [["a"], ["b"]])
  Chosen(per_query={'a': 0.5, 'b': 0.0}, sizes=(2, 1))

  Args:
    of_size: size of the training set -> query id -> value.
    folds: folds of all queries, from `make_folds`.
    fewer_is_better: whether the smallest mean is best.
  """
  queries = {query for fold in folds for query in fold}
  sign = -1 if fewer_is_better else 1
  per_query: dict[str, float] = {}
  sizes = []
  for fold in folds:
    others = sorted(queries - set(fold))
    means = {
      size: sign * math.fsum(values[query] for query in others)
      for size, values in of_size.items()
    }
    best = min(means, key=lambda size: (-means[size], size))
    sizes.append(best)
    per_query |= {query: of_size[best][query] for query in fold}
  return Chosen(per_query=per_query, sizes=tuple(sizes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
  """Ranks and scores of leaked documents in a run, by test query.

  A value is a mean over the query's leaked triples. A document's rank is its rank
  among BM25's candidates; a document that BM25 missed is inserted by its score.

  Attributes:
    ranks: query id -> mean rank of the leaked relevant documents. Less is
      better.
    offsets: query id -> mean difference of ranks: the leaked non-relevant
      document's minus the relevant one's. More is better.
    scores: query id -> mean score of the leaked relevant documents; scores of
      two kinds of models cannot be compared.
  """

  ranks: dict[str, float]
  offsets: dict[str, float]
  scores: dict[str, float]


def measure_memory(
  run: trec.Run, candidates: trec.Run, leaked: Iterable[Leaked]
) -> Memory:
  """Looks up the ranks and scores of leaked documents in a run.

  >>> run = {"q": {"a": 3.0, "b": 2.0, "c": 1.0}}
  >>> measure_memory(run, {"q": {"a": 9.0, "c": 8.0}}, [("q", "b", "a"), ("q", "c", "a")])
  Memory(ranks={'q': 2.0}, offsets={'q': -1.0}, scores={'q': 1.5})

  Args:
    run: test query id -> document id -> score under any model, for candidates
      and all leaked documents.
    candidates: test query id -> candidates, among which documents are ranked.
    leaked: test query id, leaked relevant document, leaked non-relevant one. A
      document of several triples counts in each.

  Returns:
    Values for each test query of `leaked`, in their order.
  """
  of_query: dict[str, list[Leaked]] = {}
  for each in leaked:
    of_query.setdefault(each[0], []).append(each)
  ranks, offsets, scores = {}, {}, {}
  for query, group in of_query.items():
    document_ranks = _compute_ranks(run[query], candidates[query])
    ranks[query] = _compute_mean([document_ranks[good] for _, good, _ in group])
    offsets[query] = _compute_mean(
      [document_ranks[bad] - document_ranks[good] for _, good, bad in group]
    )
    scores[query] = _compute_mean([run[query][good] for _, good, _ in group])
  return Memory(ranks=ranks, offsets=offsets, scores=scores)


def _compute_ranks(
  scored: Mapping[str, float], candidates: Mapping[str, float]
) -> dict[str, int]:
  """Returns each document's rank among the candidates and itself."""
  ranks, before = {}, 0
  for document in trec.ranking(scored):
    ranks[document] = before + 1
    before += document in candidates
  return ranks


def average(values: Iterable[Mapping[str, float]]) -> dict[str, float]:
  """Averages repetitions for each query.

  >>> average([{"q": 1.0}, {"q": 2.0}])
  {'q': 1.5}

  Args:
    values: query id -> value, one mapping for each repetition.

  Returns:
    Query id -> mean over the repetitions. Queries are sorted by id, because a
    bootstrap depends on their order.

  Raises:
    ValueError: if repetitions have different queries.
  """
  values = list(values)
  if any(each.keys() != values[0].keys() for each in values):
    raise ValueError(
      "expected the same queries in every repetition, got others: score one list"
      " of queries with each"
    )
  return {
    query: _compute_mean([each[query] for each in values])
    for query in sorted(values[0])
  }


def _compute_mean(values: list[float]) -> float:
  return math.fsum(values) / len(values)
