"""Draws scores: tables of rows, against epsilon, over test sets."""

import collections
import math
from collections.abc import Callable, Mapping, Sequence

from synthq_jax import intervals
from synthq_jax.report import blocks, page, plots, tables, words
from synthq_jax.retrieval import measures as measures_lib
from synthq_jax.runtime import comparison_results, noisy_results, results
from synthq_jax.runtime import rows as rows_lib

__all__ = [
  "FURTHER",
  "LEARNING",
  "OTHERS",
  "PICTURE",
  "PRIVATE",
  "PRIVATE_PICTURE",
  "PRIVATE_TRAINING",
  "PUBLIC",
  "PUBLIC_FURTHER",
  "RELEASED",
  "TRAINING",
  "main_table",
  "screen_table",
]

_NAME = tables.row_name
_POINTS = 3
"""Epsilons from which on a curve over them is drawn."""
Content = tuple[blocks.Block, ...]


def _released(released_scores: Sequence[results.ReleasedScores]) -> Content:
  """Returns scores that were released with noise, and how far they hold."""
  content: list[blocks.Block] = []
  for made in released_scores:
    for measure in made.rows[0].means:
      title = tables.measure_name(measure)
      columns = {
        "Row": lambda item: tables.with_code(item.row),
        "epsilon": lambda item: tables.epsilon(item.epsilon),
        title: lambda item, m=measure: tables.interval(item.means[m].here),
        "over BM25": lambda item, m=measure: tables.interval(
          getattr(item.over_bm25.get(m), "here", None), "+.3f"
        ),
        f"{title}, beyond": lambda item, m=measure: _ends(item.means[m], ".3f"),
        "over BM25, beyond": lambda item, m=measure: _ends(
          item.over_bm25.get(m), "+.3f"
        ),
      }
      columns["Trained on"] = lambda item: item.label
      content.append(tables.of(made.rows, columns, left=("Row", "Trained on")))
    content.append(
      words.paragraph(
        "scores.released",
        number=tables.count(made.num_queries),
        epsilon=tables.claimed(made.statement),
        noise=f"{made.noise:.2g}",
        confidence=f"{made.confidence:.0%}",
      )
    )
    for measure in made.rows[0].means:
      content += _order(made, measure)
  return tuple(content)


def _ends(mean: results.ReleasedMean | None, form: str) -> str:
  """Writes the interval of noise and sampling; its mean stands beside it."""
  if mean is None:
    return "-"
  return f"[{mean.beyond.low:{form}}, {mean.beyond.high:{form}}]"


def _order(made: results.ReleasedScores, measure: str) -> Content:
  """Says of each pair of rows whether it is in order, or left open by noise."""
  signs = {
    (pair.first, pair.second): ">"
    if pair.less.beyond.low > 0
    else ("(>)" if pair.less.here.low > 0 else "?")
    for pair in noisy_results.pairs(made, measure)
  }
  if not signs:
    return ()
  names = list(dict.fromkeys(name for pair in signs for name in pair))
  numbers = {name: number for number, name in enumerate(names, 1)}
  columns = {"Row": lambda item: f"{numbers[item]}. {_NAME(item)}"}
  columns |= {
    str(numbers[name]): lambda item, name=name: signs.get((item, name), "")
    for name in names[1:]
  }
  explained = words.paragraph(
    "scores.order",
    measure=tables.measure_name(measure),
    confidence=f"{made.confidence:.0%}",
    number=len(signs),
  )
  return explained, tables.of(names, columns)


def _picture(
  evaluations: Sequence[results.Evaluation],
  measures: Sequence[str],
  released_scores: Sequence[results.ReleasedScores],
) -> Content:
  """Draws the rows that may be shared: by released scores, or on public queries."""
  for made in released_scores:
    measure = next(iter(made.rows[0].means))
    rows = {
      tables.call_row(item.row, item.epsilon): item.means[measure].here
      for item in made.rows
    }
    caption = "scores.released_picture"
    return _draw_rows(rows, caption, measure=tables.measure_name(measure))
  return _systems(evaluations, measures[0], "public queries")


