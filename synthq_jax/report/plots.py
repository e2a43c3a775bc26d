"""Draws inline SVG for reports: the same data give the same bytes."""

import contextlib
import io
import re
from collections.abc import Generator, Mapping, Sequence
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
"""Placeholders for colors that the page sets for its light and dark themes."""
_PAGE_COLORS = {
  _INK: "var(--ink, #1c2126)",
  _SOFT: "var(--soft, #5b6670)",
  _LINE: "var(--line, #dfe3e8)",
  _PAPER: "var(--paper, #ffffff)",
}
_MIN_SCALE = 0.7
"""Smallest scale of a drawing on a narrow screen, at which text stays readable."""
_SETTINGS = {
  "svg.hashsalt": "synthq",  # else ids inside the drawing are random
  "svg.fonttype": "none",  # keep text as text, not as outlines
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
  ticks: Mapping[float, str],
  lines: Mapping[str, intervals.Interval],
  *,
  measure: str,
) -> str:
  """Draws a measure of systems over their epsilon, with intervals.

  Args:
    points: for each system, (x, measure) from left to right.
    ticks: labels of the x axis by x, such as epsilons by their logarithms.
    lines: measures without an x, drawn as horizontal lines with intervals.
    measure: name of the measure, which labels the y axis.

  Returns:
    An <svg> element.
  """
  with _apply_style():
    figure, axes = _make_canvas(width=5.6, height=4.6)
    _draw_lines(axes.axhline, axes.axhspan, lines)
    for index, (name, row) in enumerate(points.items()):
      offset = 0.05 * (-1) ** index * ((index + 1) // 2)
      shifted = [(x + offset, measured) for x, measured in row]
      _draw_points(axes, index, name, shifted)
    axes.set_xticks([*ticks], [_escape_name(label) for label in ticks.values()])
    axes.set_xlim(min(ticks) - 0.5, max(ticks) + 0.5)
    axes.set_xlabel("epsilon (logarithmic)")
    axes.set_ylabel(_escape_name(measure))
    figure.legend(loc="outside lower left", ncols=2)
    return _render_svg(figure)


def curves(
  series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
  *,
  label: str,
) -> str:
  """Draws learning curves, one panel for each.

  Args:
    series: (steps, values) by name, at least one.
    label: label of the values, with their unit.

  Returns:
    An <svg> element.
  """
  columns = min(2, len(series))
  rows = -(-len(series) // columns)
  with _apply_style():
    figure, grid = _make_canvases(rows, columns, width=7.6, height=2.4 * rows)
    for axes, (name, (steps, values)) in zip(
      grid, series.items(), strict=False
    ):
      # A line of one point is invisible.
      marker = "o" if len(steps) == 1 else None
      axes.plot(steps, values, color=_COLORS[0], linewidth=1.4, marker=marker)
      axes.set_title(_escape_name(name), fontsize=10, loc="left")
      axes.set_xlabel("optimizer steps")
      axes.set_ylabel(_escape_name(label))
    for axes in grid[len(series) :]:
      axes.set_visible(False)
    return _render_svg(figure)


def together(
  panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
  *,
  label: str,
  across: str = "optimizer steps",
  level: float | None = None,
) -> str:
  """Draws several curves in each panel, for comparisons.

  Args:
    panels: for each panel, (steps, values) by name; at least one panel.
    label: label of the values, with their unit.
    across: label of the steps.
    level: value at which to draw a horizontal line; None for no line.

  Returns:
    An <svg> element.
  """
  rows = len(panels)
  with _apply_style():
    figure, grid = _make_canvases(rows, 1, width=7.6, height=3.0 * rows)
    for axes, (title, series) in zip(grid, panels.items(), strict=True):
      for index, (name, (steps, values)) in enumerate(series.items()):
        axes.plot(
          steps,
          values,
          color=_COLORS[index % len(_COLORS)],
          marker=_MARKERS[index % len(_MARKERS)],
          markersize=4,
          linewidth=1.4,
          label=_escape_name(name),
        )
      if level is not None:
        axes.axhline(level, color=_SOFT, linewidth=1.0, linestyle="--")
      axes.set_title(_escape_name(title), fontsize=10, loc="left")
      axes.set_xlabel(_escape_name(across))
      axes.set_ylabel(_escape_name(label))
      axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _render_svg(figure)


def matrices(
  panels: Mapping[str, Sequence[Sequence[int]]], *, rows: str, columns: str
) -> str:
  """Draws tables of counts as squares, darker for a larger share of their row.

  Args:
    panels: counts [row][column] by name, at least one.
    rows: label of the rows.
    columns: label of the columns.

  Returns:
    An <svg> element.
  """
  across = min(4, len(panels))
  down = -(-len(panels) // across)
  with _apply_style(**{"axes.grid": False}):
    figure, grid = _make_canvases(down, across, width=9.2, height=2.6 * down)
    for axes, (name, counts) in zip(grid, panels.items(), strict=False):
      shares = [[count / max(sum(row), 1) for count in row] for row in counts]
      axes.pcolormesh(shares, cmap="Blues", vmin=0.0, vmax=1.0)
      axes.invert_yaxis()
      axes.set_aspect("equal")
      axes.set_xticks([])
      axes.set_yticks([])
      axes.set_title(_escape_name(name), fontsize=9, loc="left")
    for axes in grid[len(panels) :]:
      axes.set_visible(False)
    grid[0].set_ylabel(_escape_name(rows))
    grid[0].set_xlabel(_escape_name(columns))
    return _render_svg(figure)


def in_rows(
  labels: Sequence[str],
  points: Mapping[str, Sequence[float | intervals.Interval]],
  *,
  label: str,
  lines: Mapping[str, intervals.Interval] | None = None,
) -> str:
  """Draws a horizontal row for each label, with one point for each name.

  A grey line joins the least and the largest value of a row, or the ends of its
  intervals. It tells neighbouring rows apart where many values are equal.

  Args:
    labels: labels of the rows, the topmost first; at least one.
    points: for each name, a value or a mean with its interval for each row.
    label: label of the values, with their unit.
    lines: measures without a row, drawn as vertical lines with intervals.

  Returns:
    An <svg> element.
  """
  heights = range(len(labels), 0, -1)
  with _apply_style():
    figure, axes = _make_canvas(width=5.6, height=1.3 + 0.28 * len(labels))
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
        label=_escape_name(name),
      )
    axes.set_yticks(heights, [_escape_name(name) for name in labels])
    axes.set_ylim(0.4, len(labels) + 0.6)
    axes.set_xlabel(_escape_name(label))
    figure.legend(loc="outside upper left", ncols=3)
    return _render_svg(figure)


def ranks(
  panels: Mapping[str, Mapping[str, Sequence[tuple[int, intervals.Interval]]]],
  *,
  num_ranked: int,
) -> str:
  """Draws mean ranks of secrets over the repetitions of their canaries.

  Args:
    panels: for each generator and kind of canary, (repetitions, mean rank) in
      ascending order; at least one panel.
    num_ranked: number of secrets among which a rank counts.

  Returns:
    An <svg> element.
  """
  with _apply_style():
    figure, grid = _make_canvases(1, len(panels), width=9.2, height=3.2)
    for axes, (title, series) in zip(grid, panels.items(), strict=True):
      axes.axhline(
        (num_ranked + 1) / 2,
        color=_SOFT,
        linestyle="--",
        linewidth=1.0,
        label="chance",
      )
      for index, (name, row) in enumerate(series.items()):
        factor = 1 + 0.025 * (-1) ** index * ((index + 1) // 2)
        shifted = [(times * factor, rank) for times, rank in row]
        _draw_points(axes, index, name, shifted)
      times = {number for row in series.values() for number, _ in row}
      axes.set_xscale("log")
      axes.set_xlim(min(times) / 1.8, max(times) * 1.8)
      axes.set_xticks(
        sorted(times), [f"{number:,}" for number in sorted(times)]
      )
      axes.set_xticks([], minor=True)
      axes.set_ylim(0, num_ranked)
      axes.set_title(_escape_name(title), fontsize=10, loc="left")
      axes.set_xlabel("times in the private data (logarithmic)")
    grid[0].set_ylabel(f"mean rank of {num_ranked:,} (1: by heart)")
    grid[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _render_svg(figure)


@contextlib.contextmanager
def _apply_style(**more: Any) -> Generator[None]:
  """Applies the settings of matplotlib for pages, and then those of `more`."""
  with extras.required("run"):
    import matplotlib

  with matplotlib.rc_context({**_SETTINGS, **more}):
    yield


def _make_canvas(*, width: float, height: float):
  figure, grid = _make_canvases(1, 1, width=width, height=height)
  return figure, grid[0]


def _make_canvases(rows: int, columns: int, *, width: float, height: float):
  """Makes a figure that needs no display; returns it and a list of its axes."""
  with extras.required("run"):
    from matplotlib import figure as figure_lib

  figure = figure_lib.Figure(figsize=(width, height), layout="constrained")
  return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _draw_lines(line, span, lines: Mapping[str, intervals.Interval]) -> None:
  """Draws measures as lines across the whole picture, with their intervals."""
  for index, (name, measured) in enumerate(lines.items()):
    span(measured.low, measured.high, color=_SOFT, alpha=0.12)
    line(
      measured.mean,
      color=_SOFT,
      linestyle=_DASHES[index % len(_DASHES)],
      linewidth=1.3,
      label=_escape_name(name),
    )


def _draw_points(axes, index: int, name: str, row) -> None:
  """Draws one series of means with their intervals."""
  means = [measured.mean for _, measured in row]
  below = [max(0.0, mean.mean - mean.low) for _, mean in row]
  above = [max(0.0, mean.high - mean.mean) for _, mean in row]
  axes.errorbar(
    [x for x, _ in row],
    means,
    yerr=[below, above],
    color=_COLORS[index % len(_COLORS)],
    marker=_MARKERS[index % len(_MARKERS)],
    markersize=6,
    linewidth=1.6,
    capsize=3,
    label=_escape_name(name),
  )


def _escape_name(text: str) -> str:
  """Escapes a name that matplotlib would read as a formula or hide as a label."""
  text = text_tables.without_controls(text)
  return text.replace("_", " ").replace("$", r"\$").strip()


def _render_svg(figure) -> str:
  """Renders a figure as an <svg> element, without date and preamble."""
  stream = io.StringIO()
  figure.savefig(stream, format="svg", metadata={"Date": None})
  text = stream.getvalue()
  min_width = f"min-width: {_MIN_SCALE * 96 * figure.get_figwidth():.0f}px"
  text = text.replace("<svg ", f'<svg style="{min_width}" ', 1)
  text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
  for color, variable in _PAGE_COLORS.items():
    text = text.replace(color, variable)
  return text[text.index("<svg") :].strip()
