"""The drawings of a report: small, inline, the same bytes for the same data."""

import contextlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from synthq_jax import extras, intervals, text_tables

__all__ = [
  "curves",
  "in_rows",
  "matrices",
  "over_places",
  "ranks",
  "together",
]

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # no divisor shared with colors
_DASHES = ("--", ":", "-.", (0, (6, 2, 1, 2, 1, 2)), (0, (1, 4)), (0, (8, 4)))
_INK, _SOFT, _LINE, _PAPER = "#010101", "#020202", "#030303", "#fefefe"
"""Stand for colors of the page, which differ by day and night."""
_OF_PAGE = {
  _INK: "var(--ink, #1c2126)",
  _SOFT: "var(--soft, #5b6670)",
  _LINE: "var(--line, #dfe3e8)",
  _PAPER: "var(--paper, #ffffff)",
}
_SMALLEST = 0.7
"""Share of its size to which a drawing shrinks: its text stays readable."""
_SETTINGS = {
  "svg.hashsalt": "synthq",  # ids inside the drawing do not change by the run
  "svg.fonttype": "none",  # text stays text
  "font.family": "sans-serif",
  "font.size": 10,
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.grid": True,
  "grid.color": _LINE,
  "figure.facecolor": _PAPER,
  "axes.facecolor": _PAPER,
  "savefig.facecolor": _PAPER,
  **dict.fromkeys(
    (
      "text.color",
      "axes.labelcolor",
      "axes.titlecolor",
      "axes.edgecolor",
      "xtick.color",
      "ytick.color",
    ),
    _INK,
  ),
  "axes.axisbelow": True,
  "legend.frameon": False,
}


