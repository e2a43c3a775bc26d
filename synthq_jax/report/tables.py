"""Makes tables from columns, and formats their names and numbers."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from synthq_jax import intervals, text_tables
from synthq_jax.privacy import rounding
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.runtime import rows
from synthq_jax.training import progress

__all__ = [
  "call_row",
  "claimed",
  "count",
  "duration",
  "epsilon",
  "interval",
  "measure_name",
  "noted",
  "number",
  "of",
  "p_value",
  "percent",
  "row_name",
  "spread",
  "with_code",
]

_SYSTEMS = {
  rows.DENSE: "retriever",
  rows.FUSED: "BM25 + retriever",
  rows.RANKED: "BM25 + weights",
}
_SOURCES = {
  "direct_dp": "direct DP",
  "public_only": "public model",
  "synthetic": "synthetic queries",
  "original": "real queries",
}

_Item = TypeVar("_Item")


def of(
  items: Iterable[_Item],
  columns: Mapping[str, Callable[[_Item], str]],
  *,
  left: Sequence[str] | None = None,
) -> text_tables.Table:
  """Returns a table with a row for each item.

  >>> print(of([2, 10], {"Number": str, "Square": lambda n: f"{n**2:,}"}).text())
  Number  Square
  ------  ------
  2            4
  10         100

  Args:
    items: one item per row, in order.
    columns: title -> function that formats an item's cell.
    left: titles of the columns of words, which are aligned left; None: the first
      column.
  """
  header = tuple(columns)
  words = header[:1] if left is None else left
  return text_tables.Table(
    header=header,
    rows=tuple(
      tuple(cell(item) for cell in columns.values()) for item in items
    ),
    numeric=tuple(title for title in header if title not in words),
  )


def epsilon(value: float | None) -> str:
  """Formats an epsilon, rounded up to two decimals; "-" if none is needed.

  >>> [epsilon(value) for value in (None, 0.0, 7.9999, 2.001, 1e999)]
  ['-', '0', '8', '2.01', 'inf']
  """
  return "-" if value is None else rounding.up(value, places=2)


def claimed(statement: statement_lib.PrivacyStatement) -> str:
  """Formats a statement's epsilon; "-" if no private record was used."""
  return epsilon(None if statement.is_public else statement.epsilon)


def interval(value: intervals.Interval | None, form: str = ".3f") -> str:
  """Formats a mean with its interval; "-" if it was not measured.

  >>> interval(intervals.Interval(mean=0.25, low=0.24, high=0.2604))
  '0.250 [0.240, 0.260]'
  """
  return "-" if value is None else format(value, form)


def percent(value: intervals.Interval | float | None, sign: str = "") -> str:
  """Formats a share or its interval in percent; "-" if it was not measured.

  >>> percent(0.25), percent(intervals.Interval(mean=0.1, low=0, high=0.2), "+")
  ('25.00%', '+10.00% [+0.00, +20.00]')

  Args:
    value: a share.
    sign: "+" to write the sign of positive numbers, too.
  """
  if value is None:
    return "-"
  written = format(100 * value, f"{sign}.2f")
  mean, *ends = written.split(" ", 1)
  return " ".join([f"{mean}%", *ends])


def count(number: int) -> str:
  """Formats a whole number with commas: 1,234."""
  return f"{number:,}"


def number(value: float, form: str) -> str:
  """Formats a number; "-" if it is nan.

  >>> number(0.5, ".2f"), number(math.nan, ".2f")
  ('0.50', '-')
  """
  return "-" if math.isnan(value) else f"{value:{form}}"


def spread(values: Sequence[float], sign: str = "+-") -> str:
  """Formats a mean, with the standard deviation of two or more values.

  >>> spread([0.5]), spread([0.5, 0.75])
  ('0.500', '0.625 +- 0.177')
  """
  mean = f"{statistics.fmean(values):.3f}"
  if len(values) == 1:
    return mean
  return f"{mean} {sign} {statistics.stdev(values):.3f}"


def p_value(value: float | None) -> str:
  """Formats a p value; "-" without a test.

  >>> p_value(0.00012), p_value(0.25)
  ('< 0.001', '0.250')
  """
  if value is None:
    return "-"
  return "< 0.001" if value < 0.001 else f"{value:.3f}"


def duration(seconds: float) -> str:
  """Formats a duration as the progress lines of a run do."""
  return progress.format_duration(seconds)


def measure_name(name: str) -> str:
  """Returns the printed name of a measure: "R@10" -> "Recall@10"."""
  return f"Recall@{name[2:]}" if name.startswith("R@") else name


def row_name(name: str) -> str:
  """Returns a row's code name with spaces: "public_only" -> "public only"."""
  return name.replace("_", " ")


def call_row(row: rows.Row, epsilon: float | None = None) -> str:
  """Returns the report label of a row, with the epsilon of its system.

  >>> call_row(rows.PUBLIC_ONLY.of_system(rows.RANKED), 0.5)
  'BM25 + weights, public model (epsilon 0.5)'
  >>> call_row(rows.BM25), call_row(rows.ORIGINAL, math.inf)
  ('BM25', 'retriever, real queries (no privacy)')

  Args:
    row: the row.
    epsilon: epsilon of the system, inf without privacy. None: no private query was
      used, or the label is to have no epsilon.
  """
  if row == rows.BM25:
    return "BM25"
  source = _SOURCES.get(row.pairs, row.pairs.replace("_", " "))
  method = row.method.replace("_", " ")
  words = f"{_SYSTEMS[row.system]}, {' '.join(filter(None, (source, method)))}"
  if epsilon is None:
    return words
  cost = f"epsilon {rounding.up(epsilon, places=2)}"
  return f"{words} ({cost if math.isfinite(epsilon) else 'no privacy'})"


def with_code(row: rows.Row) -> str:
  """Returns the report label of a row, and below it the row's code name."""
  return f"{call_row(row)}\n{row}"


def noted(notes: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
  """Merges the notes of several items; sentences of all items come first, unnamed.

  >>> noted([("a", ["One."]), ("b", ["One.", "Two."])])
  ['One.', 'b: Two.']

  Args:
    notes: (name, sentences) of each item.
  """
  owners: dict[str, list[str]] = {}
  for name, sentences in notes:
    for sentence in sentences:
      owners.setdefault(sentence, []).append(name)
  everywhere = [t for t, names in owners.items() if len(names) == len(notes)]
  return everywhere + [
    f"{', '.join(names)}: {text}"
    for text, names in owners.items()
    if len(names) < len(notes)
  ]
