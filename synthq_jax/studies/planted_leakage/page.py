"""Shows the study of planted leakage: what is significant, tables, a drawing."""

import statistics
from collections.abc import Iterable

from synthq_jax.leakage import splits, study
from synthq_jax.report import blocks, plots
from synthq_jax.report import tables as cells
from synthq_jax.retrieval import significance
from synthq_jax.studies import frame
from synthq_jax.studies.planted_leakage import data, tables

__all__ = ["page"]

_NONE, *_LEAKING = splits.NAMES
_WORDS = frame.words("planted_leakage")


def page(found: tables.Study) -> blocks.Page:
  """Returns the page: what is significant, then tables.

  Effectiveness by measure, memorisation, effectiveness by size, chosen sizes,
  trainings, training sets.
  """
  facts, name = found.facts, cells.measure_name(found.measures[0].measure)
  chosen = [table for table in found.measures if not table.size]
  fixed = [table for table in found.measures if table.size]
  other = f", trained on {facts.train_source}" if facts.train_source else ""
  return blocks.Page(
    title="Query leakage, planted",
    introduction=(_WORDS("setting", facts=facts, other=other),),
    parts=(
      frame.part(
        "What is significant",
        blocks.Items(texts=tuple(_outcomes(found))),
        _WORDS("reading", alpha=found.alpha, level=1 - found.alpha),
      ),
      *(_effectiveness(found, table) for table in chosen),
      *_memories(found),
      *(_effectiveness(found, table) for table in fixed),
      _sizes(chosen),
      _trainings(found),
      _sets(found),
      frame.part(
        f"{name} against the size of the training set",
        blocks.Paragraph(text=f"The dashed line is {tables.BASELINE}."),
        blocks.Figure(
          svg=_drawing(found),
          caption=f"{name} against instances, for each reranker",
          file="study.svg",
        ),
      ),
      frame.part(
        "Test queries and near-duplicates",
        _WORDS("queries", facts=facts),
        _near_duplicates(facts),
      ),
      frame.part("Rerankers", blocks.Items(texts=found.notes)),
      frame.part("What this does not say", _WORDS("limits")),
    ),
  )


def _near_duplicates(facts: data.Facts) -> blocks.Paragraph:
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


# What is significant and what is not, family by family.


def _outcomes(found: tables.Study) -> list[str]:
  """Says how good rerankers are without leakage, then what leakage changes."""
  chosen = [table for table in found.measures if not table.size]
  said = [_without(chosen[0])]
  for table in chosen:
    name, decimals = cells.measure_name(table.measure), _decimals(table.measure)
    signs = ("better", "worse")
    if table.measure in study.FEWER_IS_BETTER:
      signs = signs[::-1]
    fixed = [t for t in found.measures if t.size and t.measure == table.measure]
    families = (
      ("sizes chosen by cross-validation", [table], f" {_orders(table)}"),
      ("each size", fixed, ""),
    )
    for title, group, orders in families:
      compared = [c.comparison for t in group for c in t.cells if c.comparison]
      family = _family(compared, signs, decimals)
      said.append(f"{name}, {title}: {family}{orders}".strip())
  for title, of, signs in (
    ("Mean rank of leaked relevant documents", "rank", ("later", "earlier")),
    ("Rank offset of leaked documents", "offset", ("wider", "narrower")),
  ):
    compared = [getattr(one, of) for one in found.memory]
    if compared:
      said.append(f"{title}: {_family(compared, signs, 1)}")
  return said


def _decimals(measure: str) -> int:
  return 1 if measure in study.FEWER_IS_BETTER else 3


def _means(table: tables.MeasureTable, kind: str) -> dict[str, float]:
  return {c.model: c.mean for c in table.cells if c.leakage == kind}


def _without(table: tables.MeasureTable) -> str:
  """Says how good the rerankers are at all, next to BM25 and to chance."""
  decimals, means = _decimals(table.measure), _means(table, _NONE)
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


def _family(
  compared: list[significance.Comparison], signs: tuple[str, str], decimals: int
) -> str:
  significant = [one for one in compared if one.is_significant]
  half = statistics.median(
    (one.difference.high - one.difference.low) / 2 for one in compared
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
      f"{one.label}: {_difference(one, decimals)},"
      f" {signs[0] if one.difference.mean > 0 else signs[1]}"
      for one in significant
    ),
    rest=f" Not significant: the other {rest}." if rest else "",
    wide=wide,
  )


def _orders(table: tables.MeasureTable) -> str:
  """Says whether leakage changes which of those that rank is best."""
  orders = {}
  for kind in splits.NAMES:
    means = {m: x for m, x in _means(table, kind).items() if table.ranks(m)}
    orders[kind] = study.rank_systems(means, table.measure)
  first = orders[_NONE]
  if len(first) < 2:
    return ""
  if all(order == first for order in orders.values()):
    return f"The order of those that rank is always {', '.join(first)}."
  each = (f"{', '.join(order)} with {kind}" for kind, order in orders.items())
  return f"The order of those that rank: {'; '.join(each)}."