def _draw_rows(
  rows: Mapping[str, intervals.Interval], caption: str, **values: str
) -> Content:
  """Draws a mean with its interval for each row, BM25 as a line."""
  lexical = tables.call_row(rows_lib.BM25)
  points = {name: mean for name, mean in rows.items() if name != lexical}
  if not points:
    return ()
  svg = plots.in_rows(
    list(points),
    {"with its interval": list(points.values())},
    label=values["measure"],
    lines={k: mean for k, mean in rows.items() if k == lexical},
  )
  text = words.paragraph.text(caption, **values)
  return (blocks.Figure(svg=svg, caption=text),)


def _public(
  evaluations: Sequence[results.Evaluation],
  measures: Sequence[str],
  released_scores: Sequence[results.ReleasedScores],
) -> Content:
  if released_scores:
    return ()
  if not evaluations:
    return (words.paragraph("scores.nothing_public"),)
  return (
    words.paragraph("scores.public"),
    *_scores(evaluations, measures),
  )


def _private(
  main: Sequence[results.Evaluation],
  comparison: comparison_results.QueryComparison,
) -> Content:
  measure = comparison.measures[0]
  return (
    *_scores(main, comparison.measures, comparison.rows),
    words.paragraph("scores.headline", measure=measure),
    *_kept(main, measure),
    *_differences(comparison.differences, measure),
  )


def _scores(
  evaluations: Sequence[results.Evaluation],
  measures: Sequence[str],
  headlined: Sequence[comparison_results.ScoredRow] = (),
  main: Sequence[results.Evaluation] = (),
) -> Content:
  """Returns a table for each test set and what a reader should know of it.

  Args:
    evaluations: of all sets.
    measures: as in `main_table`.
    headlined: as in `main_table`.
    main: rows whose traps and labels stand above.
  """
  above = {trap for item in main for trap in item.traps}
  content: list[blocks.Block] = []
  for test_set in dict.fromkeys(item.test_set for item in evaluations):
    chosen = [item for item in evaluations if item.test_set == test_set]
    counts = sorted({item.num_queries for item in chosen})
    content += [
      main_table(chosen, measures, headlined, with_label=not main),
      words.paragraph(
        "scores.test_set",
        test_set=test_set,
        counts=" or ".join(map(tables.count, counts)),
      ),
    ]
    notes = [
      (
        _NAME(item.name),
        [x for x in item.traps if x not in above] + [item.met] * (not main),
      )
      for item in chosen
    ]
    if traps := tables.noted(notes):
      content.append(words.paragraph("scores.traps", traps=" ".join(traps)))
  return tuple(content)


def main_table(
  evaluations: Sequence[results.Evaluation],
  measures: Sequence[str],
  headlined: Sequence[comparison_results.ScoredRow] = (),
  *,
  name: Callable[[rows_lib.Row], str] = tables.with_code,
  with_label: bool = True,
) -> blocks.Table:
  """Returns one row per evaluation, in their order.

  Args:
    evaluations: all of one test set.
    measures: names of `Evaluation.measures`; "R@10" is written "Recall@10".
    headlined: rows of a comparison, which is private, as what they add is: the
      difference from BM25, and the share of the real queries' gain.
    name: writes the name of a row.
    with_label: whether the last column names the training data.
  """
  rows = {(o.evaluation.test_set, o.evaluation.name): o for o in headlined}
  scored = {
    tables.measure_name(each): lambda item, each=each: tables.interval(
      item.measures.get(each)
    )
    for each in measures
  }
  headline = {
    "over BM25": lambda row: tables.interval(row.over_bm25, "+.3f"),
    "gain kept": lambda row: tables.interval(row.gain_kept, ".2f"),
  }
  added = {
    title: lambda item, cell=cell: cell(rows[item.test_set, item.name])
    for title, cell in headline.items()
    if rows
  }
  return tables.of(
    evaluations,
    {
      "Row": lambda item: name(item.row),
      "epsilon": lambda item: tables.epsilon(item.epsilon),
      **scored,
      **added,
      **({"Trained on": lambda item: item.label} if with_label else {}),
    },
    left=("Row", "Trained on"),
  )


