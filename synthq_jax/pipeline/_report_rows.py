"""Tables about rows: seeds, differences, similarity, time. All private."""

import collections
from collections.abc import Sequence

from synthq_jax.pipeline import (
  _comparisons,
  _repeats,
  _report_tables,
  results,
)
from synthq_jax.pipeline import _report_blocks as blocks

__all__ = [
  "differences",
  "filtered",
  "kept",
  "seeds",
  "similarity",
  "times",
]

_NAME = _report_tables.row_name


def seeds(
  rows: Sequence[_repeats.Row], measure: str
) -> tuple[blocks.Block, ...]:
  """Returns what each seed scored, where there were several."""
  several = [row for row in rows if len(row.by_seed[measure]) > 1]
  if not several:
    return ()
  number = max(len(row.by_seed[measure]) for row in several)
  header = ("Row", *(f"Seed {i + 1}" for i in range(number)))
  lines = tuple(
    (_NAME(row.evaluation.name), *(f"{v:.3f}" for v in row.by_seed[measure]))
    for row in several
  )
  return (
    blocks.Heading(text=f"{measure} of each seed"),
    blocks.Table(header=header, rows=lines, numeric=header[1:]),
  )


def differences(
  found: Sequence[_repeats.Difference], measure: str
) -> tuple[blocks.Block, ...]:
  """Returns the paired tests."""
  if not found:
    return ()
  header = ("Row", "Against", f"Difference in {measure}", "p")
  lines = tuple(
    (
      _NAME(one.first),
      _NAME(one.second),
      f"{one.interval.mean:+.3f} "
      f"[{one.interval.low:+.3f}, {one.interval.high:+.3f}]",
      "< 0.001" if one.p_value < 0.001 else f"{one.p_value:.3f}",
    )
    for one in found
  )
  return (
    blocks.Heading(text="Differences, query by query"),
    blocks.Table(header=header, rows=lines, numeric=header[2:]),
    blocks.Paragraph(
      text="Intervals are 95% paired bootstrap intervals over queries, for "
      f"these seeds; p of a paired t test, times {len(found)} tests "
      "(Bonferroni)."
    ),
  )


def kept(
  rows: Sequence[_repeats.Row], measure: str
) -> tuple[blocks.Block, ...]:
  """Returns what every row keeps of the score of the real queries."""
  means = {
    row.evaluation.name: row.evaluation.measures[measure].mean
    for row in rows
    if measure in row.evaluation.measures
  }
  whole = means.pop("original", 0.0)
  if not whole:
    return ()
  parts = (f"{_NAME(name)} {mean / whole:.3f}" for name, mean in means.items())
  return (
    blocks.Paragraph(
      lead=f"Share of original's {measure}", text=f"{', '.join(parts)}."
    ),
  )


def similarity(
  found: Sequence[_comparisons.Similarity],
) -> tuple[blocks.Block, ...]:
  """Returns BLEU of every generator."""
  header = ("Generator", "Queries", "BLEU")
  lines = tuple(
    (_NAME(one.name), f"{one.num_queries:,}", f"{one.bleu:.2f}")
    for one in found
    if one.num_queries
  )
  if not lines:
    return ()
  return (
    blocks.Table(header=header, rows=lines, numeric=header[1:]),
    blocks.Paragraph(
      text="BLEU (0 to 100, lower case) of the synthetic queries for documents "
      "of held-out pairs, against the real queries of the same documents."
    ),
  )


def filtered(
  found: Sequence[results.SyntheticQueries],
) -> tuple[blocks.Block, ...]:
  """Returns what each filter took out of every generator's queries."""
  reasons = list(dict.fromkeys(name for one in found for name in one.removed))
  if not reasons:
    return ()
  header = ("Generator", "Kept", *(name.capitalize() for name in reasons))
  lines = tuple(
    (
      _NAME(one.name),
      f"{one.num_queries:,}",
      *(f"{one.removed.get(name, 0):,}" for name in reasons),
    )
    for one in found
  )
  return (
    blocks.Heading(text="What the filters took out"),
    blocks.Table(header=header, rows=lines, numeric=header[1:]),
    blocks.Paragraph(
      text="Each query counts under the first reason that fits. Not found: by"
      " BM25. Round trip: by a retriever that was trained on the queries"
      " themselves."
    ),
  )


def times(
  rows: Sequence[_repeats.Row],
  checkpoints: Sequence[results.Checkpoint],
  synthetic: Sequence[results.SyntheticQueries],
) -> blocks.Table:
  """Returns how long each row took from the public checkpoint to its score.

  Means over seeds; the cost of a row is its time on this machine.
  """
  spent = _spent(checkpoints, synthetic)
  header = ("Row", "Fine-tuning", "Writing", "Retriever", "Scoring", "Together")
  lines = []
  for row in rows:
    name = row.evaluation.name
    made = name.removeprefix("synthetic_")
    repeats = len(next(iter(row.by_seed.values())))
    parts = [
      spent["generator", made] if made != name else 0.0,
      spent["queries", made],
      spent["retriever", name],
      row.evaluation.seconds / repeats,
    ]
    cells = (_report_tables.duration(part) if part else "-" for part in parts)
    lines.append((_NAME(name), *cells, _report_tables.duration(sum(parts))))
  return blocks.Table(header=header, rows=tuple(lines), numeric=header[1:])


def _spent(checkpoints, synthetic) -> dict[tuple[str, str], float]:
  """Returns mean seconds by kind and row."""
  found = collections.defaultdict(list)
  for one in checkpoints:
    found[one.kind, results.row_of(one.name)].append(one.seconds)
  for one in synthetic:
    found["queries", results.row_of(one.name)].append(one.seconds)
  means = {key: sum(values) / len(values) for key, values in found.items()}
  return collections.defaultdict(float, means)
