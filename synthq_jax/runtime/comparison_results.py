"""Defines the results of comparisons that the report reads.

All of them are private but for `QueryComparison.shareable_side_by_side`, a
function of scores that may be shared. The `compare_queries` stage makes
`QueryComparison`; the `query_leakage` stage makes `QueryLeakage`.
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
  "list_pairs",
]

_WITH_BM25 = (rows_lib.FUSED, rows_lib.RANKED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredRow:
  """Scores of one row of a table, and its comparisons with other rows."""

  evaluation: results.Evaluation
  """The row's scores; their intervals are over queries."""
  over_bm25: intervals.Interval | None = None
  """Mean minus that of BM25, by the first measure; 95%, paired bootstrap. None:
  BM25 was not scored."""
  over_bm25_at_once: intervals.Interval | None = None
  """The same difference at a level at which the intervals of all rows hold at
  once: for a reader who chooses a row by the queries that score it."""
  level: tuple[str, ...] = ()
  """Rows of a lower or equal mean whose difference from this row may be chance:
  by the first measure, paired t tests at 5% for all pairs of the set at
  once."""
  gain_kept: intervals.Interval | None = None
  """Gain kept, by the first measure: (row - untrained) / (original - untrained)
  with the same system; 95%, Fieller. For "ltr" rows the untrained row is the
  fused one; BM25 replaces an untrained fused row that is missing. None: another
  row is missing, or the real queries bring no gain that is clear of 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
  """Difference between the scores of two rows, query by query."""

  first: str
  """Name of a row."""
  second: str
  """Name of the row that it is compared with."""
  interval: intervals.Interval
  """Mean of the first minus mean of the second; 95%, paired bootstrap."""
  p_value: float
  """Paired t test, two-sided, times the number of tests (Bonferroni)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
  """Real and synthetic queries of one document."""

  document: str
  """Title and text of the document."""
  real: tuple[str, ...]
  """Private queries to which the document is relevant."""
  synthetic: tuple[tuple[str, ...], ...]
  """Queries of each of `QueryComparison.generators`; empty if a generator wrote
  none for the document."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
  """Text statistics of a set of queries, real or synthetic."""

  words: float
  """Mean length in words."""
  distinct: float
  """Distinct 2-grams as a share of all 2-grams."""
  copied: float
  """Share of the 4-grams that also occur in the query's document."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Similarity:
  """Similarity of a generator's queries to the real ones."""

  name: str
  """Name of the generator."""
  num_queries: int
  """Synthetic queries for documents of the pairs."""
  bleu: float
  """Corpus BLEU of all these queries against the real queries of the same
  documents; 0 to 100; nan if no query has four words."""
  bleu_signature: str
  """Signature of sacrebleu: the settings of the score."""
  num_compared: int
  """Queries of each side that the following fields compare: as many real as
  synthetic."""
  one_to_one: bool = False
  """Whether each synthetic query is compared with one query of a train pair,
  and not with all real queries of a held-out document."""
  mauve: tuple[mauve.Mauve, ...]
  """MAUVE of real and synthetic queries for several clusterings; empty without
  queries or a featurizer."""
  real: Side
  """Statistics of the real queries."""
  synthetic: Side
  """Statistics of the generator's queries."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SideBySide:
  """Rows over several sets, by one measure."""

  measure: str
  """Name of the measure."""
  table: text_tables.Table
  """Scores: one row for each row, one column for each set, and their mean."""
  caption: str
  """Notes that a reader of the table needs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryComparison(results.Saved):
  """Rows, generators and real queries, compared with each other; private."""

  measures: tuple[str, ...]
  """Columns of the tables; rows are compared by the first."""
  test_set: str
  """Name of the test set of the main table."""
  rows: tuple[ScoredRow, ...]
  """Scored rows of every test set."""
  differences: tuple[Difference, ...]
  """Differences between rows of the main table."""
  side_by_side: tuple[SideBySide, ...]
  """All rows over further test sets, one table for each measure."""
  shareable_side_by_side: tuple[SideBySide, ...]
  """The same tables for the rows whose scores may be shared."""
  generators: tuple[str, ...]
  """Generators whose queries `asked` holds."""
  asked: tuple[Asked, ...]
  """Real and synthetic queries of some documents of held-out pairs."""
  similarity: tuple[Similarity, ...]
  """Similarity of each generator's queries to the real ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
  """Count of queries that have a near-duplicate."""

  number: int
  """Queries that have one."""
  total: int
  """All queries."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Membership:
  """Near-duplicates of private queries in one set of synthetic ones."""

  name: str
  """Name of the synthetic queries: "public_only", "eps8", ..."""
  detector: str
  """Name of the near-duplicate detector."""
  train: Found
  """Private queries that were trained on and are reproduced, among those
  without a near-duplicate among the other private queries."""
  control: Found
  """The same count for private queries that were not trained on:
  coincidence."""
  difference: intervals.Interval | None
  """Share of `train` minus share of `control`. None: one of them is empty, or
  queries were written for the documents of one group alone."""
  p_value: float | None
  """Two-sided p-value of the hypothesis that being trained on changes nothing;
  None when `difference` is."""
  train_all: Found
  """As `train`, including queries with a near-duplicate among the other private
  queries."""
  control_all: Found
  """As `control`, including such queries."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryLeakage(results.Saved):
  """Near-duplicates between synthetic queries and private ones; private."""

  detectors: dict[str, str]
  """Definition of a near-duplicate, in words, by detector."""
  num_train: int
  """Private train queries that were searched."""
  num_control: int
  """Private queries that were searched and that no generator was trained on."""
  num_written: dict[str, int]
  """Synthetic queries that were compared, by their name."""
  confidence: float
  """Confidence of each interval by itself."""
  memberships: tuple[Membership, ...]
  """Results of each generator with each detector."""
  only_for_train: bool = False
  """Whether queries were written for the documents of train queries alone. The
  groups then differ without any leak, and nothing is tested."""


def list_pairs(
  rows: Sequence[results.Evaluation],
) -> list[tuple[rows_lib.Row, rows_lib.Row]]:
  """Returns the pairs of rows to test, the row expected to score higher first.

  The module `compare_queries` describes the choice of pairs.

  Args:
    rows: one evaluation for each row of a table.
  """
  with_bm25 = [
    evaluation.row for evaluation in rows if evaluation.row.system in _WITH_BM25
  ]
  compared = [(row, rows_lib.BM25) for row in with_bm25]
  epsilons = {
    evaluation.row.retriever: evaluation.epsilon for evaluation in rows[::-1]
  }
  epsilons |= {evaluation.row: evaluation.epsilon for evaluation in rows}
  for system in (rows_lib.DENSE, *_WITH_BM25):
    retrievers = [x.row.retriever for x in rows if x.row.system == system]
    compared += [
      (first.of_system(system), second.of_system(system))
      for first, second in _pair_retrievers(retrievers, epsilons)
    ]
  return compared


def _pair_retrievers(
  rows: Sequence[rows_lib.Row],
  epsilons: Mapping[rows_lib.Row, float | None],
) -> list[tuple[rows_lib.Row, rows_lib.Row]]:
  """Returns the pairs of one system's rows, by their retrievers.

  Args:
    rows: rows of the system's retrievers.
    epsilons: epsilon of each retriever's claim.
  """
  families = collections.defaultdict(list)
  public = (rows_lib.PUBLIC_ONLY, rows_lib.UNTRAINED)
  for row in rows:
    if row.epsilon is not None and epsilons[row] is not None:
      families[row.pairs, row.method].append(row)
  compared = [(rows_lib.ORIGINAL, row) for row in public]
  for members in families.values():
    members.sort(key=lambda row: (epsilons[row], str(row)), reverse=True)
    compared += itertools.pairwise(members)
    compared += [(row, other) for row in members for other in public]
  synthetic = families[rows_lib.SYNTHETIC, ""]
  compared += [(rows_lib.ORIGINAL, row) for row in synthetic]
  compared += [
    (row, other)
    for row in synthetic
    for (pairs_, _), members in families.items()
    for other in members
    if pairs_ == rows_lib.DIRECT_DP and epsilons[other] == epsilons[row]
  ]
  return compared
