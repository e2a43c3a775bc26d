"""Fuses the runs of a lexical and of a dense system.

Formal guarantee: post-processing. A fused run is a function of two runs and a
weight; `choose` reads nothing but the runs and judgements that it is given, so
that a weight chosen on released synthetic queries is as private as they are.

References:
  Bruch, Gai and Ingber, "An Analysis of Fusion Functions for Hybrid Retrieval",
  TOIS 2023, equations 3 and 5 (convex) and 6 (reciprocal ranks).
  Cormack, Clarke and Büttcher, "Reciprocal Rank Fusion outperforms Condorcet and
  individual Rank Learning Methods", SIGIR 2009.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from synthq_jax import checks
from synthq_jax.retrieval import measures, trec

__all__ = [
  "WEIGHTS",
  "Choice",
  "Convex",
  "ReciprocalRanks",
  "choose",
  "fuse",
  "scores",
]

_MEASURE = "nDCG@10"  # what is best
WEIGHTS = tuple(round(0.05 * i, 2) for i in range(21))
"""Shares of the dense run that are tried: 0, 0.05, ..., 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convex:
  """Scores of each query, moved to [0, 1] and averaged.

  A query's best result of a run gets 1 and `floor`, or the worst result where
  there is no floor, gets 0, and what lies below it; a document that a run does
  not hold gets 0 there.
  Results of which all score the same, in single precision, get 1.

  Attributes:
    lexical_floor: the least score that BM25 could give, 0; None: that of its
      results.
    dense_floor: the least score of the dense run; None: that of its results.
  """

  lexical_floor: float | None = None
  dense_floor: float | None = None

  def __post_init__(self):
    for floor in (self.lexical_floor, self.dense_floor):
      if floor is not None and not math.isfinite(floor):
        raise ValueError(
          f"a floor of Convex must be finite or None, got {floor}"
        )

  def values(
    self, scores: Mapping[str, float], *, dense: bool
  ) -> dict[str, float]:
    """Returns document id -> value in [0, 1], in the order of `scores`.

    Raises:
      ValueError: if all scores lie below the floor.
    """
    if not scores:
      return {}
    floor = self.dense_floor if dense else self.lexical_floor
    high = max(scores.values())
    low = min(scores.values()) if floor is None else floor
    if high < low:
      kind = "dense" if dense else "lexical"
      raise ValueError(
        f"expected {kind} scores of at least {low:g}, as {kind}_floor says, got"
        f" {high:g} at most; lower {kind}_floor, or set None"
      )
    width = high - low
    # Files of runs keep equal scores as ones that fall by single steps.
    if not width > len(scores) * np.spacing(np.float32(abs(high))):
      return dict.fromkeys(scores, 1.0)
    return {id_: max(score - low, 0.0) / width for id_, score in scores.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReciprocalRanks:
  """One over each document's rank, so that scores need no common scale.

  Attributes:
    k: is added to every rank, >= 0; the larger, the flatter.
  """

  k: float = 60.0

  def __post_init__(self):
    if not 0 <= self.k < math.inf:
      raise ValueError(f"ReciprocalRanks.k must be in [0, inf), got k={self.k}")

  def values(
    self, scores: Mapping[str, float], *, dense: bool
  ) -> dict[str, float]:
    """Returns document id -> 1 / (k + rank), best first."""
    del dense
    ranked = trec.ranking(scores)
    return {id_: 1 / (self.k + rank) for rank, id_ in enumerate(ranked, 1)}


Method = Convex | ReciprocalRanks


def fuse(
  method: Method,
  lexical: trec.Run,
  dense: trec.Run,
  *,
  weight: float,
  depth: int = 100,
) -> trec.Run:
  """Returns the run of the weighted mean of both systems' values.

  Equal values stand in the order of the lexical run, then of the dense one. A
  query that one run has no results for keeps the order of the other; one that
  neither has results for has none.

  >>> lexical = {"q": {"a": 9.0, "b": 3.0}}
  >>> dense = {"q": {"b": 0.9, "c": 0.1}}
  >>> fuse(Convex(), lexical, dense, weight=0.5)
  {'q': {'a': 0.5, 'b': 0.5, 'c': 0.0}}

  Args:
    method: how scores become comparable.
    lexical: query id -> document id -> finite score.
    dense: the same of the dense system.
    weight: share of the dense system, in [0, 1]; at 0 its documents follow those
      of the lexical one.
    depth: documents of each query, at most.

  Returns:
    Query id -> document id -> value, best first, for the queries of either.

  Raises:
    ValueError: if the weight is outside [0, 1], or a score is not finite.
  """
  if not 0 <= weight <= 1:
    raise ValueError(f"expected a weight in [0, 1], got weight={weight}")
  checks.at_least(1, depth=depth)
  fused: trec.Run = {}
  for query in {**lexical, **dense}:
    values: dict[str, float] = {}
    for is_dense, run in enumerate((lexical, dense)):
      share = weight if is_dense else 1 - weight
      scores = run.get(query, {})
      ranked = {id_: scores[id_] for id_ in trec.ranking(scores)}  # all finite
      for id_, value in method.values(ranked, dense=bool(is_dense)).items():
        values[id_] = values.get(id_, 0.0) + share * value
    best = trec.ranking(values)[:depth]
    fused[query] = {id_: values[id_] for id_ in best}
  return fused


def scores(
  method: Method,
  lexical: trec.Run,
  dense: trec.Run,
  qrels: trec.Qrels,
  weights: Sequence[float],
  *,
  depth: int = 100,
) -> dict[float, np.ndarray]:
  """Returns what each query scores at each weight.

  Args:
    method: how scores become comparable.
    lexical: the lexical run of the queries.
    dense: the dense one.
    qrels: what is relevant to them; at least one query.
    weights: shares of the dense system, in [0, 1].
    depth: documents of each query.

  Returns:
    Weight -> nDCG@10 [query], in the order of the judgements.

  Raises:
    ValueError: as `fuse`, or if nothing is judged.
  """
  values = {}
  for weight in weights:
    run = fuse(method, lexical, dense, weight=weight, depth=depth)
    found = measures.evaluate(
      qrels, run, (_MEASURE,), drop_identical=False
    ).per_query[_MEASURE]
    values[weight] = np.array([found[query] for query in qrels])
  return values


@dataclasses.dataclass(frozen=True)
class Choice:
  """A weight, and what each weight scored.

  Attributes:
    weight: the chosen one.
    scores: the mean of the measure at each weight that was tried, ascending.
  """

  weight: float
  scores: tuple[tuple[float, float], ...]


def choose(
  method: Method,
  lexical: trec.Run,
  dense: trec.Run,
  qrels: trec.Qrels,
  *,
  standard_errors: float = 1.0,
  depth: int = 100,
) -> Choice:
  """Finds the least dense weight that is about as good as the best.

  About as good is less than so many standard errors of the paired difference
  below the best: synthetic queries are nearer to a retriever that was trained on
  their like than real ones are, so that what they cannot tell apart is decided
  for BM25.

  Args:
    method: how scores become comparable.
    lexical: the lexical run of the queries.
    dense: the dense one.
    qrels: what is relevant to them; at least one query.
    standard_errors: at least 0; 0 takes the best, of equal ones the least.
    depth: documents of each query, at most.

  Returns:
    The weight, and the score of each.

  Raises:
    ValueError: as `fuse`, or if nothing is judged.

  References:
    Breiman, Friedman, Olshen and Stone, "Classification and Regression Trees",
    1984, section 3.4.3 (the rule of one standard error).
  """
  values = scores(method, lexical, dense, qrels, WEIGHTS, depth=depth)
  best = max(values, key=lambda weight: values[weight].mean())
  chosen = next(
    weight
    for weight, of_each in values.items()
    if _is_near(values[best] - of_each, standard_errors)
  )
  means = tuple((weight, float(one.mean())) for weight, one in values.items())
  return Choice(chosen, means)


def _is_near(losses: np.ndarray, standard_errors: float) -> bool:
  """Whether a mean loss is explained by so many of its standard errors."""
  error = losses.std(ddof=1) / len(losses) ** 0.5 if len(losses) > 1 else 0.0
  return bool(losses.mean() <= standard_errors * error)
