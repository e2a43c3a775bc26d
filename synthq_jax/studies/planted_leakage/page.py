"""Makes the page of the planted-leakage study: tables, and a drawing."""

import statistics
from collections.abc import Iterable

from synthq_jax.leakage import splits, study
from synthq_jax.report import blocks, plots
from synthq_jax.report import tables as cells
from synthq_jax.retrieval import significance
from synthq_jax.studies import frame
from synthq_jax.studies.planted_leakage import tables

__all__ = ["make_page"]

_NONE, *_LEAKING = splits.NAMES
_WORDS = frame.load_words("planted_leakage")


def make_page(result: tables.Study) -> blocks.Page:
  """Makes the page.

  Its tables show effectiveness by measure, memorisation, effectiveness by size,
  chosen sizes, trainings and training sets.
  """
  facts, name = result.facts, cells.measure_name(result.measures[0].measure)
  chosen = [table for table in result.measures if not table.size]
  fixed = [table for table in result.measures if table.size]
  other = f", trained on {facts.train_source}" if facts.train_source else ""
  return blocks.Page(
    title="Query leakage, planted",
    introduction=(_WORDS("setting", facts=facts, other=other),),
    parts=(
      frame.make_part(
        "How to read the tables",
        _WORDS("reading", alpha=result.alpha, level=1 - result.alpha),
      ),
      *(_make_effectiveness(result, table) for table in chosen),
      *_make_memories(result),
      *(_make_effectiveness(result, table) for table in fixed),
      _make_sizes(chosen),
      _make_trainings(result),
      _make_sets(result),
      frame.make_part(
        f"{name} against the size of the training set",
        blocks.Paragraph(text=f"The dashed line is {tables.BASELINE}."),
        blocks.Figure(
          svg=_draw(result),
          caption=f"{name} against instances, for each reranker",
          file="study.svg",
        ),
      ),
      frame.make_part(
        "Test queries and near-duplicates",
        _WORDS("queries", facts=facts),
        _WORDS("near_duplicates", facts=facts, origin=_WORDS.text(facts.near)),
      ),
      frame.make_part("Rerankers", blocks.Items(texts=result.notes)),
      frame.make_part("What this does not say", _WORDS("limits")),
    ),
  )


def _get_decimals(measure: str) -> int:
  return 1 if measure in study.FEWER_IS_BETTER else 3


def _format_difference(
  comparison: significance.Comparison, decimals: int
) -> str:
  p_value = (
    "p < .001"
    if comparison.corrected < 0.001
    else f"p = {comparison.corrected:.3f}"
  )
  return f"{comparison.difference:+.{decimals}f}, {p_value}"


def _add_star(text: str, comparison: significance.Comparison) -> str:
  return f"{text} *" if comparison.is_significant else text


def _make_effectiveness(
  result: tables.Study, table: tables.MeasureTable
) -> blocks.Part:
  """Makes a table of rerankers by kind of leakage, with differences and p values.

  Rerankers that rank no better than chance without leakage get a second table.
  """
  decimals = _get_decimals(table.measure)
  ranking = [
    (name, f"{level:.{decimals}f}", "", "", "", "")
    for name, level in (
      (tables.BASELINE, table.baseline),
      ("Random order", table.chance),
    )
  ]
  memory_alone = []
  for model in dict.fromkeys(cell.model for cell in table.cells):
    own = {cell.leakage: cell for cell in table.cells if cell.model == model}
    row = [model, f"{own[_NONE].mean:.{decimals}f}"]
    for kind in _LEAKING:
      compared = own[kind].comparison
      row.append(_add_star(f"{own[kind].mean:.{decimals}f}", compared))
      row.append(_format_difference(compared, decimals))
    rows = ranking if table.ranks(model) else memory_alone
    rows.append(tuple(row))
  titles = [kind.capitalize() for kind in splits.NAMES]
  pairs = [(title, f"{title}: change, p") for title in titles[1:]]
  header = ("Reranker", titles[0], *(title for pair in pairs for title in pair))
  size = (
    f"training sets of {table.size:,} instances"
    if table.size
    else f"size chosen by {result.folds}-fold cross-validation"
  )
  better = "less" if table.measure in study.FEWER_IS_BETTER else "more"
  return frame.make_part(
    f"{cells.measure_name(table.measure)}, {size}",
    _WORDS("effectiveness", number=result.facts.num_scored, better=better),
    *(
      block
      for words, rows in (((), ranking), ((_WORDS("alone"),), memory_alone))
      if rows
      for block in (
        *words,
        blocks.Table(header=header, rows=tuple(rows), numeric=header[1:]),
      )
    ),
  )


