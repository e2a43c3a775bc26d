"""Measures of a ranking: ir-measures' as trec_eval defines them, and MFR.

MFR is the mean rank of the first relevant document. All measures see one and
the same ranking of each query.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence

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
"""The measures of the papers' tables of retrieval."""

ALL = (*DEFAULT, "R@1", "R@20", "R@100", "P@1", "MFR")
"""Every measure that one of the papers reports."""

OWN_ID = "A result with its query's own id is"
"""How the sentence begins that says what happens to it."""

_FIRST_RANK = re.compile(r"MFR(?:\(rel=(\d+)\))?(?:@(\d+))?")
_MFR_CUTOFF = 100
_PLAIN = frozenset(("cutoff", "rel"))
# Not those that need Perl, or documents of a subtopic, or fail without a result.
_PROVIDERS = ("pytrec_eval", "msmarco", "judged", "compat", "cwl_eval")
_SHARES = frozenset(
  "nDCG AP RR R P Success Rprec Bpref infAP SetP SetR SetF SetAP Judged IPrec"
  " Compat RBP".split()
)

Rankings = dict[str, list[str]]


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """What `evaluate` found, and the choices that others make differently.

  Private when its queries are: publish neither values nor means of private
  queries without saying so.

  Attributes:
    mean: measure name -> mean over all judged queries.
    per_query: measure name -> query id -> value, for all judged queries.
    drop_identical: whether results with the query's own id were left out.
    num_dropped: how many results that were.
    level: the lowest grade that counts as relevant in measures that know only
      relevant or not.
    num_queries: the judged queries, which all count.
    num_without_results: those of them for which the run has no result, or
      none but their own document.
    num_without_relevant: those of them without a document of grade `level`.
    depth: the number of results of the query that has the most.
    split: whose judgements they are, or "" where nobody said.
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
    """What other evaluations do otherwise; `met` says what this run met."""
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
    """How often these choices mattered, in one sentence."""
    whose = f" of split {self.split!r}" if self.split else ""
    return (
      f"{self.num_queries} judged queries{whose}, {self.num_without_results} of"
      f" them without results and {self.num_without_relevant} without a relevant"
      f" document; results dropped for their query's own id: {self.num_dropped};"
      f" results of a query: {self.depth} at most, and a deeper cut sees no more."
    )


def check(names: Sequence[str], level: int = 1) -> None:
  """Refuses names that `evaluate` would refuse.

  >>> check(("nDCG@10", "MFR"))

  Args:
    names: as in `evaluate`.
    level: as in `evaluate`.

  Raises:
    ValueError: if there are none, or one is unknown or cannot be computed here.
  """
  if not names:
    raise ValueError("expected a measure such as nDCG@10, got none")
  for name in names:
    _measure(name, level)


def is_share(name: str) -> bool:
  """Says whether a measure lies in [0, 1] for every query.

  >>> is_share("nDCG@10"), is_share("MFR"), is_share("NumRel")
  (True, False, False)
  """
  measure = _measure(name, 1)
  return not isinstance(measure, _FirstRank) and measure.NAME in _SHARES


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
  relevant document, counts 0. Queries of the run that nobody judged are left
  out, and documents nobody judged count as not relevant: a system that finds
  good documents which the judges never saw is scored too low. nDCG's gain is
  the grade itself (0 for a negative one); a recall is the share of the relevant
  documents found.

  MFR is the mean rank of the first relevant document, and less is better. A
  query with none among the first 100 counts 101: also one without results, and
  one without any relevant document, which no system can answer.

  >>> names = ("RR@10", "MFR")
  >>> evaluate({"q": {"a": 1}}, {"q": {"b": 2.0, "a": 1.0}}, names).mean
  {'RR@10': 0.5, 'MFR': 2.0}

  Args:
    qrels: query id -> document id -> grade.
    run: query id -> document id -> score. Ties keep the order of the run.
    names: names of ir-measures such as "nDCG@10", "R@100", "RR@10", "P@1";
      "Recall" and "MRR" are taken for "R" and "RR". "MFR" is "MFR@100".
    drop_identical: leave out a result whose id equals its query's id, as BEIR
      does for collections that hold their own queries (ArguAna, Quora). Where
      ids are bare numbers, as in MS MARCO, equality may be chance: pass False.
      Where it certainly is, because such a document is judged relevant, it stays.
    level: the lowest grade that counts as relevant in binary measures, >= 1 (2
      for TREC Deep Learning); names that say rel=... themselves keep it.
    split: whose judgements `qrels` are; it is only named in the result.

  Returns:
    Means and values per query, under the names given.

  Raises:
    ValueError: if nothing is judged, a name is unknown, `level` is below 1, or
      a score is not finite.

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
  measures = {name: _measure(name, level) for name in names}
  rankings, dropped = _rankings(qrels, run, drop_identical)
  values = _values(set(measures.values()), qrels, rankings)
  per_query = {name: values[measure] for name, measure in measures.items()}
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


@dataclasses.dataclass(frozen=True)
class _FirstRank:
  """The rank of the first relevant document, or one more than the cut."""

  cutoff: int
  level: int

  def value(self, grades: Mapping[str, int], ids: Sequence[str]) -> float:
    ranks = (
      rank
      for rank, id_ in enumerate(ids[: self.cutoff], 1)
      if grades.get(id_, 0) >= self.level
    )
    return float(next(ranks, self.cutoff + 1))


def _values(
  measures: Collection[ir_measures.Measure | _FirstRank],
  qrels: trec.Qrels,
  rankings: Rankings,
) -> dict[ir_measures.Measure | _FirstRank, dict[str, float]]:
  """Returns measure -> query id -> value, in the order of the judgements."""
  ours = {each for each in measures if isinstance(each, _FirstRank)}
  theirs = _by_ir_measures(set(measures) - ours, qrels, rankings)
  return {
    each: {
      query: each.value(grades, rankings[query])
      if each in ours
      else theirs.get((each, query), 0.0)
      for query, grades in qrels.items()
    }
    for each in measures
  }


def _by_ir_measures(
  measures: Collection[ir_measures.Measure],
  qrels: trec.Qrels,
  rankings: Rankings,
) -> dict[tuple[ir_measures.Measure, str], float]:
  """Returns (measure, query id) -> value."""
  # Places from the last in place of scores: no rounding of scores makes ties.
  # Above 0, since Compat takes 0 for the score of a document not found.
  scores = {
    query: {id_: float(len(ids) - rank) for rank, id_ in enumerate(ids)}
    for query, ids in rankings.items()
    if ids
  }
  # Its C code reads beyond an array where a query has negative grades alone.
  qrels = {
    query: grades
    for query, grades in qrels.items()
    if max(grades.values(), default=0) >= 0
  }
  return {
    (each.measure, each.query_id): float(each.value)
    for together in _calls(measures)
    for each in ir_measures.iter_calc(together, qrels, scores)
  }


def _calls(
  measures: Collection[ir_measures.Measure],
) -> list[list[ir_measures.Measure]]:
  """Divides measures into calls of ir-measures that cannot disturb each other.

  Its provider of trec_eval's measures puts nDCG, NumRet and NumQ into any call
  that it has begun, with the gains or the judged documents of that call. It keeps
  one of two measures that trec_eval calls by the same name, and the order of a
  set decides which. Measures of a cutoff and a level alone share one call, as
  quick as before; any other measure has a call of its own.
  """
  plain = [each for each in measures if each.params.keys() <= _PLAIN]
  others = [[each] for each in measures if not each.params.keys() <= _PLAIN]
  return [plain, *others] if plain else others


def _rankings(
  qrels: trec.Qrels, run: trec.Run, drop_identical: bool
) -> tuple[Rankings, int]:
  """Returns each judged query's documents, best first, and how many it drops."""
  rankings, dropped = {}, 0
  for query in qrels:
    ids = kept = trec.ranking(run.get(query, {}))
    if drop_identical and qrels[query].get(query, 0) <= 0:
      kept = [id_ for id_ in ids if id_ != query]
    dropped += len(ids) - len(kept)
    rankings[query] = kept
  return rankings, dropped


