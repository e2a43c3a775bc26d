"""The study of planted leakage as text, Markdown and one drawing."""

import pathlib
import statistics
from collections.abc import Iterable

from synthq_jax import artifacts
from synthq_jax.leakage import splits, study
from synthq_jax.pipeline import _leakage_study_results as results
from synthq_jax.pipeline import _leakage_study_words as words
from synthq_jax.pipeline import _plots, _report_tables
from synthq_jax.retrieval import text_tables

__all__ = ["tables", "write"]

Table = tuple[tuple[str, ...], list[tuple[str, ...]], tuple[str, ...]]
"""Header, rows, and the titles of numeric columns."""
Section = tuple[str, str, Table]
"""Title, explanation, table."""

_NONE, *_LEAKING = splits.NAMES


def write(found: results.Study, root: pathlib.Path) -> str:
  """Writes study.md and study.svg; returns the main tables for the screen.

  Args:
    found: the study.
    root: where they go.
  """
  artifacts.write_atomically(root / "study.svg", _drawing(found))
  artifacts.write_atomically(root / "study.md", _page(found))
  parts = [words.setting(found.facts), *words.outcomes(found)]
  parts += [
    f"{title}\n\n{text_tables.aligned(*table)}"
    for title, _, table in tables(found)[:6]
  ]
  return "\n\n".join([*parts, f"report: {root / 'study.md'}"])


def tables(found: results.Study) -> list[Section]:
  """Returns the tables with their titles and what explains them.

  Effectiveness by measure, memorisation, effectiveness by size, chosen sizes,
  trainings, training sets.
  """
  chosen = [table for table in found.measures if not table.size]
  fixed = [table for table in found.measures if table.size]
  return [
    *(_effectiveness(found, table) for table in chosen),
    *_memories(found),
    *(_effectiveness(found, table) for table in fixed),
    _sizes(chosen),
    _trainings(found),
    _sets(found),
  ]


def _effectiveness(
  found: results.Study, table: results.MeasureTable
) -> Section:
  """Rerankers against kinds of leakage, with differences and p values."""
  decimals = 1 if table.measure in study.FEWER_IS_BETTER else 3
  rows = [
    (name, f"{level:.{decimals}f}", "", "", "", "")
    for name, level in (
      (results.BASELINE, table.baseline),
      ("Random order", table.chance),
    )
  ]
  for model in dict.fromkeys(cell.model for cell in table.cells):
    cells = {cell.leakage: cell for cell in table.cells if cell.model == model}
    row = [model, f"{cells[_NONE].mean:.{decimals}f}"]
    for kind in _LEAKING:
      compared = cells[kind].comparison
      row.append(f"{cells[kind].mean:.{decimals}f}{_star(compared)}")
      row.append(words.difference(compared, decimals))
    rows.append(tuple(row))
  titles = tuple(
    title
    for kind in _LEAKING
    for title in (kind.capitalize(), f"{kind.capitalize()}: change, p")
  )
  size = (
    f"training sets of {table.size:,} instances"
    if table.size
    else f"size chosen by {found.folds}-fold cross-validation"
  )
  better = "less" if table.measure in study.FEWER_IS_BETTER else "more"
  header = ("Reranker", _NONE.capitalize(), *titles)
  return (
    f"{_report_tables.measure_name(table.measure)}, {size}",
    f"Means over {found.facts.num_test_queries} test queries, repetitions"
    f" averaged; {better} is better.",
    (header, rows, header[1:]),
  )


def _memories(found: results.Study) -> list[Section]:
  """Ranks, scores and offsets of leaked documents."""
  if not found.memory:
    return []
  sections = []
  for title, explanation, cells in (
    (
      "Mean rank of leaked relevant documents",
      f"Under their test query, {found.depth + 1} outside of the"
      f" {found.depth} candidates; less is better. The same documents with"
      " leakage and without. Where a test query has one relevant document, this"
      " is MFR at that size.",
      lambda one: (
        f"{one.rank_without:.1f}",
        f"{one.rank_with:.1f}{_star(one.rank)}",
        words.difference(one.rank, 1),
      ),
    ),
    (
      "Mean score of leaked relevant documents",
      "Of those among the candidates; scores of different rerankers cannot be"
      " compared, and were not tested.",
      lambda one: (
        f"{one.score_without:.3f}",
        f"{one.score_with:.3f}",
        f"{one.score_with - one.score_without:+.3f}",
      ),
    ),
    (
      "Rank offset between leaked relevant and non-relevant documents",
      "How many ranks the leaked non-relevant document of an instance stands"
      " below the relevant one, and by how much leakage widens that: more is"
      " stronger memory.",
      lambda one: (words.difference(one.offset, 1) + _star(one.offset),),
    ),
  ):
    rows = [
      (one.model, one.leakage, f"{one.size:,}", *cells(one))
      for one in found.memory
    ]
    names = ("Without leakage", "With leakage", "Change")
    last = names if len(rows[0]) == 6 else ("Increase, p",)
    header = ("Reranker", "Trained with", "Instances", *last)
    sections.append((title, explanation, (header, rows, header[2:])))
  return sections


