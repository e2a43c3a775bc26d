"""Builds the parts on scores: tables of rows, drawings, further test sets."""

import collections
import math
from collections.abc import Callable, Mapping, Sequence

from synthq_jax import intervals
from synthq_jax.report import blocks, page, plots, tables, words
from synthq_jax.report import values as values_lib
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
  "RELEASED",
  "TRAINING",
  "main_table",
  "screen_table",
]

_NAME = tables.row_name
_POINTS = 3
"""Least number of epsilons for a drawing over epsilon."""
Content = tuple[blocks.Block, ...]


def _build_released(values: values_lib.Shareable) -> Content:
  """Returns the noisy scores of private queries, with their intervals and order."""
  content: list[blocks.Block] = []
  for release in values.released_scores:
    for measure in release.rows[0].means:
      title = tables.measure_name(measure)
      columns = {
        "Row": lambda item: tables.with_code(item.row),
        "epsilon": lambda item: tables.epsilon(item.epsilon),
        title: lambda item, m=measure: tables.interval(item.means[m].here),
        "over BM25": lambda item, m=measure: tables.interval(
          getattr(item.over_bm25.get(m), "here", None), "+.3f"
        ),
        f"{title}, beyond": lambda item, m=measure: _format_interval(
          item.means[m], ".3f"
        ),
        "over BM25, beyond": lambda item, m=measure: _format_interval(
          item.over_bm25.get(m), "+.3f"
        ),
      }
      columns["Trained on"] = lambda item: item.label
      content.append(
        tables.of(release.rows, columns, left=("Row", "Trained on"))
      )
    content.append(
      words.paragraph(
        "scores.released",
        number=tables.count(release.num_queries),
        epsilon=tables.claimed(release.statement),
        noise=f"{release.noise:.2g}",
        confidence=f"{release.confidence:.0%}",
      )
    )
    for measure in release.rows[0].means:
      content += _make_order(release, measure)
  return tuple(content)


def _format_interval(mean: results.ReleasedMean | None, form: str) -> str:
  """Formats the interval of noise and sampling without its mean."""
  if mean is None:
    return "-"
  return f"[{mean.beyond.low:{form}}, {mean.beyond.high:{form}}]"