def _check_cutoff(cutoff: float) -> None:
  if not isinstance(cutoff, int) or cutoff < 1:
    raise ValueError(f"the cutoff is a whole number above 0, got {cutoff}")


def _check_level(level: int) -> None:
  """Refuses levels that no grade has, at which trec_eval's code fails."""
  if not 1 <= level <= collection.MOST_GRADE:
    raise ValueError(
      "the level is a whole number above 0 and up to"
      f" {collection.MOST_GRADE:,}, got {level}"
    )


def _measure(name: str, level: int) -> ir_measures.Measure | _FirstRank:
  """Reads a measure's name and sets its level of relevance."""
  try:
    if first := _FIRST_RANK.fullmatch(name):
      return _first_rank(*first.groups(), level)
    measure = ir_measures.parse_measure(name)
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
  known = ir_measures.providers.registry
  there = (known[name] for name in _PROVIDERS if name in known)
  if not any(one.is_available() and one.supports(measure) for one in there):
    raise ValueError(f"nothing that is installed computes {measure}")


def _first_rank(rel: str | None, cutoff: str | None, level: int) -> _FirstRank:
  """Makes MFR of what its name says, at 100 where it says nothing."""
  measure = _FirstRank(int(cutoff or _MFR_CUTOFF), int(rel or level))
  _check_cutoff(measure.cutoff)
  _check_level(measure.level)
  return measure