def screen_table(
  evaluations: Sequence[results.Evaluation],
  measures: Sequence[str],
  headlined: Sequence[comparison_results.ScoredRow] = (),
  *,
  width: int = 100,
) -> str:
  """Returns the main table as text with lines of at most `width` characters.

  What is left out first: what rows are trained on, then intervals, last those of
  the difference from BM25. Nothing else is: many measures make longer lines.

  Args:
    evaluations: as in `main_table`.
    measures: as in `main_table`.
    headlined: as in `main_table`.
    width: characters of a line.
  """
  whole = main_table(
    evaluations, measures, headlined, name=lambda row: _NAME(str(row))
  )
  first = [tables.measure_name(name) for name in measures[:1]]
  levels = [*whole.header], [*first, "over BM25"], ["over BM25"], []
  text = whole.text()
  for titles in levels:
    if max(map(len, text.splitlines())) <= width:
      break
    text = _narrowed(whole, titles).text()
  return text


def _narrowed(table: blocks.Table, titles: Sequence[str]) -> blocks.Table:
  """Returns a table without its last column, and intervals in these alone."""
  header = table.header[:-1]
  return blocks.Table(
    header=header,
    rows=tuple(
      tuple(
        cell if title in titles else cell.partition(" [")[0]
        for title, cell in zip(header, row[:-1], strict=True)
      )
      for row in table.rows
    ),
    numeric=table.numeric,
  )


def _kept(main: Sequence[results.Evaluation], measure: str) -> Content:
  """Returns each retriever's share of the score of the real queries."""
  means = {
    item.row: item.measures[measure].mean
    for item in main
    if measure in item.measures and item.row.system == rows_lib.DENSE
  }
  whole = means.pop(rows_lib.ORIGINAL, 0.0)
  if not whole:
    return ()
  shares = (
    f"{_NAME(str(row))} {mean / whole:.3f}" for row, mean in means.items()
  )
  return (
    words.paragraph("scores.kept", measure=measure, shares=", ".join(shares)),
  )


def _systems(
  main: Sequence[results.Evaluation], measure: str, kind: str
) -> Content:
  """Draws every system, BM25 as a line: over epsilon, where there are three."""
  scored = [item for item in main if measure in item.measures]
  values = {"measure": measure, "kind": kind}
  epsilons = sorted({item.epsilon for item in scored if _is_noisy(item)})
  labels = {_place(epsilon): tables.epsilon(epsilon) for epsilon in epsilons}
  if len(labels) < _POINTS:
    rows = {
      tables.call_row(item.row, item.epsilon): item.measures[measure]
      for item in scored
    }
    return _draw_rows(rows, "scores.picture", **values)
  low, high = min(labels), max(labels)
  others = {
    "untrained": (low - 2.6, "untrained"),
    "public_only": (low - 1.3, "public\nmodel"),
    "": (high + 1.3, "no noise"),
    "original": (high + 2.6, "real\nqueries"),
  }
  places: dict[float, str] = {}
  for place, label in labels.items():  # 8 and 8.04 share a label
    if all(place - each > 0.25 for each in places):
      places[place] = label
  lines, series = {}, collections.defaultdict(list)
  for item in scored:
    name, mean = tables.call_row(item.row), item.measures[measure]
    if _is_noisy(item):
      place = _place(item.epsilon)
    elif item.row != rows_lib.BM25 and (
      item.row.pairs in others or item.epsilon is not None
    ):
      place, label = others.get(item.row.pairs, others[""])
      places[place] = label
    else:
      lines[name] = mean
      continue
    if item.row.pairs in {*others, rows_lib.SYNTHETIC}:
      name = name.partition(", ")[0]
    series[name].append((place, mean))
  svg = plots.over_places(
    {name: sorted(row, key=lambda p: p[0]) for name, row in series.items()},
    dict(sorted(places.items())),
    lines,
    measure=measure,
  )
  caption = words.paragraph.text("scores.picture", **values)
  return (blocks.Figure(svg=svg, caption=caption),)


def _place(epsilon: float) -> float:
  """Returns the logarithm of an epsilon as it is written: 8 and 7.999 are one."""
  return math.log2(float(tables.epsilon(epsilon)))


def _is_noisy(item: results.Evaluation) -> bool:
  return item.epsilon is not None and 0 < item.epsilon < math.inf


def _differences(
  differences: Sequence[comparison_results.Difference], measure: str
) -> Content:
  """Returns tested pairs of rows; the first table has differences from BM25."""
  shown = [x for x in differences if x.second != rows_lib.LEXICAL]
  if not shown:
    return ()
  table = tables.of(
    shown,
    {
      "Row": lambda item: _NAME(item.first),
      "Against": lambda item: _NAME(item.second),
      f"Difference in {measure}": lambda item: f"{item.interval:+.3f}",
      "p": lambda item: tables.p_value(item.p_value),
    },
    left=("Row", "Against"),
  )
  return (
    blocks.Heading(text="Differences, query by query"),
    table,
    words.paragraph("scores.differences", tests=len(differences)),
  )


