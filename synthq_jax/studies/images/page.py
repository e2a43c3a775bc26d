"""Shows the study of image encoders: tables, curves and statements."""

import math
import statistics
from collections.abc import Sequence

from synthq_jax.privacy import rounding
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.report import blocks, plots, tables
from synthq_jax.retrieval import neighbours
from synthq_jax.studies import frame
from synthq_jax.studies.images import published_noise, training

__all__ = ["page"]

_PAPER = (("embedding net", 0.819, 0.827), ("ResNet-18", 0.730, 0.599))
_PAPER_NOISE = ((100, 0.2), (100, 1.0))  # batch size and temperature

_WORDS = frame.words("images")

Group = Sequence[training.Training]
"""All seeds of one row."""
Groups = dict[tuple[str, str], list[training.Training]]
"""By encoder and row."""


def page(study: training.Study) -> blocks.Page:
  """Returns the page, whose first four parts are the tables."""
  groups = frame.grouped(study.trainings, lambda one: (one.encoder, one.row))
  classes, statements = [], []
  for (encoder, row), group in groups.items():
    title = f"{encoder}, {row}"
    words = statement_lib.in_words(group[0].statement)
    classes += [blocks.Heading(text=title), _classes(group)]
    statements += [
      blocks.Heading(text=f"{title}, seed {group[0].seed}"),
      *(blocks.Paragraph(text=each) for each in words.split("\n\n")),
    ]
  return blocks.Page(
    title=f"Image encoders: {study.source}",
    introduction=(
      _WORDS(
        "headline",
        study=study,
        epsilon=rounding.epsilon(study.epsilon),
        delta=rounding.delta(study.delta),
        took=tables.duration(study.seconds),
      ),
    ),
    parts=(
      frame.part(
        "Neighbours and linear head, means over seeds", _scores(groups)
      ),
      frame.part("How they were trained", _training(groups)),
      frame.part(
        "Relative accuracy in the paper, on CIFAR-10 (as quoted, not measured)",
        tables.of(
          _PAPER,
          {
            "Encoder": lambda one: one[0],
            "Logit-DP": lambda one: f"{one[1]:.3f}",
            "Naive": lambda one: f"{one[2]:.3f}",
          },
        ),
      ),
      frame.part(
        "Noise of the paper's published code, whose sensitivity leaves out"
        " 1/temperature (in clip norms, of the mean)",
        _noise(study),
      ),
      frame.part(
        "Relative loss",
        _WORDS("relative_loss"),
        blocks.Figure(
          svg=_curves(groups),
          caption="Loss against steps, for each row",
          file="study.svg",
        ),
      ),
      frame.part(
        "Each class",
        _WORDS("each_class"),
        *classes,
      ),
      frame.part(
        "Privacy",
        *statements,
        _WORDS("releases"),
      ),
    ),
  )


def _reference(groups: Groups, encoder: str) -> Group | None:
  """Returns the encoder's first row without privacy."""
  for (name, _), group in groups.items():
    if name == encoder and math.isinf(group[0].statement.epsilon):
      return group
  return None


def _accuracies(group: Group) -> list[float]:
  return [one.neighbours.accuracy for one in group]


def _scores(groups: Groups) -> blocks.Table:
  def relative(group: Group) -> str:
    reference = _reference(groups, group[0].encoder)
    if reference is None:
      return "-"
    share = statistics.fmean(_accuracies(group))
    return f"{share / statistics.fmean(_accuracies(reference)):.3f}"

  def mean(name: str):
    return lambda group: (
      f"{statistics.fmean(getattr(one.neighbours, name) for one in group):.3f}"
    )

  return tables.of(
    groups.values(),
    {
      "Encoder": lambda group: group[0].encoder,
      "Row": lambda group: group[0].row,
      "epsilon": lambda group: tables.claimed(group[0].statement),
      "Seeds": lambda group: str(len(group)),
      "k-NN accuracy": lambda group: tables.spread(_accuracies(group)),
      "Relative": relative,
      "Precision": mean("macro_precision"),
      "Recall": mean("macro_recall"),
      "F1": mean("macro_f1"),
      "Coarse head": lambda group: tables.spread(
        [one.coarse_accuracy for one in group]
      ),
    },
    left=("Encoder", "Row"),
  )


