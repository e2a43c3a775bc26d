"""The study of image encoders as text, Markdown and one drawing."""

import math
import pathlib
import statistics
from collections.abc import Sequence

from synthq_jax import artifacts
from synthq_jax.pipeline import (
  _image_noise,
  _image_results,
  _plots,
  _report_tables,
)
from synthq_jax.privacy import rounding
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.retrieval import neighbours, text_tables

__all__ = ["tables", "write"]

_PAPER = (("embedding net", 0.819, 0.827), ("ResNet-18", 0.730, 0.599))
_PAPER_NOISE = ((100, 0.2), (100, 1.0))  # batch size and temperature

Table = tuple[tuple[str, ...], list[tuple[str, ...]], tuple[str, ...]]
"""Header, rows, and the titles of numeric columns."""
Trainings = Sequence[_image_results.Training]


def write(study: _image_results.Study, root: pathlib.Path) -> str:
  """Writes study.md and study.svg; returns the tables for the screen.

  Args:
    study: what was found.
    root: of the results; private/ where the images are private.
  """
  artifacts.write_atomically(root / "study.svg", _curves(study))
  artifacts.write_atomically(root / "study.md", _page(study))
  parts = [
    f"{title}\n\n{text_tables.aligned(*t)}" for title, t in tables(study)
  ]
  return "\n\n".join([_headline(study), *parts, f"report: {root / 'study.md'}"])


def tables(study: _image_results.Study) -> list[tuple[str, Table]]:
  """Returns the tables with their titles: accuracy, training, noise."""
  return [
    ("Neighbours and linear head, means over seeds", _scores(study)),
    ("How they were trained", _training(study)),
    (
      "Relative accuracy in the paper, on CIFAR-10 (as quoted, not measured)",
      _paper(),
    ),
    (
      "Noise of the paper's published code, whose sensitivity leaves out"
      " 1/temperature (in clip norms, of the mean)",
      _noise(study),
    ),
  ]


def _groups(
  study: _image_results.Study,
) -> dict[tuple[str, str], list[_image_results.Training]]:
  found: dict[tuple[str, str], list[_image_results.Training]] = {}
  for one in study.trainings:
    found.setdefault((one.encoder, one.row), []).append(one)
  return found


def _reference(
  groups: dict[tuple[str, str], list[_image_results.Training]], encoder: str
) -> Trainings | None:
  """Returns the encoder's first row without privacy."""
  for (name, _), group in groups.items():
    if name == encoder and math.isinf(group[0].statement.epsilon):
      return group
  return None


def _scores(study: _image_results.Study) -> Table:
  groups = _groups(study)
  rows = []
  for (encoder, row), group in groups.items():
    accuracy = [one.neighbours.accuracy for one in group]
    reference = _reference(groups, encoder)
    relative = "-"
    if reference is not None:
      relative = _number(_mean(accuracy) / _mean_accuracy(reference))
    rows.append(
      (
        encoder,
        row,
        _report_tables.claimed(group[0].statement),
        str(len(group)),
        _spread(accuracy),
        relative,
        _number(_mean([one.neighbours.macro_precision for one in group])),
        _number(_mean([one.neighbours.macro_recall for one in group])),
        _number(_mean([one.neighbours.macro_f1 for one in group])),
        _spread([one.coarse_accuracy for one in group]),
      )
    )
  titles = (
    "epsilon", "Seeds", "k-NN accuracy", "Relative", "Precision", "Recall",
    "F1", "Coarse head",
  )  # fmt: skip
  return ("Encoder", "Row", *titles), rows, titles


def _training(study: _image_results.Study) -> Table:
  rows = []
  for (encoder, row), group in _groups(study).items():
    one = group[0]
    if not one.steps:
      continue
    rates = [each.examples_per_second for each in group]
    rates = [rate for rate in rates if not math.isnan(rate)]
    rows.append(
      (
        encoder,
        row,
        f"{one.num_parameters:,}",
        f"{one.steps:,}",
        f"{one.batch_size:,}",
        f"{one.max_batch_size:,}",
        f"{one.l2_clip_norm:g}" if one.l2_clip_norm else "-",
        f"{one.l2_sensitivity:.4g}" if one.l2_sensitivity else "-",
        f"{one.noise_multiplier:.4g}" if one.noise_multiplier else "-",
        f"{statistics.median(rates):,.0f}" if rates else "-",
        _report_tables.duration(_mean([each.seconds for each in group])),
      )
    )
  titles = (
    "Parameters", "Steps", "Batch", "Padded", "Clip norm", "Sensitivity",
    "Noise multiplier", "Pairs/s", "Time",
  )  # fmt: skip
  return ("Encoder", "Row", *titles), rows, titles


