"""Statistics of the study of leakage: chosen sizes, tests, and memorisation.

How large a training set should be is a setting like any other, so it is chosen
on other queries than those it is scored on: test queries are cut into folds,
and the queries of a fold are scored with the size that is best on the other
folds. What is compared is then one value for each test query, with leakage and
without; test queries are the units of every test, and repetitions of a training
are averaged before.

A reranker that learned from a test query's relevant document may rank that
document higher afterwards because it has seen it, and not because it understood
the query. So the same documents are looked at under a model that was trained
with them and under one that was trained without (`memory`).

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
  "folds_of",
  "memory",
  "order",
]

Leaked = tuple[str, str, str]

FEWER_IS_BETTER = frozenset({"MFR"})
"""Measures of which a smaller value is better."""

PerQuery = Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
  """What a cross-validated grid search gives.

  Attributes:
    per_query: query id -> value, under the size chosen without its fold.
    sizes: the size chosen for each fold.
  """

  per_query: dict[str, float]
  sizes: tuple[int, ...]


def folds_of(
  queries: Sequence[str], number: int, *, seed: int
) -> tuple[tuple[str, ...], ...]:
  """Cuts queries into folds of sizes that differ by one at most.

  >>> [len(fold) for fold in folds_of(["a", "b", "c", "d", "e"], 2, seed=0)]
  [3, 2]

  Args:
    queries: ids; their order does not matter.
    number: of folds, from 2 to the number of queries.
    seed: another seed gives other folds.

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
    tuple(ordered[place] for place in order[first::number])
    for first in range(number)
  )


def choose_sizes(
  of_size: Mapping[int, PerQuery],
  folds: Sequence[Sequence[str]],
  *,
  fewer_is_better: bool = False,
) -> Chosen:
  """Scores every query with the size that is best on the other folds.

  The smaller of two equally good sizes is chosen.

  >>> of_size = {1: {"a": 1.0, "b": 0.0}, 2: {"a": 0.5, "b": 0.5}}
  >>> choose_sizes(of_size, [["a"], ["b"]])
  Chosen(per_query={'a': 0.5, 'b': 0.0}, sizes=(2, 1))

  Args:
    of_size: size of the training set -> query id -> value.
    folds: of all queries, from `folds_of`.
    fewer_is_better: whether the smallest mean is best.

  Raises:
    ValueError: if a size lacks a query.
  """
  queries = {query for fold in folds for query in fold}
  for size, values in of_size.items():
    if queries != values.keys():
      raise ValueError(
        f"expected values of {len(queries)} queries for size {size}, got"
        f" {len(values)}: score all sizes on one test set"
      )
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


def order(means: Mapping[str, float], measure: str) -> list[str]:
  """Returns systems from best to worst; of equals the first stays first.

  >>> order({"a": 2.0, "b": 1.0}, "MFR")
  ['b', 'a']
  """
  sign = 1 if measure in FEWER_IS_BETTER else -1
  return sorted(means, key=lambda name: sign * means[name])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
  """How a run treats leaked documents, one value for each test query.

  A value is the mean over what was leaked of the query. A document's rank is
  that among BM25's candidates; one that BM25 missed is inserted by its score.

  Attributes:
    ranks: query id -> mean rank of the leaked relevant documents. Less is
      better.
    offsets: query id -> mean of the rank of the leaked non-relevant document
      minus that of the relevant one; more is better.
    scores: query id -> mean score of the leaked relevant documents; scores of
      two kinds of models cannot be compared.
  """

  ranks: dict[str, float]
  offsets: dict[str, float]
  scores: dict[str, float]


def memory(
  run: trec.Run, candidates: trec.Run, leaked: Iterable[Leaked]
) -> Memory:
  """Looks leaked documents up in a run.

  >>> run = {"q": {"a": 3.0, "b": 2.0, "c": 1.0}}
  >>> memory(run, {"q": {"a": 9.0, "c": 8.0}}, [("q", "b", "a"), ("q", "c", "a")])
  Memory(ranks={'q': 2.0}, offsets={'q': -1.0}, scores={'q': 1.5})

  Args:
    run: test query id -> document id -> score, of whichever model: candidates,
      and everything that leaked.
    candidates: those of them among which a document has its rank.
    leaked: test query id, leaked relevant document, leaked non-relevant one;
      a document that stands in several counts in each.

  Returns:
    Values for each test query of `leaked`, in their order.

  Raises:
    ValueError: if nothing leaked, or a document has no score.
  """
  of_query: dict[str, list[Leaked]] = {}
  for each in leaked:
    of_query.setdefault(each[0], []).append(each)
  if not of_query:
    raise ValueError(
      "expected leaked documents to look up, got none: build the training set"
      " with leakage"
    )
  ranks, offsets, scores = {}, {}, {}
  for query, group in of_query.items():
    place = _ranks(run.get(query, {}), candidates.get(query, {}))
    missing = {id_ for each in group for id_ in each[1:]} - place.keys()
    if missing:
      raise ValueError(
        "expected scores of all leaked documents of a query, got none of"
        f" {len(missing)}: score them with the candidates"
      )
    ranks[query] = _mean([place[good] for _, good, _ in group])
    offsets[query] = _mean([place[bad] - place[good] for _, good, bad in group])
    scores[query] = _mean([run[query][good] for _, good, _ in group])
  return Memory(ranks=ranks, offsets=offsets, scores=scores)


def _ranks(
  scored: Mapping[str, float], candidates: Mapping[str, float]
) -> dict[str, int]:
  """Returns each document's rank among the candidates and itself."""
  ranks, before = {}, 0
  for document in trec.ranking(scored):
    ranks[document] = before + 1
    before += document in candidates
  return ranks


def average(values: Iterable[Mapping[str, float]]) -> dict[str, float]:
  """Averages repetitions query by query.

  >>> average([{"q": 1.0}, {"q": 2.0}])
  {'q': 1.5}

  Args:
    values: query id -> value, one mapping for each repetition.

  Returns:
    Query id -> mean over the repetitions, in the order of the ids, on which a
    bootstrap depends.

  Raises:
    ValueError: if there are none, or their queries differ.
  """
  values = list(values)
  if not values or any(each.keys() != values[0].keys() for each in values):
    raise ValueError(
      f"expected repetitions on the same queries, got {len(values)} of them"
      " with other queries: score all on one test set"
    )
  return {
    query: _mean([each[query] for each in values])
    for query in sorted(values[0])
  }


def _mean(values: list[float]) -> float:
  return math.fsum(values) / len(values)
