"""The page that must not be shared: scores on private queries, real queries."""

import dataclasses
import math
from collections.abc import Sequence

from synthq_jax.pipeline import (
  _comparisons,
  _plots,
  _query_leakage_results,
  _repeats,
  _report_audit,
  _report_leakage,
  _report_rows,
  _report_sets,
  _report_shareable,
  _report_tables,
  results,
)
from synthq_jax.pipeline import _report_blocks as blocks

__all__ = ["BANNER", "page"]

BANNER = (
  "PRIVATE: real queries, and numbers computed from them without differential "
  "privacy. Do not share this page, whole or in part."
)


def page(
  title: str,
  *,
  table: str,
  test_set: str,
  prepared: results.PreparedData,
  evaluations: Sequence[results.Evaluation],
  checkpoints: Sequence[results.Checkpoint],
  synthetic: Sequence[results.SyntheticQueries],
  audits: Sequence[results.AuditReport],
  curves: dict[str, tuple[Sequence[float], Sequence[float]]],
  comparisons: Sequence[_comparisons.Comparison],
  rows: Sequence[_repeats.Row],
  differences: Sequence[_repeats.Difference],
  similarity: Sequence[_comparisons.Similarity],
  measures: Sequence[str],
  document_words: int,
  further: Sequence[blocks.Block] = (),
  leakage: _query_leakage_results.QueryLeakage | None = None,
) -> blocks.Page:
  """Returns the private page.

  Args:
    title: of the page.
    table: the main table as text.
    test_set: the test set of the main table and of the plot.
    prepared: the data.
    evaluations: all of them.
    checkpoints: all of them.
    synthetic: all of them.
    audits: all of them.
    curves: learning curves of the private stages.
    comparisons: real beside synthetic queries.
    rows: of the main table, with what each seed scored.
    differences: between them.
    similarity: of synthetic and real queries.
    measures: columns of the tables; the first is drawn against epsilon.
    document_words: words shown of a document.
    further: tables of all rows on further test sets.
    leakage: real queries among the synthetic ones; None: not looked for.

  Returns:
    The page.
  """
  main = [one for one in evaluations if one.test_set == test_set]
  others = [one for one in evaluations if one.test_set != test_set]
  section = blocks.Section
  sections = [
    section(
      title="Scores on private queries",
      blocks=(
        *_report_tables.scores(main, measures),
        *_report_rows.kept(rows, measures[0]),
        *_against_epsilon(main, measures[0]),
        *_report_rows.seeds(rows, measures[0]),
        *_report_rows.differences(differences, measures[0]),
      ),
    ),
    section(
      title="Real beside synthetic queries",
      blocks=(
        *_compared(comparisons, document_words),
        *_gauges(main, synthetic),
        *_report_rows.similarity(similarity),
        *_report_rows.filtered(synthetic),
      ),
    ),
    section(
      title="Learning curves",
      blocks=_report_shareable.curve_blocks(curves)
      or (blocks.Paragraph(text="No private stage left a learning curve."),),
    ),
    section(
      title="Real queries among the synthetic ones",
      blocks=_report_leakage.section(leakage),
    ),
    section(title="Audit", blocks=_report_audit.section(audits)),
  ]
  if others:
    sections.append(
      section(
        title="Scores on other queries",
        blocks=_report_tables.scores(others, measures),
      )
    )
  sections += [
    *_report_sets.section(further),
    section(title="Training", blocks=(_report_tables.training(checkpoints),)),
    section(
      title="Time of each row",
      blocks=(_report_rows.times(rows, checkpoints, synthetic),),
    ),
    section(title="Data", blocks=(_data(prepared),)),
    section(title="As text", blocks=(blocks.Preformatted(text=table),)),
  ]
  return blocks.Page(
    title=f"{title} (private)",
    banner=BANNER,
    introduction=(blocks.Paragraph(text=f"Data: {prepared.source}"),),
    sections=tuple(sections),
  )


def _against_epsilon(
  evaluations: Sequence[results.Evaluation], measure: str
) -> tuple[blocks.Block, ...]:
  """Draws rows with a positive finite epsilon as points, others as lines.

  Rows named alike up to "_eps" are one family: synthetic_eps3, synthetic_eps8.
  """
  points: dict[str, list[tuple[float, results.Measure]]] = {}
  lines: dict[str, results.Measure] = {}
  for one in evaluations:
    if measure not in one.measures:
      continue
    if one.epsilon is not None and 0 < one.epsilon < math.inf:
      family = one.name.rpartition("_eps")[0] or one.name
      points.setdefault(_report_tables.row_name(family), []).append(
        (one.epsilon, one.measures[measure])
      )
    else:
      lines[_report_tables.row_name(one.name)] = one.measures[measure]
  if not points:
    return (blocks.Paragraph(text="No row has a finite epsilon to draw."),)
  ordered = {name: sorted(row, key=_first) for name, row in points.items()}
  return (
    blocks.Figure(
      svg=_plots.against_epsilon(ordered, lines, measure=measure),
      caption=f"{measure} on private test queries against epsilon, with 95% "
      "intervals over queries. Lines from side to side have no place on the "
      "axis: they used no private query, used them without privacy, or at an "
      "epsilon of 0.",
    ),
  )


def _first(pair: tuple[float, results.Measure]) -> float:
  return pair[0]


def _compared(
  comparisons: Sequence[_comparisons.Comparison], document_words: int
) -> tuple[blocks.Block, ...]:
  if not comparisons:
    text = "No document of the private test set was written for."
    return (blocks.Paragraph(text=text),)
  names = tuple(comparisons[0].synthetic)
  titles = tuple(f"Synthetic: {_report_tables.row_name(one)}" for one in names)
  rows = tuple(
    (
      _report_shareable.beginning(one.document, document_words),
      " / ".join(one.real),
      *(" / ".join(one.synthetic[name]) or "-" for name in names),
    )
    for one in comparisons
  )
  header = ("Beginning of the document", "Real queries", *titles)
  return (blocks.Table(header=header, rows=rows),)


def _gauges(
  evaluations: Sequence[results.Evaluation],
  synthetic: Sequence[results.SyntheticQueries],
) -> tuple[blocks.Block, ...]:
  """Sets the generators' gauges beside that of the real queries."""
  measure = "nDCG@10"
  found = [
    ("real queries", one.measures[measure].mean)
    for one in evaluations
    if one.name == "bm25" and measure in one.measures
  ]
  found += [(_report_tables.row_name(one.name), one.gauge) for one in synthetic]
  if not found:
    return ()
  text = ", ".join(f"{name} {value:.3f}" for name, value in found)
  return (
    blocks.Paragraph(
      lead="Gauge",
      text=f"{text}: {measure} of BM25 finding a query's own document.",
    ),
  )


def _data(prepared: results.PreparedData) -> blocks.Table:
  """Returns everything that preparing the data counted."""
  hidden = {"directory", "private_directory", "seconds"}
  rows = tuple(
    (field.name.replace("_", " "), _value(getattr(prepared, field.name)))
    for field in dataclasses.fields(prepared)
    if field.name not in hidden
  )
  rows += (("time", _report_tables.duration(prepared.seconds)),)
  return blocks.Table(header=("Data", ""), rows=rows)


def _value(value: object) -> str:
  if isinstance(value, dict):
    return ", ".join(f"{name}: {_value(one)}" for name, one in value.items())
  if isinstance(value, float):
    return f"{value:.4g}"
  return f"{value:,}" if isinstance(value, int) else str(value)
