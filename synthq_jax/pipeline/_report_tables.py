"""Tables of a report, and how numbers are written in it."""

from collections.abc import Sequence

from synthq_jax.pipeline import _report_blocks as blocks
from synthq_jax.pipeline import results
from synthq_jax.privacy import rounding
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.retrieval import text_tables

__all__ = [
  "aligned",
  "claimed",
  "duration",
  "epsilon",
  "main_table",
  "measure",
  "measure_name",
  "p_value",
  "noted",
  "row_name",
  "scores",
  "training",
]


def epsilon(value: float | None) -> str:
  """Writes epsilon with two decimals at most, rounded up; "-" is none needed.

  >>> [epsilon(value) for value in (None, 0.0, 7.9999, 2.001, 1e999)]
  ['-', '0', '8', '2.01', 'inf']
  """
  return "-" if value is None else rounding.up(value, places=2)


def claimed(statement: statement_lib.PrivacyStatement) -> str:
  """Writes the epsilon of a statement; "-" where no private record went in."""
  return epsilon(None if statement.is_public else statement.epsilon)


def measure(value: results.Measure | None) -> str:
  """Writes a mean with its interval.

  >>> measure(results.Measure(mean=0.25, low=0.24, high=0.2604))
  '0.250 [0.240, 0.260]'
  """
  if value is None:
    return "-"
  return f"{value.mean:.3f} [{value.low:.3f}, {value.high:.3f}]"


def p_value(value: float | None) -> str:
  """Returns a p value, "-" where nothing was tested.

  >>> p_value(0.00012), p_value(0.25)
  ('< 0.001', '0.250')
  """
  if value is None:
    return "-"
  return "< 0.001" if value < 0.001 else f"{value:.3f}"


def duration(seconds: float) -> str:
  """Writes a duration.

  >>> [duration(seconds) for seconds in (4.21, 59.8, 125, 7384)]
  ['4.2 s', '59.8 s', '2 min 5 s', '2 h 3 min']
  """
  if seconds < 60:
    return f"{seconds:.1f} s"
  minutes, rest = divmod(round(seconds), 60)
  if minutes < 60:
    return f"{minutes} min {rest} s"
  return f"{minutes // 60} h {minutes % 60} min"


def measure_name(name: str) -> str:
  """Writes the name of a measure: "R@10" -> "Recall@10"."""
  return f"Recall@{name[2:]}" if name.startswith("R@") else name


def row_name(name: str) -> str:
  """Turns the name of a row into words: "public_only" -> "public only"."""
  return name.replace("_", " ")


def main_table(
  evaluations: Sequence[results.Evaluation], measures: Sequence[str]
) -> blocks.Table:
  """Returns one row per evaluation, in the order given.

  Args:
    evaluations: all of one test set.
    measures: names of `Evaluation.measures`; "R@10" is written "Recall@10".

  Returns:
    Columns Row, epsilon, one per measure with its 95% interval, Trained on.
  """
  titles = tuple(map(measure_name, measures))
  rows = tuple(
    (
      row_name(one.name),
      epsilon(one.epsilon),
      *(measure(one.measures.get(name)) for name in measures),
      one.label,
    )
    for one in evaluations
  )
  return blocks.Table(
    header=("Row", "epsilon", *titles, "Trained on"),
    rows=rows,
    numeric=("epsilon", *titles),
  )


def scores(
  evaluations: Sequence[results.Evaluation], measures: Sequence[str]
) -> tuple[blocks.Block, ...]:
  """Returns a table for each test set and what a reader should know of it."""
  found: list[blocks.Block] = []
  for test_set in dict.fromkeys(one.test_set for one in evaluations):
    chosen = [one for one in evaluations if one.test_set == test_set]
    counts = sorted({one.num_queries for one in chosen})
    found += [
      main_table(chosen, measures),
      blocks.Paragraph(
        text=f'Test set "{test_set}": mean over '
        f"{' or '.join(f'{count:,}' for count in counts)} judged queries, "
        "with 95% bootstrap intervals over queries. Epsilon is that of the "
        'retriever: "-" where no private query was used, "inf" where private '
        "queries were used without privacy."
      ),
    ]
    notes = [
      (row_name(one.name), [*one.traps, *filter(None, [one.met])])
      for one in chosen
    ]
    if traps := noted(notes):
      found.append(
        blocks.Paragraph(lead="How it was scored", text=" ".join(traps))
      )
  return tuple(found)


def noted(notes: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
  """Returns what holds for all, then what holds for some, with their names.

  >>> noted([("a", ["One."]), ("b", ["One.", "Two."])])
  ['One.', 'b: Two.']

  Args:
    notes: of each, its name and what holds for it.
  """
  owners: dict[str, list[str]] = {}
  for name, sentences in notes:
    for sentence in sentences:
      owners.setdefault(sentence, []).append(name)
  total = len(notes)
  everywhere = [text for text, names in owners.items() if len(names) == total]
  return everywhere + [
    f"{', '.join(names)}: {text}"
    for text, names in owners.items()
    if len(names) < total
  ]


def training(checkpoints: Sequence[results.Checkpoint]) -> blocks.Table:
  """Returns what was trained, for how long, and with which epsilon."""
  header = (
    "Model",
    "For row",
    "epsilon",
    "Steps",
    "Batch size",
    "Parameters",
    "Time",
  )
  rows = tuple(
    (
      one.kind,
      row_name(one.name),
      claimed(one.statement),
      f"{one.steps:,}",
      f"{one.batch_size:,}",
      f"{one.num_parameters:,}",
      duration(one.seconds),
    )
    for one in checkpoints
  )
  return blocks.Table(header=header, rows=rows, numeric=header[2:])


def aligned(table: blocks.Table) -> str:
  """Returns a table as lines of ASCII, columns two spaces apart."""
  return text_tables.aligned(table.header, table.rows, table.numeric)
