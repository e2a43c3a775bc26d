"""Evaluates runs with the measures of ir-measures, as in trec_eval, and with MFR.

MFR is the mean rank of the first relevant document. All measures use the same
ranking of each query.
"""

import dataclasses
import math
import operator
import re
from collections.abc import Collection, Sequence
from typing import SupportsIndex

from synthq_jax import extras
from synthq_jax.data import collection
from synthq_jax.retrieval import trec

with extras.required("run"):
  import ir_measures
  import ir_measures.providers

__all__ = [
  "ALL", "DEFAULT", "OWN_ID", "Evaluation", "check", "evaluate", "is_share",
]  # fmt: skip

DEFAULT = ("nDCG@10", "R@10", "RR@10")
"""nDCG@10 and R@10 of the query-synthesis papers, RR@10 of the thesis."""

ALL = (*DEFAULT, "R@1", "R@20", "R@100", "P@1", "MFR")
"""All measures that one of the papers reports."""

OWN_ID = "A result with its query's own id is"
"""The beginning of the sentence on results with their query's own id."""

_FIRST_RANK = re.compile(r"MFR((?:\(rel=\d+\))?)((?:@\d+)?)")
_MFR_CUTOFF = "@100"
_PLAIN = frozenset(("cutoff", "rel"))
# Providers without a need for Perl or subtopics, that work without a result, too.
_PROVIDERS = ("pytrec_eval", "msmarco", "judged", "compat", "cwl_eval")
_SHARES = frozenset(
  "nDCG AP RR R P Success Rprec Bpref infAP SetP SetR SetF SetAP Judged IPrec"
  " Compat RBP".split()
)

Rankings = dict[str, list[str]]


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """The scores of a run, and the conventions of the evaluation.

  Scores of private queries are private, and so are their means. To publish means,
  add noise, as `stages.release_scores` does.

  Attributes:
    mean: measure name -> mean over all judged queries.
    per_query: measure name -> query id -> value, for all judged queries.
    drop_identical: whether results with the query's own id were left out.
    num_dropped: the number of results of the run that were left out for their
      query's own id; a search may have left out others.
    level: the lowest grade that counts as relevant in binary measures.
    num_queries: the number of judged queries, which all count.
    num_without_results: the number of judged queries without a result, apart from
      a dropped one with their own id.
    num_without_relevant: the number of judged queries without a document of grade
      `level` or more.
    depth: the largest number of results of a query.
    split: the split of the judgements, or "" if none was named.
  """

  mean: dict[str, float]
  per_query: dict[str, dict[str, float]]
  drop_identical: bool
  num_dropped: int
  level: int
  num_queries: int
  num_without_results: int
  num_without_relevant: int
  depth: int
  split: str = ""

  @property
  def traps(self) -> tuple[str, ...]:
    """Sentences on conventions that differ between evaluations; see `met`."""
    dropped = "dropped, unless it is judged relevant"
    return (
      "Averages are over all judged queries; one without results counts 0 (in"
      " MFR the rank after the cut), and so does one without a relevant"
      " document.",
      f"Relevant is a grade of {self.level} or more, but nDCG's gain is the"
      " grade itself; documents nobody judged are not relevant.",
      f"{OWN_ID} {dropped if self.drop_identical else 'kept'}.",
      "Ties are broken before scoring: a run is strictly ordered, and equal"
      " scores keep its order.",
    )

  @property
  def met(self) -> str:
    """A sentence on the number of queries and results that they affected."""
    split = f" of split {self.split!r}" if self.split else ""
    # A search may have dropped them before: 0 here does not mean that none was.
    dropped = (
      f"results dropped for their query's own id: {self.num_dropped}; "
      * (self.num_dropped > 0)
    )
    return (
      f"{self.num_queries} judged queries{split}, {self.num_without_results} of"
      f" them without results and {self.num_without_relevant} without a relevant"
      f" document; {dropped}results of a query: {self.depth} at most, and a deeper"
      " cut sees no more."
    )


def check(
  names: Sequence[str], level: int = 1, depth: int | None = None
) -> None:
  """Refuses measure names that `evaluate` would refuse, or would cut short.

  >>> check(("nDCG@10", "MFR"), depth=100)

  Args:
    names: as in `evaluate`.
    level: as in `evaluate`.
    depth: results of a run for each query; None: any number.

  Raises:
    ValueError: if there are no names, or one is unknown, cannot be computed
      here, or looks at more results than a run has.
  """
  if not names:
    raise ValueError("expected a measure such as nDCG@10, got none")
  for name in names:
    cutoff = _parse_measure(name, level).params.get("cutoff", 0)  # 0: none
    if depth is not None and cutoff > depth:
      raise ValueError(
        f"expected measures of at most depth={depth} results, got {name}, which"
        f" looks at {cutoff}: raise depth"
      )