def _make_memories(result: tables.Study) -> list[blocks.Part]:
  """Makes tables of ranks, scores and offsets of leaked documents."""
  if not result.memory:
    return []
  same = {
    "Reranker": lambda row: row.model,
    "Trained with": lambda row: row.leakage,
    "Instances": lambda row: f"{row.size:,}",
  }
  ranks = {
    "Without leakage": lambda row: f"{row.rank_without:.1f}",
    "With leakage": lambda row: _add_star(f"{row.rank_with:.1f}", row.rank),
    "Change": lambda row: _format_difference(row.rank, 1),
  }
  scores = {
    "Without leakage": lambda row: f"{row.score_without:.3f}",
    "With leakage": lambda row: f"{row.score_with:.3f}",
    "Change": lambda row: f"{row.score_with - row.score_without:+.3f}",
  }
  offsets = {
    "Increase, p": lambda row: _add_star(
      _format_difference(row.offset, 1), row.offset
    )
  }
  return [
    frame.make_part(
      title,
      _WORDS(words, depth=result.depth),
      cells.of(result.memory, same | columns, left=tuple(same)[:2]),
    )
    for title, words, columns in (
      ("Mean rank of leaked relevant documents", "ranks", ranks),
      ("Mean score of leaked relevant documents", "scores", scores),
      (
        "Rank offset between leaked relevant and non-relevant documents",
        "offsets",
        offsets,
      ),
    )
  ]


def _make_sizes(chosen: Iterable[tables.MeasureTable]) -> blocks.Part:
  """Makes a table of the chosen sizes and how often each was chosen."""
  rows = [
    (cells.measure_name(table.measure), label, sizes)
    for table in chosen
    for label, sizes in table.sizes.items()
  ]
  columns = {
    "Measure": lambda row: row[0],
    "Reranker, leakage": lambda row: row[1],
    "Sizes (times)": lambda row: ", ".join(
      f"{size:,} ({row[2].count(size)})" for size in sorted(set(row[2]))
    ),
  }
  table = cells.of(rows, columns, left=tuple(columns))
  return frame.make_part("Chosen sizes", _WORDS("sizes"), table)


def _make_trainings(result: tables.Study) -> blocks.Part:
  groups = frame.group_by(
    result.trainings, lambda member: (member.model, member.size)
  )

  def median(name: str):
    return lambda group: cells.duration(
      statistics.median(getattr(member, name) for member in group)
    )

  return frame.make_part(
    "Trainings",
    _WORDS("trainings"),
    cells.of(
      groups.values(),
      {
        "Reranker": lambda group: group[0].model,
        "Instances": lambda group: f"{group[0].size:,}",
        "Trainings": lambda group: str(len(group)),
        "Parameters": lambda group: f"{group[0].num_parameters:,}",
        "Steps": lambda group: f"{group[0].steps:,}",
        "Training": median("train_seconds"),
        "Reranking": median("rerank_seconds"),
        "Together": lambda group: cells.duration(
          sum(member.train_seconds + member.rerank_seconds for member in group)
        ),
      },
    ),
  )


def _make_sets(result: tables.Study) -> blocks.Part:
  seen: dict[tuple[int, int, int], splits.Manifest] = {}
  for training in result.trainings:
    manifest = training.manifest
    seen[manifest.size, manifest.seed, splits.NAMES.index(manifest.name)] = (
      manifest
    )
  return frame.make_part(
    "Training sets",
    _WORDS("sets"),
    cells.of(
      [manifest for _, manifest in sorted(seen.items())],
      {
        "Kind": lambda manifest: manifest.name,
        "Instances": lambda manifest: f"{manifest.size:,}",
        "Seed": lambda manifest: str(manifest.seed),
        "Queries": lambda manifest: f"{manifest.num_queries:,}",
        "Leaked instances": lambda manifest: f"{manifest.num_leaked:,}",
        "Leaked queries": lambda manifest: str(manifest.num_leaked_queries),
        "Test queries leaked": lambda manifest: str(manifest.num_targets),
        "Digest": lambda manifest: manifest.digest[:12],
      },
      left=("Kind", "Digest"),
    ),
  )


def _draw(result: tables.Study) -> str:
  name = result.measures[0].measure
  fixed = [t for t in result.measures if t.measure == name and t.size]
  panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
  for table in fixed:
    for cell in table.cells:
      panel = panels.setdefault(cell.model, {})
      sizes, means = panel.setdefault(cell.leakage, ([], []))
      sizes.append(table.size)
      means.append(cell.mean)
  return plots.together(
    panels,
    label=cells.measure_name(name),
    across="instances of the training set",
    level=fixed[0].baseline,
  )