def over_places(
  points: Mapping[str, Sequence[tuple[float, intervals.Interval]]],
  places: Mapping[float, str],
  lines: Mapping[str, intervals.Interval],
  *,
  measure: str,
) -> str:
  """Draws a measure of systems over the epsilon they cost, with intervals.

  Args:
    points: for each system, (place, measure) from left to right.
    places: labels of the axis by place, such as epsilons by their logarithms.
    lines: measures without a place, drawn from side to side with their intervals.
    measure: its name, which labels the axis.

  Returns:
    An <svg> element.
  """
  with _style():
    figure, axes = _canvas(width=5.6, height=4.6)
    _draw_lines(axes.axhline, axes.axhspan, lines)
    for index, (name, row) in enumerate(points.items()):
      aside = 0.05 * (-1) ** index * ((index + 1) // 2)
      moved = [(place + aside, measured) for place, measured in row]
      _draw_points(axes, index, name, moved)
    axes.set_xticks([*places], [_plain(label) for label in places.values()])
    axes.set_xlim(min(places) - 0.5, max(places) + 0.5)
    axes.set_xlabel("epsilon (logarithmic)")
    axes.set_ylabel(_plain(measure))
    figure.legend(loc="outside lower left", ncols=2)
    return _svg(figure)


def curves(
  series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
  *,
  label: str,
) -> str:
  """Draws learning curves, one panel for each.

  Args:
    series: (steps, values) by name, at least one.
    label: what the values are, with their unit.

  Returns:
    An <svg> element.
  """
  columns = min(2, len(series))
  rows = -(-len(series) // columns)
  with _style():
    figure, grid = _canvases(rows, columns, width=7.6, height=2.4 * rows)
    for axes, (name, (steps, values)) in zip(
      grid, series.items(), strict=False
    ):
      alone = "o" if len(steps) == 1 else None  # a line of one point is none
      axes.plot(steps, values, color=_COLORS[0], linewidth=1.4, marker=alone)
      axes.set_title(_plain(name), fontsize=10, loc="left")
      axes.set_xlabel("optimizer steps")
      axes.set_ylabel(_plain(label))
    for axes in grid[len(series) :]:
      axes.set_visible(False)
    return _svg(figure)


def together(
  panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
  *,
  label: str,
  across: str = "optimizer steps",
  level: float | None = None,
) -> str:
  """Draws curves that are compared with each other in one panel.

  Args:
    panels: for each panel, (steps, values) by name; at least one panel.
    label: what the values are, with their unit.
    across: what the steps are.
    level: where a line is drawn from side to side, or None.

  Returns:
    An <svg> element.
  """
  rows = len(panels)
  with _style():
    figure, grid = _canvases(rows, 1, width=7.6, height=3.0 * rows)
    for axes, (title, series) in zip(grid, panels.items(), strict=True):
      for index, (name, (steps, values)) in enumerate(series.items()):
        axes.plot(
          steps,
          values,
          color=_COLORS[index % len(_COLORS)],
          marker=_MARKERS[index % len(_MARKERS)],
          markersize=4,
          linewidth=1.4,
          label=_plain(name),
        )
      if level is not None:
        axes.axhline(level, color=_SOFT, linewidth=1.0, linestyle="--")
      axes.set_title(_plain(title), fontsize=10, loc="left")
      axes.set_xlabel(_plain(across))
      axes.set_ylabel(_plain(label))
      axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _svg(figure)


def matrices(
  panels: Mapping[str, Sequence[Sequence[int]]], *, rows: str, columns: str
) -> str:
  """Draws tables of counts as squares, the darker the larger in their row.

  Args:
    panels: counts [row][column] by name, at least one.
    rows: what rows are.
    columns: what columns are.

  Returns:
    An <svg> element.
  """
  across = min(4, len(panels))
  down = -(-len(panels) // across)
  with _style(**{"axes.grid": False}):
    figure, grid = _canvases(down, across, width=9.2, height=2.6 * down)
    for axes, (name, counts) in zip(grid, panels.items(), strict=False):
      shares = [[count / max(sum(row), 1) for count in row] for row in counts]
      axes.pcolormesh(shares, cmap="Blues", vmin=0.0, vmax=1.0)
      axes.invert_yaxis()
      axes.set_aspect("equal")
      axes.set_xticks([])
      axes.set_yticks([])
      axes.set_title(_plain(name), fontsize=9, loc="left")
    for axes in grid[len(panels) :]:
      axes.set_visible(False)
    grid[0].set_ylabel(_plain(rows))
    grid[0].set_xlabel(_plain(columns))
    return _svg(figure)


def in_rows(
  labels: Sequence[str],
  points: Mapping[str, Sequence[float | intervals.Interval]],
  *,
  label: str,
  lines: Mapping[str, intervals.Interval] | None = None,
) -> str:
  """Draws a row for each label, with a point in it for each name.

  A grey line goes from the least of a row, or the lower end of its interval, to
  the largest, so that rows can be told apart even where many have the same size.

  Args:
    labels: of rows, the topmost first; at least one.
    points: for each name, a value for each row, or a mean with its interval.
    label: what the values are, with their unit.
    lines: what has no row, drawn from top to bottom with its interval.

  Returns:
    An <svg> element.
  """
  heights = range(len(labels), 0, -1)
  with _style():
    figure, axes = _canvas(width=5.6, height=1.3 + 0.28 * len(labels))
    _draw_lines(axes.axvline, axes.axvspan, lines or {})
    together = list(zip(*points.values(), strict=True))
    lows = [min(getattr(x, "low", x) for x in row) for row in together]
    highs = [max(getattr(x, "high", x) for x in row) for row in together]
    axes.hlines(heights, lows, highs, color=_SOFT, zorder=1)
    for index, (name, values) in enumerate(points.items()):
      axes.scatter(
        [getattr(x, "mean", x) for x in values],
        heights,
        s=34,
        color=_COLORS[index % len(_COLORS)],
        marker=_MARKERS[index % len(_MARKERS)],
        label=_plain(name),
      )
    axes.set_yticks(heights, [_plain(name) for name in labels])
    axes.set_ylim(0.4, len(labels) + 0.6)
    axes.set_xlabel(_plain(label))
    figure.legend(loc="outside upper left", ncols=3)
    return _svg(figure)


def ranks(
  panels: Mapping[str, Mapping[str, Sequence[tuple[int, intervals.Interval]]]],
  *,
  num_ranked: int,
) -> str:
  """Draws mean ranks of secrets against how often each was trained on.

  Args:
    panels: for each generator and kind of canary, (repetitions, mean rank) in
      ascending order; at least one panel.
    num_ranked: how many secrets were ranked.

  Returns:
    An <svg> element.
  """
  with _style():
    figure, grid = _canvases(1, len(panels), width=9.2, height=3.2)
    for axes, (title, series) in zip(grid, panels.items(), strict=True):
      axes.axhline(
        (num_ranked + 1) / 2,
        color=_SOFT,
        linestyle="--",
        linewidth=1.0,
        label="chance",
      )
      for index, (name, row) in enumerate(series.items()):
        aside = 1 + 0.025 * (-1) ** index * ((index + 1) // 2)
        moved = [(times * aside, rank) for times, rank in row]
        _draw_points(axes, index, name, moved)
      times = {number for row in series.values() for number, _ in row}
      axes.set_xscale("log")
      axes.set_xlim(min(times) / 1.8, max(times) * 1.8)
      axes.set_xticks(
        sorted(times), [f"{number:,}" for number in sorted(times)]
      )
      axes.set_xticks([], minor=True)
      axes.set_ylim(0, num_ranked)
      axes.set_title(_plain(title), fontsize=10, loc="left")
      axes.set_xlabel("times in the private data (logarithmic)")
    grid[0].set_ylabel(f"mean rank of {num_ranked:,} (1: by heart)")
    grid[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _svg(figure)


@contextlib.contextmanager
def _style(**more: Any) -> Iterator[None]:
  """Draws as the pages do; `more` are further settings of matplotlib."""
  with extras.required("run"):
    import matplotlib

  with matplotlib.rc_context({**_SETTINGS, **more}):
    yield


def _canvas(*, width: float, height: float):
  figure, grid = _canvases(1, 1, width=width, height=height)
  return figure, grid[0]


def _canvases(rows: int, columns: int, *, width: float, height: float):
  """Returns a figure, drawn without a display, and its axes in a list."""
  with extras.required("run"):
    from matplotlib import figure as figure_lib

  figure = figure_lib.Figure(figsize=(width, height), layout="constrained")
  return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _draw_lines(line, span, lines: Mapping[str, intervals.Interval]) -> None:
  """Draws what has no place across the picture, with its interval."""
  for index, (name, measured) in enumerate(lines.items()):
    span(measured.low, measured.high, color=_SOFT, alpha=0.12)
    line(
      measured.mean,
      color=_SOFT,
      linestyle=_DASHES[index % len(_DASHES)],
      linewidth=1.3,
      label=_plain(name),
    )


def _draw_points(axes, index: int, name: str, row) -> None:
  """Draws one family of intervals."""
  means = [measured.mean for _, measured in row]
  below = [max(0.0, mean.mean - mean.low) for _, mean in row]
  above = [max(0.0, mean.high - mean.mean) for _, mean in row]
  axes.errorbar(
    [place for place, _ in row],
    means,
    yerr=[below, above],
    color=_COLORS[index % len(_COLORS)],
    marker=_MARKERS[index % len(_MARKERS)],
    markersize=6,
    linewidth=1.6,
    capsize=3,
    label=_plain(name),
  )


def _plain(text: str) -> str:
  """Keeps a name from being read as a formula or as a hidden label."""
  text = text_tables.without_controls(text)
  return text.replace("_", " ").replace("$", r"\$").strip()


def _svg(figure) -> str:
  """Returns the drawing as an <svg> element, without date and preamble."""
  stream = io.StringIO()
  figure.savefig(stream, format="svg", metadata={"Date": None})
  text = stream.getvalue()
  narrowest = f"min-width: {_SMALLEST * 96 * figure.get_figwidth():.0f}px"
  text = text.replace("<svg ", f'<svg style="{narrowest}" ', 1)
  text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
  for color, meant in _OF_PAGE.items():
    text = text.replace(color, meant)
  return text[text.index("<svg") :].strip()
