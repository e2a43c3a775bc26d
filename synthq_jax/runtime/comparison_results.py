"""Defines what comparisons hand to the report; private, but for a part.

`QueryComparison` is of `compare_queries`, where `shareable_side_by_side` is a
function of scores that may be shared, and all else one of private queries;
`QueryLeakage` is of `query_leakage`.
"""

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from synthq_jax import intervals, text_tables
from synthq_jax.generation import mauve
from synthq_jax.runtime import results
from synthq_jax.runtime import rows as rows_lib

__all__ = [
  "Asked",
  "Difference",
  "Found",
  "Membership",
  "QueryComparison",
  "QueryLeakage",
  "ScoredRow",
  "Side",
  "SideBySide",
  "Similarity",
  "pairs",
]

_BESIDE_BM25 = (rows_lib.FUSED, rows_lib.RANKED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredRow:
  """One row of a table."""

  evaluation: results.Evaluation
  """Its scores; intervals are over queries."""
  over_bm25: intervals.Interval | None = None
  """By the first measure: mean minus that of BM25, 95%, paired bootstrap; None
  where BM25 was not scored."""
  over_bm25_at_once: intervals.Interval | None = None
  """The same, at a level at which the intervals of all rows hold at once: for
  the choice of a row by the queries that score it."""
  level: tuple[str, ...] = ()
  """Rows of a lower or equal mean whose difference from this one may be chance: by
  the first measure, paired t tests at 5% for all pairs of the set at once."""
  gain_kept: intervals.Interval | None = None
  """By the first measure: what is kept of the gain that the real queries bring
  to the same system, (row - untrained) / (original - untrained); 95%, Fieller.
  Without queries a sum whose weights they teach ("ltr") is the fused untrained
  row. None where a row is lacking, or the real queries bring no
  gain that is clear of 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
  """How one row differs from another, query by query."""

  first: str
  """Name of a row."""
  second: str
  """Name of the row it is compared with."""
  interval: intervals.Interval
  """Mean of the first minus mean of the second; 95%, paired bootstrap."""
  p_value: float
  """Paired t test, two-sided, times the number of tests (Bonferroni)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
  """What was asked about a document, and what generators wrote about it."""

  document: str
  """Title and text."""
  real: tuple[str, ...]
  """Private queries that it answers."""
  synthetic: tuple[tuple[str, ...], ...]
  """Queries of each of `QueryComparison.generators`; none where it did not write
  for the document."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
  """What queries are like, whoever wrote them."""

  words: float
  """Mean length."""
  distinct: float
  """Share of different 2-grams among all."""
  copied: float
  """Share of the 4-grams that stand in the query's document."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Similarity:
  """How near a generator's queries come to the real ones."""

  name: str
  """Of the generator."""
  num_queries: int
  """Synthetic queries for documents of the pairs."""
  bleu: float
  """Of all of these, against the real queries of the same documents; 0 to
  100."""
  bleu_signature: str
  """How sacrebleu computed it."""
  num_compared: int
  """Queries of each side behind what follows: as many real as synthetic."""
  one_to_one: bool = False
  """Whether each is held against one query of a train pair, and not against all
  real queries of a held-out document."""
  mauve: tuple[mauve.Mauve, ...]
  """Of real and synthetic queries, a few clusterings; empty without queries or
  a featurizer."""
  real: Side
  """The real queries."""
  synthetic: Side
  """The generator's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SideBySide:
  """Rows over several sets, by one measure."""

  measure: str
  """Its name."""
  table: text_tables.Table
  """A row for each row, a column for each set, and their mean."""
  caption: str
  """What a reader must know of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryComparison(results.Saved):
  """Rows, generators and real queries, held against each other; private."""

  measures: tuple[str, ...]
  """Columns of the tables; rows are compared by the first."""
  test_set: str
  """The test set of the main table."""
  rows: tuple[ScoredRow, ...]
  """Of every test set."""
  differences: tuple[Difference, ...]
  """Between rows of the main table."""
  side_by_side: tuple[SideBySide, ...]
  """A measure each: all rows over further test sets."""
  shareable_side_by_side: tuple[SideBySide, ...]
  """The same of the rows whose scores may be shared."""
  generators: tuple[str, ...]
  """Whose queries `asked` holds."""
  asked: tuple[Asked, ...]
  """Some documents of held-out pairs."""
  similarity: tuple[Similarity, ...]
  """Of each generator."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
  """How many of some queries have a near-duplicate."""

  number: int
  """Those that have."""
  total: int
  """All of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Membership:
  """Near-duplicates of private queries in one set of synthetic ones."""

  name: str
  """Who wrote them: "public_only", "eps8", ..."""
  detector: str
  """What counts as a near-duplicate."""
  train: Found
  """Private queries that were trained on and are reproduced; of those without
  a near-duplicate among the other private ones."""
  control: Found
  """The same of private queries that were not trained on: coincidence."""
  difference: intervals.Interval | None
  """Share of `train` minus share of `control`; None: one of them is empty, or
  queries were written for the documents of one group alone."""
  p_value: float | None
  """Two-sided, of the hypothesis that being trained on changes nothing; None as
  `difference`."""
  train_all: Found
  """As `train`, with those that do have such a near-duplicate."""
  control_all: Found
  """As `control`, with those that do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryLeakage(results.Saved):
  """Near-duplicates between synthetic queries and private ones; private."""

  detectors: dict[str, str]
  """What each counts as a near-duplicate, in words."""
  num_train: int
  """Private train queries that were looked at."""
  num_control: int
  """Private queries that no generator was trained on, and were looked at."""
  num_written: dict[str, int]
  """Synthetic queries that were looked at, by who wrote them."""
  confidence: float
  """Of each interval by itself."""
  memberships: tuple[Membership, ...]
  """Each generator with each detector."""
  only_for_train: bool = False
  """Whether queries were written for the documents of train queries alone, so that
  the groups differ without any leak, and nothing is tested."""


def pairs(
  rows: Sequence[results.Evaluation],
) -> list[tuple[rows_lib.Row, rows_lib.Row]]:
  """Returns the pairs of rows that are tested, better expected first.

  See `compare_queries` for which they are.

  Args:
    rows: one evaluation for each row of a table.
  """
  beside = [one.row for one in rows if one.row.system in _BESIDE_BM25]
  found = [(row, rows_lib.BM25) for row in beside]
  epsilons = {one.row.retriever: one.epsilon for one in rows[::-1]}
  epsilons |= {one.row: one.epsilon for one in rows}
  for system in (rows_lib.DENSE, *_BESIDE_BM25):
    retrievers = [x.row.retriever for x in rows if x.row.system == system]
    found += [
      (first.of_system(system), second.of_system(system))
      for first, second in _pair_retrievers(retrievers, epsilons)
    ]
  return found


def _pair_retrievers(
  rows: Sequence[rows_lib.Row],
  epsilons: Mapping[rows_lib.Row, float | None],
) -> list[tuple[rows_lib.Row, rows_lib.Row]]:
  """Returns the pairs of one system's rows, by their retrievers.

  Args:
    rows: of retrievers.
    epsilons: of each retriever's claim.
  """
  families = collections.defaultdict(list)
  public = (rows_lib.PUBLIC_ONLY, rows_lib.UNTRAINED)
  for row in rows:
    if row.epsilon is not None and epsilons[row] is not None:
      families[row.pairs, row.method].append(row)
  found = [(rows_lib.ORIGINAL, row) for row in public]
  for members in families.values():
    members.sort(key=lambda row: (epsilons[row], str(row)), reverse=True)
    found += itertools.pairwise(members)
    found += [(row, other) for row in members for other in public]
  synthetic = families[rows_lib.SYNTHETIC, ""]
  found += [(rows_lib.ORIGINAL, row) for row in synthetic]
  found += [
    (row, other)
    for row in synthetic
    for (pairs_, _), members in families.items()
    for other in members
    if pairs_ == rows_lib.DIRECT_DP and epsilons[other] == epsilons[row]
  ]
  return found