def is_share(name: str) -> bool:
  """Checks whether a measure lies in [0, 1] for every query.

  >>> is_share("nDCG@10"), is_share("MFR"), is_share("NumRel")
  (True, False, False)
  """
  measure = _parse_measure(name, 1)
  return not _FIRST_RANK.fullmatch(name) and measure.NAME in _SHARES


def evaluate(
  qrels: trec.Qrels,
  run: trec.Run,
  names: Sequence[str] = DEFAULT,
  *,
  drop_identical: bool = True,
  level: int = 1,
  split: str = "",
) -> Evaluation:
  """Scores a run against judgements.

  The mean is over ALL judged queries: a query without results, or without any
  relevant document, counts 0. Unjudged queries of the run are left out, and
  unjudged documents count as not relevant. So a system that finds good documents
  which the judges never saw is scored too low. The gain in nDCG is the grade itself
  (0 for a negative one). Recall is the share of the relevant documents that the run
  finds.

  MFR is the mean rank of the first relevant document, and less is better. A query
  without a relevant document among the first 100 counts 101. This includes queries
  without results, and queries without any relevant document.

  >>> names = ("RR@10", "MFR")
  >>> evaluate({"q": {"a": 1}}, {"q": {"b": 2.0, "a": 1.0}}, names).mean
  {'RR@10': 0.5, 'MFR': 2.0}

  Args:
    qrels: query id -> document id -> grade.
    run: query id -> document id -> score. Ties keep the order of the run.
    names: names of ir-measures such as "nDCG@10", "R@100", "RR@10", "P@1".
      "Recall" and "MRR" stand for "R" and "RR". "MFR" is "MFR@100".
    drop_identical: leave out a result whose id equals its query's id, as BEIR
      does for collections that hold their own queries (ArguAna, Quora). If ids
      are bare numbers, as in MS MARCO, equality may be chance: pass False. A
      document that is judged relevant always stays.
    level: the lowest grade that counts as relevant in binary measures, >= 1 (2
      for TREC Deep Learning). Names with rel=... keep their own level.
    split: the split of the judgements, which is only named in the result.

  Returns:
    Means and values per query, under the given names.

  Raises:
    ValueError: if no query is judged, a name is unknown, `level` is below 1, a
      score is not finite, an id is no text, or a grade is no whole number.

  References:
    Fröbe et al., "How Train-Test Leakage Affects Zero-shot Retrieval", SPIRE
    2022 (MFR).
  """
  if not qrels:
    raise ValueError("expected judged queries, got qrels={}; check the split")
  if level < 1:
    raise ValueError(
      f"expected level >= 1, got level={level}: documents nobody judged have "
      "grade 0; raise it"
    )
  measures = {name: _parse_measure(name, level) for name in names}
  qrels = _check_qrels(qrels)
  trec.check_ids("query", run)
  rankings, dropped = _make_rankings(qrels, run, drop_identical)
  values = _call_ir_measures(set(measures.values()), qrels, rankings)
  per_query = {
    name: {q: values.get((measure, q), 0.0) for q in qrels}
    for name, measure in measures.items()
  }
  for name in filter(_FIRST_RANK.fullmatch, names):
    last = measures[name].params["cutoff"]
    per_query[name] = {
      query: float(round(1 / value)) if value else last + 1.0
      for query, value in per_query[name].items()
    }
  return Evaluation(
    mean={
      name: math.fsum(scores.values()) / len(scores)
      for name, scores in per_query.items()
    },
    per_query=per_query,
    drop_identical=drop_identical,
    num_dropped=dropped,
    level=level,
    num_queries=len(qrels),
    num_without_results=sum(not ids for ids in rankings.values()),
    num_without_relevant=sum(
      max(grades.values(), default=0) < level for grades in qrels.values()
    ),
    depth=max(len(ids) for ids in rankings.values()),
    split=split,
  )


