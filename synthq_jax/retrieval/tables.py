"""Systems side by side over several sets of queries, as in the papers' tables.

One measure, one row for each system, one column for each set, and their mean.
Sets that are parts of one (CQADupStack has twelve) count as one.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from synthq_jax import text_tables
from synthq_jax.retrieval import significance

__all__ = ["AVERAGE", "Table", "compare"]

AVERAGE = "Average"
"""The title of the column of means over sets."""
_ALPHA = 0.05
"""A corrected p value below it is marked."""

_Scores = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Row -> set -> query id -> value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
  """Systems side by side.

  Attributes:
    measure: what is averaged.
    columns: title -> the sets whose means it averages. The last one may be
      `AVERAGE`, in which every other column counts once.
    averaged: the columns in `AVERAGE`: those that every row has.
    means: system -> column -> its mean, or None where a set is missing.
    missing: system -> sets that it was not evaluated on, of those in the table.
    reference: the system that all others are tested against, or None.
    p_values: (system, column) -> p value of its test against the reference,
      times the number of tests in the table (Bonferroni), at most 1.
  """

  measure: str
  columns: dict[str, tuple[str, ...]]
  averaged: tuple[str, ...]
  means: dict[str, dict[str, float | None]]
  missing: dict[str, tuple[str, ...]]
  reference: str | None
  p_values: dict[tuple[str, str], float]

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
    if self.p_values:
      sentences.append(
        f"* differs from {self.reference} (p < {_ALPHA:g}, paired t test"
        f" over queries, Bonferroni for {len(self.p_values)} tests)."
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

  def cells(self) -> text_tables.Table:
    """Returns the means as text, marked where they differ; no caption."""
    titles = tuple(self.columns)

    def written(row: str, title: str) -> str:
      if (mean := self.means[row][title]) is None:
        return "-"
      differs = self.p_values.get((row, title), 1.0) < _ALPHA
      return f"{mean:.3f}{'*' if differs else ''}"

    return text_tables.Table(
      header=("Row", *titles),
      rows=tuple(
        (row, *(written(row, title) for title in titles)) for row in self.means
      ),
      numeric=titles,
    )


def compare(
  scores: _Scores,
  measure: str,
  *,
  reference: str | None = None,
  groups: Mapping[str, Sequence[str]],
) -> Table:
  """Puts systems side by side.

  Every other row is tested against the reference in every column both have,
  also in the average: a paired t test over queries
  (`significance.stratified_t_test` where a column has several sets). Means are
  taken within a set first, then within a group, then over columns.

  >>> bm25 = {"fiqa": {"q1": 0.2, "q2": 0.4}, "nfcorpus": {"q1": 0.7}}
  >>> table = compare({"BM25": bm25}, "nDCG@10", groups={})
  >>> print(table.cells().text())
  Row    fiqa  nfcorpus  Average
  ----  -----  --------  -------
  BM25  0.300     0.700    0.500
  >>> table.caption
  'nDCG@10, means over queries. Average is the mean of 2 columns.'

  Args:
    scores: row -> set -> query id -> value. Rows may lack sets; of a set, all
      rows must have the same queries.
    measure: what the values are.
    reference: the row that the others are tested against; None: no tests.
    groups: title -> sets that count as one. A row that lacks one of them has
      none of the column.

  Returns:
    The table, rows and columns in the order of their first appearance; a
    group stands where the first of its sets does.

  Raises:
    ValueError: if a row and the reference were scored on different queries.
  """
  title_of = {name: title for title, sets in groups.items() for name in sets}
  columns: dict[str, tuple[str, ...]] = {}
  for name in dict.fromkeys(name for sets in scores.values() for name in sets):
    title = title_of.get(name, name)
    columns.setdefault(title, tuple(groups.get(title, [name])))
  averaged = tuple(
    title
    for title, sets in columns.items()
    if all(row.keys() >= set(sets) for row in scores.values())
  )
  weights = {
    title: dict.fromkeys(sets, 1 / len(sets)) for title, sets in columns.items()
  }
  if len(averaged) > 1:
    weights[AVERAGE] = {
      name: weight / len(averaged)
      for title in averaged
      for name, weight in weights[title].items()
    }
  return Table(
    measure=measure,
    columns={title: tuple(mixture) for title, mixture in weights.items()},
    averaged=averaged,
    means={
      row: {title: _mean(sets, mixture) for title, mixture in weights.items()}
      for row, sets in scores.items()
    },
    missing={
      row: tuple(s for sets in columns.values() for s in sets if s not in found)
      for row, found in scores.items()
    },
    reference=reference,
    p_values={} if reference is None else _p_values(scores, weights, reference),
  )


def _mean(
  sets: Mapping[str, Mapping[str, float]], mixture: Mapping[str, float]
) -> float | None:
  """Returns the weighted mean of the sets' means; None where one is missing."""
  if not sets.keys() >= mixture.keys():
    return None
  return sum(
    weight * float(np.mean(list(sets[name].values())))
    for name, weight in mixture.items()
  )


def _p_values(
  scores: _Scores,
  weights: Mapping[str, Mapping[str, float]],
  reference: str,
) -> dict[tuple[str, str], float]:
  """Tests all rows against the reference: (row, column) -> corrected p."""
  base = scores[reference]
  tests = {}
  for row, sets in scores.items():
    for title, mixture in weights.items():
      # One query has no variance: it is shown and not tested.
      testable = all(len(sets.get(name, ())) > 1 for name in mixture)
      if row != reference and testable and base.keys() >= mixture.keys():
        tests[row, title] = significance.stratified_t_test(
          [sets[name] for name in mixture],
          [base[name] for name in mixture],
          list(mixture.values()),
        ).p_value
  corrected = significance.bonferroni(list(tests.values()))
  return dict(zip(tests, corrected, strict=True))
