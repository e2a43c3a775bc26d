"""Fuses the runs of a lexical and of a dense system.

Formal guarantee: post-processing. A fused run is a function of two runs and a
weight. `choose` reads only its arguments, runs and judgements. So a fusion weight
chosen on released synthetic queries is as private as they are.

References:
  Bruch, Gai and Ingber, "An Analysis of Fusion Functions for Hybrid Retrieval",
  TOIS 2023, equations 3 and 5.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from synthq_jax import checks
from synthq_jax.retrieval import measures, trec

__all__ = [
  "WEIGHTS",
  "Choice",
  "choose",
  "fuse",
  "scale",
]

_MEASURE = "nDCG@10"  # the measure that `choose` maximises
WEIGHTS = tuple(round(0.05 * i, 2) for i in range(21))
"""Fusion weights that `choose` tries: 0, 0.05, ..., 1, shares of the dense run."""


def scale(scores: Mapping[str, float]) -> dict[str, float]:
  """Scales the scores of one query to [0, 1]: the best gets 1, the worst 0.

  If they are within one float32 step per result, all results get 1.

  Returns:
    Document id -> value, in the order of `scores`.
  """
  if not scores:
    return {}
  low, high = min(scores.values()), max(scores.values())
  width = high - low
  # Run files store equal scores as scores that fall by single float32 steps.
  if not width > len(scores) * np.spacing(np.float32(abs(high))):
    return dict.fromkeys(scores, 1.0)
  return {id_: (score - low) / width for id_, score in scores.items()}


def fuse(
  lexical: trec.Run,
  dense: trec.Run,
  *,
  weight: float,
  depth: int = 100,
) -> trec.Run:
  """Ranks documents by the weighted mean of both systems' scaled scores.

  `scale` makes the scores of a query comparable. A document that a run lacks gets 0
  there.

  Equal values keep the order of the lexical run, then of the dense run. If one run
  has no results for a query, the order of the other run is kept. If neither has
  results, the query has none.

  >>> lexical = {"q": {"a": 9.0, "b": 3.0}}
  >>> dense = {"q": {"b": 0.9, "c": 0.1}}
  >>> fuse(lexical, dense, weight=0.5)
  {'q': {'a': 0.5, 'b': 0.5, 'c': 0.0}}

  Args:
    lexical: query id -> document id -> finite score.
    dense: the same for the dense system.
    weight: the share of the dense system, in [0, 1]; at 0 its documents follow
      those of the lexical system.
    depth: the most documents of each query.

  Returns:
    Query id -> document id -> value, best first, for the queries of either.

  Raises:
    ValueError: if the weight is outside [0, 1], a score is not finite, or an id
      is no text.
  """
  if not 0 <= weight <= 1:
    raise ValueError(f"expected a weight in [0, 1], got weight={weight}")
  checks.at_least(1, depth=depth)
  fused: trec.Run = {}
  queries = {**lexical, **dense}
  trec.check_ids("query", queries)
  for query in queries:
    values: dict[str, float] = {}
    for is_dense, run in enumerate((lexical, dense)):
      share = weight if is_dense else 1 - weight
      scores = run.get(query, {})
      ranked = {id_: scores[id_] for id_ in trec.ranking(scores)}  # all finite
      for id_, value in scale(ranked).items():
        values[id_] = values.get(id_, 0.0) + share * value
    best = trec.ranking(values)[:depth]
    fused[query] = {id_: values[id_] for id_ in best}
  return fused


@dataclasses.dataclass(frozen=True)
class Choice:
  """The chosen fusion weight, and the scores of all weights.

  Attributes:
    weight: the chosen weight.
    scores: (weight, mean of the measure) for each tried weight, ascending.
  """

  weight: float
  scores: tuple[tuple[float, float], ...]


def choose(
  lexical: trec.Run,
  dense: trec.Run,
  qrels: trec.Qrels,
  *,
  standard_errors: float,
  depth: int,
) -> Choice:
  """Chooses the least dense weight that is about as good as the best.

  A weight is about as good if its mean is at most `standard_errors` standard errors
  of the paired difference below the best. Synthetic queries favour a retriever that
  was trained on similar queries, more than real queries do. So a tie is decided in
  favour of BM25.

  Args:
    lexical: the lexical run of the queries.
    dense: the dense run of the queries.
    qrels: the judgements of the queries; at least one query.
    standard_errors: the tolerance, at least 0; 0 chooses the best weight, and the
      least of equally good weights.
    depth: the most documents of each query.

  Raises:
    ValueError: as `fuse`, or if no query is judged.

  References:
    Breiman, Friedman, Olshen and Stone, "Classification and Regression Trees",
    1984, section 3.4.3 (the rule of one standard error).
  """
  values = {}
  for weight in WEIGHTS:
    run = fuse(lexical, dense, weight=weight, depth=depth)
    evaluation = measures.evaluate(
      qrels, run, (_MEASURE,), drop_identical=False
    )
    per_query = evaluation.per_query[_MEASURE]
    values[weight] = np.array([per_query[query] for query in qrels])
  best = max(values, key=lambda weight: values[weight].mean())
  chosen = next(
    weight
    for weight, scored in values.items()
    if _is_near(values[best] - scored, standard_errors)
  )
  means = tuple((weight, float(v.mean())) for weight, v in values.items())
  return Choice(chosen, means)


def _is_near(losses: np.ndarray, standard_errors: float) -> bool:
  """Checks whether a mean loss is at most so many of its standard errors."""
  error = losses.std(ddof=1) / len(losses) ** 0.5 if len(losses) > 1 else 0.0
  return bool(losses.mean() <= standard_errors * error)
