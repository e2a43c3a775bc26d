"""Makes the page of the planted-leakage study: significance, tables, a drawing."""

import statistics
from collections.abc import Iterable

from synthq_jax.leakage import splits, study
from synthq_jax.report import blocks, plots
from synthq_jax.report import tables as cells
from synthq_jax.retrieval import significance
from synthq_jax.studies import frame
from synthq_jax.studies.planted_leakage import data, tables

__all__ = ["make_page"]

_NONE, *_LEAKING = splits.NAMES
_WORDS = frame.load_words("planted_leakage")


def make_page(result: tables.Study) -> blocks.Page:
  """Makes the page: significant differences, then tables.

  The tables show effectiveness by measure, memorisation, effectiveness by size,
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
        "What is significant",
        blocks.Items(texts=tuple(_describe_outcomes(result))),
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
        _describe_near_duplicates(facts),
      ),
      frame.make_part("Rerankers", blocks.Items(texts=result.notes)),
      frame.make_part("What this does not say", _WORDS("limits")),
    ),
  )


def _describe_near_duplicates(facts: data.Facts) -> blocks.Paragraph:
  return _WORDS(
    "near_duplicates",
    facts=facts,
    origin=_WORDS.text(facts.near),
    kinds=", ".join(
      f"{n} {kind}" for kind, n in sorted(facts.relations.items())
    ),
    similar="; ".join(
      f"{name} {mean:.2f} ({low:.2f} to {high:.2f})"
      for name, (low, mean, high) in facts.similarities.items()
    ),
  )


# Significant differences, by family of tests.


def _describe_outcomes(result: tables.Study) -> list[str]:
  """Describes rerankers without leakage, then the effects of leakage."""
  chosen = [table for table in result.measures if not table.size]
  texts = [_describe_baseline(chosen[0])]
  for table in chosen:
    name, decimals = (
      cells.measure_name(table.measure),
      _get_decimals(table.measure),
    )
    signs = ("better", "worse")
    if table.measure in study.FEWER_IS_BETTER:
      signs = signs[::-1]
    fixed = [
      t for t in result.measures if t.size and t.measure == table.measure
    ]
    families = (
      (
        "sizes chosen by cross-validation",
        [table],
        f" {_describe_orders(table)}",
      ),
      ("each size", fixed, ""),
    )
    for title, group, orders in families:
      compared = [c.comparison for t in group for c in t.cells if c.comparison]
      family = _describe_family(compared, signs, decimals)
      texts.append(f"{name}, {title}: {family}{orders}".strip())
  for title, field, signs in (
    ("Mean rank of leaked relevant documents", "rank", ("later", "earlier")),
    ("Rank offset of leaked documents", "offset", ("wider", "narrower")),
  ):
    compared = [getattr(row, field) for row in result.memory]
    if compared:
      texts.append(f"{title}: {_describe_family(compared, signs, 1)}")
  return texts


def _get_decimals(measure: str) -> int:
  return 1 if measure in study.FEWER_IS_BETTER else 3


def _get_means(table: tables.MeasureTable, kind: str) -> dict[str, float]:
  return {c.model: c.mean for c in table.cells if c.leakage == kind}


def _describe_baseline(table: tables.MeasureTable) -> str:
  """Compares rerankers without leakage with BM25 and with chance."""
  decimals, means = _get_decimals(table.measure), _get_means(table, _NONE)
  name = tables.BASELINE
  ranked = study.rank_systems(means | {name: table.baseline}, table.measure)
  return _WORDS.text(
    "without",
    measure=cells.measure_name(table.measure),
    each=", ".join(f"{name} {x:.{decimals}f}" for name, x in means.items()),
    baseline=f"{name} {table.baseline:.{decimals}f}",
    chance=f"{table.chance:.{decimals}f}",
    name=name,
    better=", ".join(ranked[: ranked.index(name)]) or "none",
  )


def _describe_family(
  compared: list[significance.Comparison], signs: tuple[str, str], decimals: int
) -> str:
  significant = [
    comparison for comparison in compared if comparison.is_significant
  ]
  half = statistics.median(
    (comparison.difference.high - comparison.difference.low) / 2
    for comparison in compared
  )
  wide = _WORDS.text("half_width", half=f"{half:.{decimals}f}")
  if not significant:
    return _WORDS.text("none", total=len(compared), wide=wide)
  rest = len(compared) - len(significant)
  return _WORDS.text(
    "some",
    number=len(significant),
    total=len(compared),
    each="; ".join(
      f"{comparison.label}: {_format_difference(comparison, decimals)},"
      f" {signs[0] if comparison.difference.mean > 0 else signs[1]}"
      for comparison in significant
    ),
    rest=f" Not significant: the other {rest}." if rest else "",
    wide=wide,
  )


def _describe_orders(table: tables.MeasureTable) -> str:
  """Describes the order of the rerankers that rank, with and without leakage."""
  orders = {}
  for kind in splits.NAMES:
    means = {m: x for m, x in _get_means(table, kind).items() if table.ranks(m)}
    orders[kind] = study.rank_systems(means, table.measure)
  first = orders[_NONE]
  if len(first) < 2:
    return ""
  if all(order == first for order in orders.values()):
    return f"The order of those that rank is always {', '.join(first)}."
  each = (f"{', '.join(order)} with {kind}" for kind, order in orders.items())
  return f"The order of those that rank: {'; '.join(each)}."


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


# Tables.


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
