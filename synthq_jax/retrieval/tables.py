"""Systems side by side over several sets of queries, as in the papers' tables.

One measure, one row for each system, one column for each set, and their mean.
Sets that are parts of one (CQADupStack has twelve) count as one.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from synthq_jax import checks, text_tables
from synthq_jax import intervals as intervals_lib
from synthq_jax.retrieval import measures, significance

__all__ = ["AVERAGE", "Cell", "Table", "compare"]

AVERAGE = "Average"
"""The title of the column of means over sets."""

Scores = measures.Evaluation | Mapping[str, float]
"""An evaluation, or query id -> value of the measure."""

_PerQuery = dict[str, dict[str, Mapping[str, float]]]
"""Row -> set -> query id -> value."""


@dataclasses.dataclass(frozen=True)
class Cell:
  """What one system scores in one column.

  Attributes:
    interval: the mean and its bootstrap interval, queries drawn within sets.
    num_queries: of all sets of the column.
    p_value: of the test against the reference row, times the number of tests
      in the table (Bonferroni), at most 1; None for that row itself, and where
      there is none to compare with.
  """

  interval: intervals_lib.Interval
  num_queries: int
  p_value: float | None


@dataclasses.dataclass(frozen=True)
class Table:
  """Systems side by side.

  Attributes:
    measure: what is averaged.
    rows: system -> column -> its cell, or None where a set is missing.
    columns: title -> the sets whose means it averages. The last one may be
      `AVERAGE`, in which every other column counts once.
    averaged: the columns in `AVERAGE`: those that every row has.
    missing: system -> sets that it was not evaluated on, of those in the table.
    reference: the system that all others are tested against, or None.
    alpha: a corrected p value below it is marked.
    num_tests: how many tests were made.
  """

  measure: str
  rows: dict[str, dict[str, Cell | None]]
  columns: dict[str, tuple[str, ...]]
  averaged: tuple[str, ...]
  missing: dict[str, tuple[str, ...]]
  reference: str | None
  alpha: float
  num_tests: int

  @property
  def caption(self) -> str:
    """What a reader must know: averages, marks, what is missing."""
    sentences = [f"{self.measure}, means over queries."]
    sentences += [
      f"{title} is the mean of {len(sets)} sets."
      for title, sets in self.columns.items()
      if title != AVERAGE and len(sets) > 1
    ]
    sentences.append(self._average_explained())
    if self.num_tests:
      sentences.append(
        f"* differs from {self.reference} (p < {self.alpha:g}, paired t test"
        f" over queries, Bonferroni for {self.num_tests} tests)."
      )
    absent = [f"{row} ({', '.join(s)})" for row, s in self.missing.items() if s]
    if absent:
      sentences.append(f"- not measured: {'; '.join(absent)}.")
    return " ".join(sentence for sentence in sentences if sentence)

  def _average_explained(self) -> str:
    every = [title for title in self.columns if title != AVERAGE]
    left_out = [title for title in every if title not in self.averaged]
    if AVERAGE in self.columns:
      over = f"{AVERAGE} is the mean of {len(self.averaged)} columns"
      if not left_out:
        return f"{over}."
      return f"{over}, those that every row has: without {', '.join(left_out)}."
    if len(every) > 1:
      return "There is no average: fewer than two columns are in every row."
    return ""

  def text(self, *, intervals: bool = False, digits: int = 3) -> str:
    """Returns the table as lines of ASCII, with its caption below.

    Args:
      intervals: whether the ends of the intervals stand beside the means.
      digits: after the point.
    """
    table = self.cells(intervals=intervals, digits=digits)
    return f"{table.text()}\n\n{self.caption}"

  def cells(
    self, *, intervals: bool = False, digits: int = 3
  ) -> text_tables.Table:
    """Returns the cells as text, without the caption.

    Args:
      intervals: whether the ends of the intervals stand beside the means.
      digits: after the point.
    """

    def written(cell: Cell | None) -> str:
      if cell is None:
        return "-"
      differs = cell.p_value is not None and cell.p_value < self.alpha
      mean, ends = f"{cell.interval:.{digits}f}".split(" ", 1)
      mean += "*" if differs else ""
      return f"{mean} {ends}" if intervals else mean

    titles = tuple(self.columns)
    return text_tables.Table(
      header=("Row", *titles),
      rows=tuple(
        (row, *(written(cells[title]) for title in titles))
        for row, cells in self.rows.items()
      ),
      numeric=titles,
    )


def compare(
  results: Mapping[str, Mapping[str, Scores]],
  measure: str,
  *,
  reference: str | None = None,
  groups: Mapping[str, Sequence[str]] | None = None,
  alpha: float = 0.05,
  samples: int = 2000,
  seed: int = 0,
) -> Table:
  """Puts systems side by side.

  Every other row is tested against the reference in every column both have,
  also in the average: a paired t test over queries
  (`significance.stratified_t_test` where a column has several sets). Means are
  taken within a set first, then within a group, then over columns.

  >>> bm25 = {"fiqa": {"q1": 0.2, "q2": 0.4}, "nfcorpus": {"q1": 0.7}}
  >>> print(compare({"BM25": bm25}, "nDCG@10").text())
  Row    fiqa  nfcorpus  Average
  ----  -----  --------  -------
  BM25  0.300     0.700    0.500
  <BLANKLINE>
  nDCG@10, means over queries. Average is the mean of 2 columns.

  Args:
    results: row -> set -> its evaluation, or query id -> value. Rows may lack
      sets; of a set, all rows must have the same queries.
    measure: a name of the evaluations.
    reference: the row that the others are tested against; None: no tests.
    groups: title -> sets that count as one. A row that lacks one of them has
      none of the column.
    alpha: the level of the tests, in (0, 1).
    samples: bootstrap resamples.
    seed: of the bootstrap.

  Returns:
    The table, rows and columns in the order of their first appearance; a
    group stands where the first of its sets does.

  Raises:
    ValueError: if there is nothing to show, the reference is no row, a set
      is in two groups, an evaluation lacks the measure, or the rows of a set
      were scored on different queries or otherwise differently.
  """
  _check(results, reference, alpha)
  values = _per_query(results, measure)
  columns = _columns(values, groups or {})
  weights = {
    title: dict.fromkeys(sets, 1 / len(sets)) for title, sets in columns.items()
  }
  averaged = tuple(
    title
    for title, sets in columns.items()
    if all(row.keys() >= set(sets) for row in values.values())
  )
  if len(averaged) > 1:
    weights[AVERAGE] = {
      name: weight / len(averaged)
      for title in averaged
      for name, weight in weights[title].items()
    }
  p_values = _p_values(values, weights, reference)
  options = {"samples": samples, "seed": seed}
  return Table(
    measure=measure,
    rows={
      row: {
        title: _cell(values, row, title, mixture, p_values, options)
        for title, mixture in weights.items()
      }
      for row in values
    },
    columns={title: tuple(mixture) for title, mixture in weights.items()},
    averaged=averaged,
    missing={
      row: tuple(s for sets in columns.values() for s in sets if s not in found)
      for row, found in values.items()
    },
    reference=reference,
    alpha=alpha,
    num_tests=len(p_values),
  )


def _check(results, reference: str | None, alpha: float) -> None:
  if not any(results.values()):
    raise ValueError("expected rows with a set, got none; evaluate something")
  if reference is not None and reference not in results:
    raise ValueError(
      f"expected one of the rows {list(results)}, got reference={reference!r};"
      " choose one, or None for no tests"
    )
  checks.within("(0, 1)", alpha=alpha)


def _per_query(results, measure: str) -> _PerQuery:
  """Returns the values of all rows, after a look at how they were scored."""
  values: _PerQuery = {row: {} for row in results}
  first: dict[str, tuple[str, Scores]] = {}
  for row, sets in results.items():
    for name, scores in sets.items():
      values[row][name] = _values(row, name, scores, measure)
      other, earlier = first.setdefault(name, (row, scores))
      if values[other][name].keys() != values[row][name].keys():
        raise ValueError(
          f"set {name!r}: expected the same queries in all rows, got others in"
          f" {row!r} than in {other!r}; evaluate both on the same judgements"
        )
      if not _alike(scores, earlier):
        raise ValueError(
          f"set {name!r}: expected rows scored alike, got another level, split"
          f" or drop_identical in {row!r} than in {other!r}; evaluate them alike"
        )
  return values


def _values(row: str, name: str, scores: Scores, measure: str):
  if not isinstance(scores, measures.Evaluation):
    return scores
  if measure not in scores.per_query:
    raise ValueError(
      f"row {row!r}, set {name!r}: expected the measure {measure!r}, got"
      f" {list(scores.per_query)}; evaluate it too"
    )
  return scores.per_query[measure]


def _alike(one: Scores, other: Scores) -> bool:
  """Whether two evaluations made the same choices."""
  if not isinstance(one, measures.Evaluation):
    return True
  return not isinstance(other, measures.Evaluation) or (
    one.level == other.level
    and one.drop_identical == other.drop_identical
    and one.split == other.split
  )


def _columns(
  values: _PerQuery, groups: Mapping[str, Sequence[str]]
) -> dict[str, tuple[str, ...]]:
  """Returns title -> its sets, in the order of first appearance."""
  title_of: dict[str, str] = {}
  for title, members in groups.items():
    for name in members:
      if title_of.setdefault(name, title) != title:
        raise ValueError(
          f"expected each set in one group, got {name!r} in"
          f" {title_of[name]!r} and {title!r}; take it out of one"
        )
  sets = dict.fromkeys(name for row in values.values() for name in row)
  columns: dict[str, tuple[str, ...]] = {}
  for name in sets:
    title = title_of.get(name, name)
    if title == AVERAGE or (title in groups) != (name in title_of):
      raise ValueError(
        f"expected a title of its own for each column, got {title!r} twice;"
        " rename the set or the group"
      )
    columns.setdefault(title, tuple(dict.fromkeys(groups.get(title, [name]))))
  return columns


def _has(sets: Mapping, mixture: Mapping[str, float]) -> bool:
  return sets.keys() >= mixture.keys()


def _p_values(
  values: _PerQuery,
  weights: Mapping[str, Mapping[str, float]],
  reference: str | None,
) -> dict[tuple[str, str], float]:
  """Tests all rows against the reference: (row, column) -> corrected p."""
  if reference is None:
    return {}
  base = values[reference]
  tests = {}
  for row, sets in values.items():
    for title, mixture in weights.items():
      # One query has no variance: it is shown and not tested.
      testable = all(len(sets.get(name, ())) > 1 for name in mixture)
      if row != reference and testable and _has(base, mixture):
        with _named(row, title):
          tests[row, title] = significance.stratified_t_test(
            [sets[name] for name in mixture],
            [base[name] for name in mixture],
            list(mixture.values()),
          ).p_value
  corrected = significance.bonferroni(list(tests.values()))
  return dict(zip(tests, corrected, strict=True))


def _cell(
  values: _PerQuery,
  row: str,
  title: str,
  mixture: Mapping[str, float],
  p_values: Mapping[tuple[str, str], float],
  options: Mapping[str, float],
) -> Cell | None:
  if not _has(values[row], mixture):
    return None
  strata = [values[row][name] for name in mixture]
  with _named(row, title):
    interval = significance.stratified_interval(
      strata, list(mixture.values()), **options
    )
  return Cell(interval, sum(map(len, strata)), p_values.get((row, title)))


@contextlib.contextmanager
def _named(row: str, title: str) -> Iterator[None]:
  """Says whose values are wrong."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f"row {row!r}, column {title!r}: {error}") from error