def _paper() -> Table:
  titles = ("Logit-DP", "Naive")
  rows = [(name, f"{a:.3f}", f"{b:.3f}") for name, a, b in _PAPER]
  return ("Encoder", *titles), rows, titles


def _noise(study: _image_results.Study) -> Table:
  settings = list(_PAPER_NOISE)
  settings += sorted({(one.max_batch_size, 1.0) for one in study.trainings})
  rows = []
  for size, temperature in dict.fromkeys(settings):
    one = _image_noise.compare(batch_size=size, temperature=temperature)
    values = (one.published, one.needed, one.needed_replace, one.naive)
    rows.append(
      (
        str(size),
        f"{temperature:g}",
        *(f"{value:.4g}" for value in values),
        f"{one.ratio:.2f}",
        f"{one.ratio_replace:.2f}",
      )
    )
  titles = (
    "Batch", "Temperature", "Published", "Needed", "Needed, replace",
    "2/temperature", "Ratio", "Ratio, replace",
  )  # fmt: skip
  return titles, rows, titles


def _curves(study: _image_results.Study) -> str:
  """Draws each row's held-out loss over that of the row without privacy."""
  groups = _groups(study)
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
  return _plots.together(
    panels, label="held-out loss over non-private", level=1.0
  )


def _losses(group: Trainings) -> list[float]:
  return [
    _mean(at) for at in zip(*(g.curve_losses for g in group), strict=True)
  ]


def _page(study: _image_results.Study) -> str:
  """Returns the Markdown page."""
  parts = [f"# Image encoders: {study.source}", _headline(study)]
  for title, table in tables(study):
    parts += [f"## {title}", text_tables.markdown(*table)]
  parts += [
    "## Relative loss",
    "Softmax loss of public pairs that nothing trained on, over that of the"
    " first row without privacy, means over seeds.",
    "![Loss against steps, for each row](study.svg)",
    "## Each class",
    "Counts over seeds of the neighbours' labels (columns) for the test images"
    " of each class (rows), then precision, recall and F1.",
  ]
  for (encoder, row), group in _groups(study).items():
    parts += [f"### {encoder}, {row}", text_tables.markdown(*_classes(group))]
  parts.append("## Privacy")
  for (encoder, row), group in _groups(study).items():
    words = statement_lib.in_words(group[0].statement)
    parts += [f"### {encoder}, {row}, seed {group[0].seed}", words]
  parts.append(
    "Every seed of every row is a release of its own: private/ledger.jsonl lists"
    " them, and `synthq privacy --ledger=` adds them up. The rows without privacy"
    " read the pairs unprotected: this page may be shared only where the images"
    " are public."
  )
  return "\n\n".join(parts) + "\n"


def _classes(group: Trainings) -> Table:
  counts = [
    [sum(cells) for cells in zip(*rows, strict=True)]
    for rows in zip(*(one.neighbours.confusion for one in group), strict=True)
  ]
  scores = neighbours.scores_of(counts)
  names = tuple(str(label) for label in range(len(counts)))
  each = zip(scores.precision, scores.recall, scores.f1, strict=True)
  rows = [
    (name, *map(str, row), *map(_number, values))
    for name, row, values in zip(names, counts, each, strict=True)
  ]
  header = ("Class", *names, "Precision", "Recall", "F1")
  return header, rows, header


def _headline(study: _image_results.Study) -> str:
  return (
    f"{study.num_pairs:,} private pairs of {study.source} images, unit: one pair;"
    f" epsilon {rounding.epsilon(study.epsilon)} and delta"
    f" {rounding.delta(study.delta)} for each training with privacy. Accuracy: share of right labels among the"
    f" {study.neighbours} nearest of the other test images, over all"
    f" {study.num_test:,} test images; +- is the standard deviation over seeds."
    f" Coarse head: a linear classifier on the frozen vectors, trained without"
    f" privacy on {study.head}. All trainings together took"
    f" {_report_tables.duration(study.seconds)}."
  )


def _mean(values: Sequence[float]) -> float:
  return statistics.fmean(values)


def _mean_accuracy(group: Trainings) -> float:
  return _mean([one.neighbours.accuracy for one in group])


def _number(value: float) -> str:
  return f"{value:.3f}"


def _spread(values: Sequence[float]) -> str:
  """Writes a mean, and the standard deviation where there are several.

  >>> _spread([0.5]), _spread([0.5, 0.75])
  ('0.500', '0.625 +- 0.177')
  """
  if len(values) == 1:
    return _number(values[0])
  return f"{_number(_mean(values))} +- {_number(statistics.stdev(values))}"