def _training(groups: Groups) -> blocks.Table:
  def speed(group: Group) -> str:
    rates = [one.examples_per_second for one in group]
    timed = [rate for rate in rates if not math.isnan(rate)]
    return f"{statistics.median(timed):,.0f}" if timed else "-"

  return tables.of(
    [group for group in groups.values() if group[0].steps],
    {
      "Encoder": lambda group: group[0].encoder,
      "Row": lambda group: group[0].row,
      "Parameters": lambda group: tables.count(group[0].num_parameters),
      "Steps": lambda group: tables.count(group[0].steps),
      "Batch": lambda group: tables.count(group[0].batch_size),
      "Padded": lambda group: tables.count(group[0].max_batch_size),
      "Clip norm": lambda group: _given(group[0].l2_clip_norm, "g"),
      "Sensitivity": lambda group: _given(group[0].l2_sensitivity, ".4g"),
      "Noise multiplier": lambda group: _given(
        group[0].noise_multiplier, ".4g"
      ),
      "Pairs/s": speed,
      "Time": lambda group: tables.duration(
        statistics.fmean(one.seconds for one in group)
      ),
    },
    left=("Encoder", "Row"),
  )


def _given(value: float, form: str) -> str:
  return format(value, form) if value else "-"


def _noise(study: training.Study) -> blocks.Table:
  settings = list(_PAPER_NOISE)
  settings += sorted({(one.max_batch_size, 1.0) for one in study.trainings})
  return tables.of(
    [
      published_noise.compare(batch_size=size, temperature=temperature)
      for size, temperature in dict.fromkeys(settings)
    ],
    {
      "Batch": lambda one: str(one.batch_size),
      "Temperature": lambda one: f"{one.temperature:g}",
      "Published": lambda one: f"{one.published:.4g}",
      "Needed": lambda one: f"{one.needed:.4g}",
      "Needed, replace": lambda one: f"{one.needed_replace:.4g}",
      "2/temperature": lambda one: f"{one.naive:.4g}",
      "Ratio": lambda one: f"{one.ratio:.2f}",
      "Ratio, replace": lambda one: f"{one.ratio_replace:.2f}",
    },
    left=(),
  )


def _curves(groups: Groups) -> str:
  panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
  for (encoder, row), group in groups.items():
    reference = _reference(groups, encoder)
    if reference is None or not group[0].curve_steps:
      continue
    base = dict(zip(reference[0].curve_steps, _losses(reference), strict=True))
    points = zip(group[0].curve_steps, _losses(group), strict=True)
    shared = [
      (step, loss / base[step]) for step, loss in points if step in base
    ]
    panel = panels.setdefault(encoder, {})
    panel[row] = tuple(map(list, zip(*shared, strict=True)))
  if not panels:
    return "<svg xmlns='http://www.w3.org/2000/svg'></svg>"
  return plots.together(
    panels, label="held-out loss over non-private", level=1.0
  )


def _losses(group: Group) -> list[float]:
  by_step = zip(*(one.curve_losses for one in group), strict=True)
  return [statistics.fmean(at) for at in by_step]


def _classes(group: Group) -> blocks.Table:
  counts = [
    [sum(cells) for cells in zip(*rows, strict=True)]
    for rows in zip(*(one.neighbours.confusion for one in group), strict=True)
  ]
  scores = neighbours.scores_of(counts)
  names = tuple(str(label) for label in range(len(counts)))
  each = zip(scores.precision, scores.recall, scores.f1, strict=True)
  header = ("Class", *names, "Precision", "Recall", "F1")
  rows = tuple(
    (name, *map(str, row), *(f"{value:.3f}" for value in values))
    for name, row, values in zip(names, counts, each, strict=True)
  )
  return blocks.Table(header=header, rows=rows, numeric=header)