def _sizes(chosen: Iterable[results.MeasureTable]) -> Section:
  """How often the grid search chose which size."""
  rows = [
    (
      _report_tables.measure_name(table.measure),
      label,
      ", ".join(
        f"{size:,} ({sizes.count(size)})" for size in sorted(set(sizes))
      ),
    )
    for table in chosen
    for label, sizes in table.sizes.items()
  ]
  return (
    "Chosen sizes",
    "Instances, and in how many of the folds and repetitions they were chosen.",
    (("Measure", "Reranker, leakage", "Sizes (times)"), rows, ()),
  )


def _trainings(found: results.Study) -> Section:
  groups: dict[tuple[str, int], list[results.Training]] = {}
  for one in found.trainings:
    groups.setdefault((one.model, one.size), []).append(one)
  rows = [
    (
      model,
      f"{size:,}",
      str(len(group)),
      f"{group[0].num_parameters:,}",
      f"{group[0].steps:,}",
      _report_tables.duration(
        statistics.median(one.train_seconds for one in group)
      ),
      _report_tables.duration(
        statistics.median(one.rerank_seconds for one in group)
      ),
      _report_tables.duration(
        sum(one.train_seconds + one.rerank_seconds for one in group)
      ),
    )
    for (model, size), group in groups.items()
  ]
  titles = (
    "Instances", "Trainings", "Parameters", "Steps", "Training", "Reranking",
    "Together",
  )  # fmt: skip
  return (
    "Trainings",
    "Median times, and the sum over all kinds of leakage and repetitions.",
    (("Reranker", *titles), rows, titles),
  )


def _sets(found: results.Study) -> Section:
  seen = {}
  for one in found.trainings:
    made = one.manifest
    seen[made.size, made.seed, splits.NAMES.index(made.name)] = made
  rows = [
    (
      made.name,
      f"{made.size:,}",
      str(made.seed),
      f"{made.num_queries:,}",
      f"{made.num_leaked:,}",
      str(made.num_leaked_queries),
      str(made.num_targets),
      made.digest[:12],
    )
    for _, made in sorted(seen.items())
  ]
  titles = (
    "Instances", "Seed", "Queries", "Leaked instances", "Leaked queries",
    "Test queries leaked",
  )  # fmt: skip
  return (
    "Training sets",
    "What they hold, and the beginning of the digest of all their texts.",
    (("Kind", *titles, "Digest"), rows, titles),
  )


def _star(comparison: study.Comparison) -> str:
  return " *" if comparison.is_significant else ""


def _drawing(found: results.Study) -> str:
  """Draws the first measure against the size, a panel for each reranker."""
  name = found.measures[0].measure
  tables = [t for t in found.measures if t.measure == name and t.size]
  panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
  for table in tables:
    for cell in table.cells:
      panel = panels.setdefault(cell.model, {})
      sizes, means = panel.setdefault(cell.leakage, ([], []))
      sizes.append(table.size)
      means.append(cell.mean)
  return _plots.together(
    panels,
    label=_report_tables.measure_name(name),
    across="instances of the training set",
    level=tables[0].baseline,
  )


def _page(found: results.Study) -> str:
  """Returns the Markdown page."""
  parts = ["# Query leakage, planted", words.setting(found.facts)]
  parts += ["## What is significant"]
  parts += [f"- {said}" for said in words.outcomes(found)]
  parts += ["## Test queries and near-duplicates", *words.data(found.facts)]
  parts.append("## Rerankers")
  parts += [f"- {text_tables.escaped(note)}" for note in found.notes]
  parts += ["## Tables", words.reading(found)]
  for title, explanation, table in tables(found):
    parts += [f"### {title}", explanation, text_tables.markdown(*table)]
  name = _report_tables.measure_name(found.measures[0].measure)
  parts += [
    f"### {name} against the size of the training set",
    f"The dashed line is {results.BASELINE}.",
    f"![{name} against instances, for each reranker](study.svg)",
    "## What this does not say",
    words.LIMITS,
  ]
  return "\n\n".join(parts) + "\n"
