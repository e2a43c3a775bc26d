"""Defines what `compare_queries` hands to the report; private, but for a part.

`shareable_side_by_side` is a function of scores that may be shared; all else is a
function of private queries.
"""

import dataclasses

from synthq_jax import intervals, text_tables
from synthq_jax.generation import mauve
from synthq_jax.pipeline import results

__all__ = [
  "Asked",
  "Difference",
  "QueryComparison",
  "Row",
  "Side",
  "SideBySide",
  "Similarity",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One row of a table: one evaluation, or the mean of several seeds'."""

  evaluation: results.Evaluation
  """Measures are means over seeds, intervals are over queries."""
  by_seed: dict[str, tuple[float, ...]]
  """Measure -> the mean over queries of each seed."""
  over_bm25: intervals.Interval | None = None
  """By the first measure: mean minus that of BM25, 95%, paired bootstrap; None
  where BM25 was not scored."""
  gain_kept: intervals.Interval | None = None
  """By the first measure: what is kept of the gain that the real queries bring
  to the same system, (row - untrained) / (original - untrained); 95%, Fieller.
  BM25 stands for an expansion without queries. None where a row is lacking, or
  the real queries bring no gain that is clear of 0."""


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
  """Synthetic queries for documents of held-out pairs."""
  bleu: float
  """Of all of these, against the real queries of the same documents; 0 to
  100."""
  bleu_signature: str
  """How sacrebleu computed it."""
  num_compared: int
  """Queries of each side behind what follows: as many real as synthetic."""
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
class QueryComparison:
  """Rows, generators and real queries, held against each other."""

  directory: str
  """Private."""
  measures: tuple[str, ...]
  """Columns of the tables; rows are compared by the first."""
  test_set: str
  """The test set of the main table."""
  rows: tuple[Row, ...]
  """Of every test set, seeds gathered."""
  differences: tuple[Difference, ...]
  """Between rows of the main table."""
  side_by_side: tuple[SideBySide, ...]
  """A measure each: all rows over further test sets."""
  shareable_side_by_side: tuple[SideBySide, ...]
  """The same of the rows whose scores may be shared."""
  generators: tuple[str, ...]
  """Whose queries `asked` holds: the first seed of each."""
  asked: tuple[Asked, ...]
  """Some documents of held-out pairs."""
  similarity: tuple[Similarity, ...]
  """Of each generator."""
  seconds: float = 0.0
  """How long the stage took."""
