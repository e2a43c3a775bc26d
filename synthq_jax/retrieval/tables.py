"""Tabulates systems over several sets of queries, as in the papers' tables.

A table has one measure, one row for each system, one column for each set, and the
mean over columns. Sets that are parts of one (CQADupStack has twelve) count as one.
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
"""The significance level: corrected p values below it are marked."""

_Scores = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Row -> set -> query id -> value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
  """Means of a measure, by system and column, with tests against a reference.

  Attributes:
    measure: the name of the measure.
    columns: title -> the sets that the column averages. The last column may be
      `AVERAGE`, the mean of the columns in `averaged`.
    averaged: the columns in `AVERAGE`: those that every row has.
    means: system -> column -> mean, or None if a set is missing.
    missing: system -> sets of the table that it was not evaluated on.
    reference: the system that all others are tested against, or None.
    p_values: (system, column) -> p value of the test against the reference, times
      the number of tests in the table (Bonferroni), at most 1.
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
    """Sentences on averages, marks and missing sets."""
    sentences = [f"{self.measure}, means over queries."]
    sentences += [
      f"{title} is the mean of {len(sets)} sets."
      for title, sets in self.columns.items()
      if title != AVERAGE and len(sets) > 1
    ]
    sentences.append(self._explain_average())
    if self.p_values:
      sentences.append(
        f"* differs from {self.reference} (p < {_ALPHA:g}, paired t test"
        f" over queries, Bonferroni for {len(self.p_values)} tests)."
      )
    absent = [f"{row} ({', '.join(s)})" for row, s in self.missing.items() if s]
    if absent:
      sentences.append(f"- not measured: {'; '.join(absent)}.")
    return " ".join(sentence for sentence in sentences if sentence)

  def _explain_average(self) -> str:
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
    """Writes the means as text, with marks, without the caption."""
    titles = tuple(self.columns)

    def write(row: str, title: str) -> str:
      if (mean := self.means[row][title]) is None:
        return "-"
      differs = self.p_values.get((row, title), 1.0) < _ALPHA
      return f"{mean:.3f}{'*' if differs else ''}"

    return text_tables.Table(
      header=("Row", *titles),
      rows=tuple(
        (row, *(write(row, title) for title in titles)) for row in self.means
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
  """Makes the table of several systems.

  Every other row is tested against the reference in every column that both have,
  the average included. The test is a paired t test over queries, stratified if a
  column has several sets (`significance.stratified_t_test`). Means are taken within
  a set first, then within a group, then over columns.

  >>> bm25 = {"fiqa": {"q1": 0.2, "q2": 0.4}, "nfcorpus": {"q1": 0.7}}
  >>> table = compare({"BM25": bm25}, "nDCG@10", groups={})
  >>> print(table.cells().text())
  Row    fiqa  nfcorpus  Average
  ----  -----  --------  -------
  BM25  0.300     0.700    0.500
  >>> table.caption
  'nDCG@10, means over queries. Average is the mean of 2 columns.'

  Args:
    scores: row -> set -> query id -> value. Rows may lack sets; all rows with a
      set must have the same queries.
    measure: the name of the measure.
    reference: the row that the others are tested against; None: no tests.
    groups: title -> sets that count as one. A row that lacks one of them has no
      value in that column.

  Returns:
    The table, with rows and columns in the order of their first appearance; a
    group has the position of its first set.

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
      row: {
        title: _compute_mean(sets, mixture)
        for title, mixture in weights.items()
      }
      for row, sets in scores.items()
    },
    missing={
      row: tuple(
        name
        for sets in columns.values()
        for name in sets
        if name not in evaluated
      )
      for row, evaluated in scores.items()
    },
    reference=reference,
    p_values={}
    if reference is None
    else _compute_p_values(scores, weights, reference),
  )


def _compute_mean(
  sets: Mapping[str, Mapping[str, float]], mixture: Mapping[str, float]
) -> float | None:
  """Computes the weighted mean of the sets' means; None if a set is missing."""
  if not sets.keys() >= mixture.keys():
    return None
  return sum(
    weight * float(np.mean(list(sets[name].values())))
    for name, weight in mixture.items()
  )


def _compute_p_values(
  scores: _Scores,
  weights: Mapping[str, Mapping[str, float]],
  reference: str,
) -> dict[tuple[str, str], float]:
  """Tests all rows against the reference: (row, column) -> corrected p."""
  base = scores[reference]
  tests = {}
  for row, sets in scores.items():
    for title, mixture in weights.items():
      # A single query has no variance, so it is not tested.
      testable = all(len(sets.get(name, ())) > 1 for name in mixture)
      if row != reference and testable and base.keys() >= mixture.keys():
        tests[row, title] = significance.stratified_t_test(
          [sets[name] for name in mixture],
          [base[name] for name in mixture],
          list(mixture.values()),
        )
  corrected = significance.bonferroni(list(tests.values()))
  return dict(zip(tests, corrected, strict=True))
