"""Measures of a ranking, computed by ir-measures as trec_eval defines them."""

import dataclasses
import math
from collections.abc import Sequence

import ir_measures

from synthq_jax.retrieval import trec

__all__ = ["DEFAULT", "Evaluation", "evaluate"]

DEFAULT = ("nDCG@10", "R@10", "RR@10")
"""The measures of the papers' tables."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """What `evaluate` found.

  Private when its queries are: publish neither values nor means of private
  queries without saying so.

  Attributes:
    mean: measure name -> mean over all judged queries.
    per_query: measure name -> query id -> value, for all judged queries.
    drop_identical: whether results with the query's own id were left out.
    num_dropped: how many results that were.
    level: the lowest grade that counts as relevant in measures that know only
      relevant or not.
  """

  mean: dict[str, float]
  per_query: dict[str, dict[str, float]]
  drop_identical: bool
  num_dropped: int
  level: int


def evaluate(
  qrels: trec.Qrels,
  run: trec.Run,
  names: Sequence[str] = DEFAULT,
  *,
  drop_identical: bool = True,
  level: int = 1,
) -> Evaluation:
  """Scores a run against judgements.

  The mean is over ALL judged queries: a query without results, or without any
  relevant document, counts 0. Queries of the run that nobody judged are left
  out, and documents nobody judged count as not relevant: a system that finds
  good documents which the judges never saw is scored too low. nDCG's gain is
  the grade itself; a recall is the share of the relevant documents found.

  >>> evaluate({"q": {"a": 1}}, {"q": {"b": 2.0, "a": 1.0}}, ("RR@10",)).mean
  {'RR@10': 0.5}

  Args:
    qrels: query id -> document id -> grade.
    run: query id -> document id -> score. Ties keep the order of the run.
    names: names of ir-measures such as "nDCG@10", "R@100", "RR@10"; "Recall"
      and "MRR" are taken for "R" and "RR".
    drop_identical: leave out a result whose id equals its query's id, as BEIR
      does for collections that hold their own queries (ArguAna, Quora). Where
      ids are bare numbers, as in MS MARCO, equality may be chance: pass False.
    level: the lowest grade that counts as relevant in binary measures (2 for
      TREC Deep Learning); names that say rel=... themselves keep it.

  Returns:
    Means and values per query, under the names given.

  Raises:
    ValueError: if nothing is judged, a name is unknown, a score is not finite,
      or dropping would take away a document judged relevant to its query.
  """
  if not qrels:
    raise ValueError("expected judged queries, got qrels={}; check the split")
  if drop_identical:
    _check_identical(qrels)
  measures = {name: _measure(name, level) for name in names}
  ranks, dropped = _ranks(qrels, run, drop_identical)
  found = ir_measures.iter_calc(set(measures.values()), qrels, ranks)
  values = {(each.measure, each.query_id): float(each.value) for each in found}
  per_query = {
    name: {query: values[measure, query] for query in qrels}
    for name, measure in measures.items()
  }
  mean = {
    name: math.fsum(scores.values()) / len(scores)
    for name, scores in per_query.items()
  }
  return Evaluation(mean, per_query, drop_identical, dropped, level)


def _ranks(
  qrels: trec.Qrels, run: trec.Run, drop_identical: bool
) -> tuple[trec.Run, int]:
  """Replaces scores by negated ranks, so that no rounding makes ties."""
  ranks, dropped = {}, 0
  for query in qrels:
    ids = trec.ranking(run.get(query, {}))
    kept = [id_ for id_ in ids if not (drop_identical and id_ == query)]
    dropped += len(ids) - len(kept)
    if kept:
      ranks[query] = {id_: -float(rank) for rank, id_ in enumerate(kept)}
  return ranks, dropped


def _check_identical(qrels: trec.Qrels) -> None:
  """Refuses to drop what the judgements call relevant."""
  for query, grades in qrels.items():
    if grades.get(query, 0) > 0:
      raise ValueError(
        f"expected no document with its query's id among the relevant, got "
        f"{query!r}; pass drop_identical=False"
      )


def _check_cutoff(cutoff: float) -> None:
  if not isinstance(cutoff, int) or cutoff < 1:
    raise ValueError(f"the cutoff is a whole number above 0, got {cutoff}")


def _measure(name: str, level: int) -> ir_measures.Measure:
  """Reads a measure's name and sets its level of relevance."""
  try:
    measure = ir_measures.parse_measure(name)
    measure.validate_params()
    _check_cutoff(measure.params.get("cutoff", 1))
  except (NameError, ValueError, TypeError, AssertionError) as error:
    raise ValueError(
      f"expected a measure such as nDCG@10, R@10 or RR@10, got {name!r} "
      f"({error}); see the list of ir-measures"
    ) from error
  if "rel" in measure.SUPPORTED_PARAMS and "rel" not in measure.params:
    return measure(rel=level)
  return measure