def _difference(one: significance.Comparison, decimals: int) -> str:
  p_value = "p < .001" if one.corrected < 0.001 else f"p = {one.corrected:.3f}"
  return f"{one.difference:+.{decimals}f}, {p_value}"


def _starred(text: str, comparison: significance.Comparison) -> str:
  return f"{text} *" if comparison.is_significant else text


# Tables.


def _effectiveness(
  found: tables.Study, table: tables.MeasureTable
) -> blocks.Part:
  """Rerankers against kinds of leakage, with differences and p values."""
  decimals = _decimals(table.measure)
  ranking = [
    (name, f"{level:.{decimals}f}", "", "", "", "")
    for name, level in (
      (tables.BASELINE, table.baseline),
      ("Random order", table.chance),
    )
  ]
  memory_alone = []
  for model in dict.fromkeys(cell.model for cell in table.cells):
    of = {cell.leakage: cell for cell in table.cells if cell.model == model}
    row = [model, f"{of[_NONE].mean:.{decimals}f}"]
    for kind in _LEAKING:
      compared = of[kind].comparison
      row.append(_starred(f"{of[kind].mean:.{decimals}f}", compared))
      row.append(_difference(compared, decimals))
    rows = ranking if table.ranks(model) else memory_alone
    rows.append(tuple(row))
  titles = [kind.capitalize() for kind in splits.NAMES]
  pairs = [(title, f"{title}: change, p") for title in titles[1:]]
  header = ("Reranker", titles[0], *(title for pair in pairs for title in pair))
  size = (
    f"training sets of {table.size:,} instances"
    if table.size
    else f"size chosen by {found.folds}-fold cross-validation"
  )
  better = "less" if table.measure in study.FEWER_IS_BETTER else "more"
  return frame.part(
    f"{cells.measure_name(table.measure)}, {size}",
    _WORDS("effectiveness", number=found.facts.num_scored, better=better),
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


def _memories(found: tables.Study) -> list[blocks.Part]:
  """Ranks, scores and offsets of leaked documents."""
  if not found.memory:
    return []
  same = {
    "Reranker": lambda one: one.model,
    "Trained with": lambda one: one.leakage,
    "Instances": lambda one: f"{one.size:,}",
  }
  ranks = {
    "Without leakage": lambda one: f"{one.rank_without:.1f}",
    "With leakage": lambda one: _starred(f"{one.rank_with:.1f}", one.rank),
    "Change": lambda one: _difference(one.rank, 1),
  }
  scores = {
    "Without leakage": lambda one: f"{one.score_without:.3f}",
    "With leakage": lambda one: f"{one.score_with:.3f}",
    "Change": lambda one: f"{one.score_with - one.score_without:+.3f}",
  }
  offsets = {
    "Increase, p": lambda one: _starred(_difference(one.offset, 1), one.offset)
  }
  return [
    frame.part(
      title,
      _WORDS(words, depth=found.depth),
      cells.of(found.memory, same | columns, left=tuple(same)[:2]),
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


def _sizes(chosen: Iterable[tables.MeasureTable]) -> blocks.Part:
  """How often the grid search chose which size."""
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
  return frame.part("Chosen sizes", _WORDS("sizes"), table)


def _trainings(found: tables.Study) -> blocks.Part:
  groups = frame.grouped(found.trainings, lambda one: (one.model, one.size))

  def median(name: str):
    return lambda group: cells.duration(
      statistics.median(getattr(one, name) for one in group)
    )

  return frame.part(
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
          sum(one.train_seconds + one.rerank_seconds for one in group)
        ),
      },
    ),
  )


def _sets(found: tables.Study) -> blocks.Part:
  seen: dict[tuple[int, int, int], splits.Manifest] = {}
  for one in found.trainings:
    made = one.manifest
    seen[made.size, made.seed, splits.NAMES.index(made.name)] = made
  return frame.part(
    "Training sets",
    _WORDS("sets"),
    cells.of(
      [made for _, made in sorted(seen.items())],
      {
        "Kind": lambda made: made.name,
        "Instances": lambda made: f"{made.size:,}",
        "Seed": lambda made: str(made.seed),
        "Queries": lambda made: f"{made.num_queries:,}",
        "Leaked instances": lambda made: f"{made.num_leaked:,}",
        "Leaked queries": lambda made: str(made.num_leaked_queries),
        "Test queries leaked": lambda made: str(made.num_targets),
        "Digest": lambda made: made.digest[:12],
      },
      left=("Kind", "Digest"),
    ),
  )


def _drawing(found: tables.Study) -> str:
  name = found.measures[0].measure
  fixed = [t for t in found.measures if t.measure == name and t.size]
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
