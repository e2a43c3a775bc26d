"""Rows side by side over the further test sets, as in the papers' tables."""

import collections
from collections.abc import Iterable, Sequence

from synthq_jax.data import beir_sets
from synthq_jax.pipeline import _repeats, _report_tables, results
from synthq_jax.pipeline import _report_blocks as blocks
from synthq_jax.retrieval import measures as measures_lib
from synthq_jax.retrieval import tables

__all__ = ["section", "side_by_side"]

_REFERENCE = "public only"


def side_by_side(
  rows: Sequence[_repeats.Row],
  measures: Sequence[str],
  *,
  samples: int,
  seed: int,
) -> tuple[blocks.Block, ...]:
  """Returns a table for each measure.

  The parts of a group of BEIR's count as one. Rows are tested against the one of
  the public checkpoint, where there is one.

  Args:
    rows: of the further sets, each on its own.
    measures: names of ir-measures.
    samples: bootstrap resamples.
    seed: of the bootstrap.

  Returns:
    The blocks, or nothing without rows.
  """
  if not rows:
    return ()
  sets = dict.fromkeys(row.evaluation.test_set for row in rows)
  names = {_report_tables.row_name(row.evaluation.name) for row in rows}
  found: list[blocks.Block] = []
  for measure in measures:
    scores: dict = collections.defaultdict(dict)
    for row in rows:
      if measure in row.per_query:
        one = row.evaluation
        name = _report_tables.row_name(one.name)
        scores[name][one.test_set] = row.per_query[measure]
    if scores:
      table = tables.compare(
        scores,
        measure,
        reference=_REFERENCE if _REFERENCE in names else None,
        groups=_groups(sets),
        samples=samples,
        seed=seed,
      )
      found += _shown(table)
  return (*found, *_scored(rows))


def section(found: Sequence[blocks.Block]) -> tuple[blocks.Section, ...]:
  """Returns a section of these blocks; none without blocks."""
  if not found:
    return ()
  title = "Scores on further test sets"
  return (blocks.Section(title=title, blocks=tuple(found)),)


def _groups(sets: Iterable[str]) -> dict[str, list[str]]:
  """Gathers the parts of each group."""
  found = {
    group: [name for name in sets if name.startswith(f"{group}.")]
    for group in beir_sets.GROUPS
  }
  return {group: parts for group, parts in found.items() if parts}


def _scored(rows: Sequence[_repeats.Row]) -> list[blocks.Block]:
  """Says how each set was scored, and once what holds for all of them."""
  first = {row.evaluation.test_set: row.evaluation for row in rows}
  header = ("Set", "Split", "Judged queries", "A query's own id")
  lines = tuple(
    (
      name,
      one.split,
      f"{one.num_queries:,}",
      "dropped" if one.drop_identical else "kept",
    )
    for name, one in first.items()
  )
  # What holds for some sets alone is in the table; for some rows, it is said.
  said = dict.fromkeys(trap for row in rows for trap in row.evaluation.traps)
  shared = [t for t in said if not t.startswith(measures_lib.OWN_ID)]
  notes = [
    (
      _report_tables.row_name(name),
      [t for t in shared if any(t in o.traps for o in group)],
    )
    for name, group in _by_name(rows).items()
  ]
  return [
    blocks.Heading(text="The sets"),
    blocks.Table(header=header, rows=lines, numeric=("Judged queries",)),
    blocks.Paragraph(
      lead="How they were scored", text=" ".join(_report_tables.noted(notes))
    ),
  ]


def _by_name(
  rows: Sequence[_repeats.Row],
) -> dict[str, list[results.Evaluation]]:
  found = collections.defaultdict(list)
  for row in rows:
    found[row.evaluation.name].append(row.evaluation)
  return found


def _shown(table: tables.Table) -> list[blocks.Block]:
  header, lines, numeric = table.cells(intervals=False, digits=3)
  return [
    blocks.Heading(text=_report_tables.measure_name(table.measure)),
    blocks.Table(header=header, rows=tuple(lines), numeric=numeric),
    blocks.Paragraph(text=table.caption),
  ]