def _make_order(release: results.ReleasedScores, measure: str) -> Content:
  """Returns a table with the order of each pair of rows, as far as it is clear."""
  signs = {
    (pair.first, pair.second): ">"
    if pair.less.beyond.low > 0
    else ("(>)" if pair.less.here.low > 0 else "?")
    for pair in noisy_results.pairs(release, measure)
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
  explanation = words.paragraph(
    "scores.order",
    measure=tables.measure_name(measure),
    confidence=f"{release.confidence:.0%}",
    number=len(signs),
  )
  return explanation, tables.of(names, columns)


def _build_picture(values: values_lib.Shareable) -> Content:
  """Draws the shareable rows by released scores, else by public queries."""
  for release in values.released_scores:
    measure = next(iter(release.rows[0].means))
    rows = {
      tables.call_row(item.row, item.epsilon): item.means[measure].here
      for item in release.rows
    }
    caption = "scores.released_picture"
    return _draw_rows(rows, caption, measure=tables.measure_name(measure))
  return _draw_systems(values.evaluations, values.measures[0], "public queries")


def _build_private_picture(values: values_lib.Private) -> Content:
  return _draw_systems(values.main, values.measures[0], "private test queries")


def _draw_rows(
  rows: Mapping[str, intervals.Interval], caption: str, **values: str
) -> Content:
  """Draws each row's mean with its interval, and BM25 as a line."""
  lexical = tables.call_row(rows_lib.BM25)
  points = {name: mean for name, mean in rows.items() if name != lexical}
  if not points:
    return ()
  svg = plots.in_rows(
    list(points),
    {"row, with its interval": list(points.values())},
    label=values["measure"],
    lines={k: mean for k, mean in rows.items() if k == lexical},
  )
  text = words.paragraph.text(caption, **values)
  return (blocks.Figure(svg=svg, caption=text),)


def _build_public(values: values_lib.Shareable) -> Content:
  if values.released_scores:
    return ()
  if not values.evaluations:
    return (words.paragraph("scores.nothing_public"),)
  return (
    words.paragraph("scores.public"),
    *_make_score_tables(values.evaluations, values.measures),
  )


def _build_private(values: values_lib.Private) -> Content:
  main, comparison = values.main, values.comparison
  measure = values.measures[0]
  return (
    *_make_score_tables(main, values.measures, comparison.rows),
    words.paragraph("scores.headline", measure=measure),
    *_make_differences(comparison.differences, measure),
  )


def _build_others(values: values_lib.Private) -> Content:
  return _make_score_tables(
    values.evaluations, values.measures[:1], main=values.main
  )


def _make_score_tables(
  evaluations: Sequence[results.Evaluation],
  measures: Sequence[str],
  headlined: Sequence[comparison_results.ScoredRow] = (),
  main: Sequence[results.Evaluation] = (),
) -> Content:
  """Returns a table for each test set, with notes on how it was scored.

  Args:
    evaluations: evaluations on all sets.
    measures: as in `main_table`.
    headlined: as in `main_table`.
    main: rows of a table above, whose traps and labels are not repeated.
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
  """Returns a table with one row per evaluation, in their order.

  Args:
    evaluations: evaluations on one test set.
    measures: names of `Evaluation.measures`; "R@10" is printed as "Recall@10".
    headlined: rows of a private comparison. They add two private columns: the
      difference from BM25, and "gain kept".
    name: function that returns the printed name of a row.
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
  """Returns the main table as text, narrowed towards lines of `width` characters.

  As far as needed, it leaves out in turn: the training data; all intervals but those
  of the first measure and of the column "over BM25"; the first measure's intervals;
  the last intervals, of "over BM25". Many measures may still make longer lines.

  Args:
    evaluations: as in `main_table`.
    measures: as in `main_table`.
    headlined: as in `main_table`.
    width: wanted characters of a line.
  """
  table = main_table(
    evaluations, measures, headlined, name=lambda row: _NAME(str(row))
  )
  first_measure = [tables.measure_name(name) for name in measures[:1]]
  levels = [*table.header], [*first_measure, "over BM25"], ["over BM25"], []
  text = table.text()
  for titles in levels:
    if max(map(len, text.splitlines())) <= width:
      break
    text = _narrow_table(table, titles).text()
  return text


def _narrow_table(table: blocks.Table, titles: Sequence[str]) -> blocks.Table:
  """Drops a table's last column, and its intervals outside of some columns."""
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


def _draw_systems(
  main: Sequence[results.Evaluation], measure: str, kind: str
) -> Content:
  """Draws every system, over epsilon if there are `_POINTS` of them.

  BM25 is a line. So is a row without epsilon whose training data have no tick.
  """
  scored = [item for item in main if measure in item.measures]
  values = {"measure": measure, "kind": kind}
  noisy = {e for item in scored if (e := _get_noisy_epsilon(item)) is not None}
  labels = {
    _compute_x(epsilon): tables.epsilon(epsilon) for epsilon in sorted(noisy)
  }
  if len(labels) < _POINTS:
    rows = {
      tables.call_row(item.row, item.epsilon): item.measures[measure]
      for item in scored
    }
    return _draw_rows(rows, "scores.picture", **values)
  lowest, highest = min(labels), max(labels)
  others = {
    "untrained": (lowest - 2.6, "untrained"),
    "public_only": (lowest - 1.3, "public\nmodel"),
    "": (highest + 1.3, "no noise"),
    "original": (highest + 2.6, "real\nqueries"),
  }
  ticks: dict[float, str] = {}
  for x, label in labels.items():  # 8 and 8.04 share a label
    if all(x - tick > 0.25 for tick in ticks):
      ticks[x] = label
  lines, series = {}, collections.defaultdict(list)
  for item in scored:
    name, mean = tables.call_row(item.row), item.measures[measure]
    epsilon = _get_noisy_epsilon(item)
    if epsilon is not None:
      x = _compute_x(epsilon)
    elif item.row != rows_lib.BM25 and (
      item.row.pairs in others or item.epsilon is not None
    ):
      x, label = others.get(item.row.pairs, others[""])
      ticks[x] = label
    else:
      lines[name] = mean
      continue
    if item.row.pairs in {*others, rows_lib.SYNTHETIC}:
      name = name.partition(", ")[0]
    series[name].append((x, mean))
  svg = plots.over_places(
    {name: sorted(row, key=lambda p: p[0]) for name, row in series.items()},
    dict(sorted(ticks.items())),
    lines,
    measure=measure,
  )
  caption = words.paragraph.text("scores.picture", **values)
  return (blocks.Figure(svg=svg, caption=caption),)


def _compute_x(epsilon: float) -> float:
  """Returns log2 of the printed epsilon, so that 8 and 7.999 have one x."""
  return math.log2(float(tables.epsilon(epsilon)))


def _get_noisy_epsilon(item: results.Evaluation) -> float | None:
  """Returns the epsilon of a row that learned with noise, else None."""
  epsilon = item.epsilon
  is_noisy = epsilon is not None and 0 < epsilon < math.inf
  return epsilon if is_noisy else None


def _make_differences(
  differences: Sequence[comparison_results.Difference], measure: str
) -> Content:
  """Returns the tested pairs of rows without BM25, which the main table has."""
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


def _build_further(values: values_lib.Values) -> Content:
  """Returns tables of all rows over the further test sets, and of the sets."""
  content: list[blocks.Block] = []
  for table in values.side_by_side:
    content += [
      blocks.Heading(text=tables.measure_name(table.measure)),
      table.table,
      blocks.Paragraph(text=table.caption),
    ]
  evaluations = values.further_evaluations
  return (*content, *(_make_set_table(evaluations) if evaluations else ()))


def _make_set_table(evaluations: Sequence[results.Evaluation]) -> Content:
  """Returns split and size of each test set, and the notes on its scores."""
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
  # The table has traps of a set (OWN_ID); the notes have those of a row.
  all_traps = dict.fromkeys(trap for item in evaluations for trap in item.traps)
  notes: dict[str, dict[str, None]] = {}
  for item in evaluations:
    notes.setdefault(_NAME(item.name), {}).update(dict.fromkeys(item.traps))
  shared = [
    (
      name,
      [
        t
        for t in all_traps
        if t in own and not t.startswith(measures_lib.OWN_ID)
      ],
    )
    for name, own in notes.items()
  ]
  return (
    blocks.Heading(text="The sets"),
    table,
    words.paragraph("scores.set_traps", traps=" ".join(tables.noted(shared))),
  )


def _make_training(checkpoints: Sequence[results.Checkpoint]) -> Content:
  """Returns a table of trainings, or nothing without checkpoints."""
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


def _draw_learning(curves: values_lib.Curves) -> Content:
  """Draws learning curves; returns nothing without curves."""
  if not curves:
    return ()
  return (
    blocks.Figure(
      svg=plots.curves(curves, label="loss (nats)"),
      caption=words.paragraph.text("scores.curves"),
    ),
  )


def _build_training(values: values_lib.Shareable) -> Content:
  return (*_make_training(values.checkpoints), *_draw_learning(values.curves))


def _build_private_training(values: values_lib.Private) -> Content:
  return _make_training(
    [item for item in values.checkpoints if not results.is_shareable(item)]
  )


def _build_private_curves(values: values_lib.Private) -> Content:
  return _draw_learning(values.curves) or (words.paragraph("scores.no_curves"),)


RELEASED = page.Section(
  "Scores on private queries, with noise", _build_released
)
PUBLIC = page.Section("Scores on public queries", _build_public)
FURTHER = page.Section("Scores on further test sets", _build_further)
TRAINING = page.Section("Training", _build_training)
PICTURE = page.Section("Picture", _build_picture)
PRIVATE_PICTURE = page.Section("Picture", _build_private_picture)
PRIVATE = page.Section("Scores on private queries", _build_private)
LEARNING = page.Section("Learning curves", _build_private_curves)
OTHERS = page.Section("Scores on other queries", _build_others)
PRIVATE_TRAINING = page.Section("Training", _build_private_training)