def _call_ir_measures(
  measures: Collection[ir_measures.Measure],
  qrels: trec.Qrels,
  rankings: Rankings,
) -> dict[tuple[ir_measures.Measure, str], float]:
  """Computes (measure, query id) -> value."""
  # Positions from the end replace scores, so that rounding makes no ties. They are
  # above 0, since Compat takes 0 for the score of a missing document.
  scores = {
    query: {id_: float(len(ids) - rank) for rank, id_ in enumerate(ids)}
    for query, ids in rankings.items()
    if ids
  }
  # The C code reads beyond an array if a query has negative grades alone.
  qrels = {
    query: grades
    for query, grades in qrels.items()
    if max(grades.values(), default=0) >= 0
  }
  return {
    (each.measure, each.query_id): float(each.value)
    for together in _group_calls(measures)
    for each in ir_measures.iter_calc(together, qrels, scores)
  }


def _group_calls(
  measures: Collection[ir_measures.Measure],
) -> list[list[ir_measures.Measure]]:
  """Groups measures into calls of ir-measures that do not affect each other.

  The provider of trec_eval's measures adds nDCG, NumRet and NumQ to any open call,
  with the gains or the judged documents of that call. If trec_eval has one name for
  two measures, it keeps one of them, by the order of a set. So measures with a
  cutoff and a level alone share one fast call, and any other measure has its own
  call.
  """
  plain = [each for each in measures if each.params.keys() <= _PLAIN]
  others = [[each] for each in measures if not each.params.keys() <= _PLAIN]
  return [plain, *others] if plain else others


def _check_qrels(qrels: trec.Qrels) -> trec.Qrels:
  """Returns judgements whose grades are Python's integers; refuses others."""
  trec.check_ids("query", qrels)
  trec.check_ids("document", {id_ for ids in qrels.values() for id_ in ids})
  return {
    query: {id_: _check_grade(grade) for id_, grade in grades.items()}
    for query, grades in qrels.items()
  }


def _check_grade(grade: SupportsIndex) -> int:
  """Returns a grade, which may be NumPy's, as an integer."""
  try:
    value = operator.index(grade)
  except TypeError:
    value = None
  if value is None or abs(value) > collection.MOST_GRADE:
    raise ValueError(
      "expected a whole number of at most"
      f" {collection.MOST_GRADE:,} as the grade of each document, got another"
      f" {type(grade).__name__}: write int(grade)"
    )
  return value


def _make_rankings(
  qrels: trec.Qrels, run: trec.Run, drop_identical: bool
) -> tuple[Rankings, int]:
  """Ranks each judged query's documents; also returns the number it drops."""
  rankings, dropped = {}, 0
  for query in qrels:
    ids = ranking = trec.ranking(run.get(query, {}))
    if drop_identical and qrels[query].get(query, 0) <= 0:
      ranking = [id_ for id_ in ids if id_ != query]
    dropped += len(ids) - len(ranking)
    rankings[query] = ranking
  return rankings, dropped


def _check_cutoff(cutoff: float) -> None:
  if not isinstance(cutoff, int) or cutoff < 1:
    raise ValueError(f"the cutoff is a whole number above 0, got {cutoff}")


def _check_level(level: int) -> None:
  """Refuses levels outside the range of grades, at which trec_eval fails."""
  if not 1 <= level <= collection.MOST_GRADE:
    raise ValueError(
      "the level is a whole number above 0 and up to"
      f" {collection.MOST_GRADE:,}, got {level}"
    )


def _parse_measure(name: str, level: int) -> ir_measures.Measure:
  """Parses a measure's name and sets its level of relevance.

  MFR is computed from the reciprocal rank, RR, at its cutoff.
  """
  try:
    parsed = name
    if first := _FIRST_RANK.fullmatch(name):
      parsed = f"RR{first[1]}{first[2] or _MFR_CUTOFF}"
    measure = ir_measures.parse_measure(parsed)
    measure.validate_params()
    _check_cutoff(measure.params.get("cutoff", 1))
    has_level = "rel" in measure.SUPPORTED_PARAMS and measure.NAME != "NumRet"
    if has_level and "rel" not in measure.params:
      measure = measure(rel=level)
    _check_level(measure.params.get("rel", 1))
    _check_provider(measure)
  except (NameError, ValueError, TypeError, AssertionError) as error:
    raise ValueError(
      f"expected a measure such as nDCG@10, R@10, RR@10 or MFR, got {name!r} "
      f"({error}); see the list of ir-measures"
    ) from error
  return measure


def _check_provider(measure: ir_measures.Measure) -> None:
  registry = ir_measures.providers.registry
  providers = (registry[name] for name in _PROVIDERS if name in registry)
  if not any(p.is_available() and p.supports(measure) for p in providers):
    raise ValueError(f"no installed provider computes {measure}")