def _further(
  side_by_side: Sequence[comparison_results.SideBySide],
  further: Sequence[results.Evaluation],
) -> Content:
  """Returns rows side by side over the further test sets, and the sets."""
  content: list[blocks.Block] = []
  for table in side_by_side:
    content += [
      blocks.Heading(text=tables.measure_name(table.measure)),
      table.table,
      blocks.Paragraph(text=table.caption),
    ]
  return (*content, *(_sets(further) if further else ()))


def _sets(evaluations: Sequence[results.Evaluation]) -> Content:
  """Lists split and size of each set; traps that all sets share stand once."""
  table = tables.of(
    {item.test_set: item for item in evaluations}.values(),
    {
      "Set": lambda item: item.test_set,
      "Split": lambda item: item.split,
      "Judged queries": lambda item: f"{item.num_queries:,}",
      "A query's own id": lambda item: (
        "dropped" if item.drop_identical else "kept"
      ),
    },
    left=("Set", "Split", "A query's own id"),
  )
  # What holds for some sets alone is in the table; for some rows, it is said.
  said = dict.fromkeys(trap for item in evaluations for trap in item.traps)
  notes: dict[str, dict[str, None]] = {}
  for item in evaluations:
    notes.setdefault(_NAME(item.name), {}).update(dict.fromkeys(item.traps))
  shared = [
    (
      name,
      [t for t in said if t in own and not t.startswith(measures_lib.OWN_ID)],
    )
    for name, own in notes.items()
  ]
  return (
    blocks.Heading(text="The sets"),
    table,
    words.paragraph("scores.set_traps", traps=" ".join(tables.noted(shared))),
  )


def _training(checkpoints: Sequence[results.Checkpoint]) -> Content:
  """Returns a table of trainings: epsilon, steps, batch, parameters, time."""
  if not checkpoints:
    return ()
  return (
    tables.of(
      checkpoints,
      {
        "Model": lambda item: item.kind,
        "For row": lambda item: _NAME(item.name),
        "epsilon": lambda item: tables.claimed(item.statement),
        "Steps": lambda item: f"{item.steps:,}",
        "Batch size": lambda item: f"{item.batch_size:,}",
        "Parameters": lambda item: f"{item.num_parameters:,}",
        "Time": lambda item: tables.duration(item.seconds),
      },
      left=("Model", "For row"),
    ),
  )


def _learning(
  curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
) -> Content:
  """Returns a drawing of learning curves, or nothing where there are none."""
  if not curves:
    return ()
  return (
    blocks.Figure(
      svg=plots.curves(curves, label="loss (nats)"),
      caption=words.paragraph.text("scores.curves"),
    ),
  )


def _trained(
  checkpoints: Sequence[results.Checkpoint],
  curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
) -> Content:
  return (*_training(checkpoints), *_learning(curves))


def _private_curves(
  curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
) -> Content:
  return _learning(curves) or (words.paragraph("scores.no_curves"),)


_FURTHER = "Scores on further test sets"
RELEASED = page.Section(
  "Scores on private queries, with noise", _released, shareable=True
)
PUBLIC = page.Section("Scores on public queries", _public, shareable=True)
PUBLIC_FURTHER = page.Section(_FURTHER, _further, shareable=True)
TRAINING = page.Section("Training", _trained, shareable=True)
PICTURE = page.Section("Picture", _picture, shareable=True)
PRIVATE_PICTURE = page.Section(
  "Picture",
  lambda main, measures: _systems(main, measures[0], "private test queries"),
)
PRIVATE = page.Section("Scores on private queries", _private)
LEARNING = page.Section("Learning curves", _private_curves)
OTHERS = page.Section(
  "Scores on other queries",
  lambda evaluations, measures, main: _scores(
    evaluations, measures[:1], main=main
  ),
)
FURTHER = page.Section(_FURTHER, _further)
PRIVATE_TRAINING = page.Section(
  "Training",
  lambda checkpoints: _training(
    [item for item in checkpoints if not results.is_shareable(item)]
  ),
)
