"""Shows the study of image encoders: tables, curves and statements."""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence

from synthq_jax.privacy import rounding
from synthq_jax.report import blocks, claims, plots, tables
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
Panels = dict[str, dict[str, tuple[list[float], list[float]]]]
"""Steps and values, by panel and row."""


def page(study: training.Study) -> blocks.Page:
  """Returns the page, whose first four parts are the tables."""
  groups = frame.grouped(study.trainings, lambda one: (one.encoder, one.row))
  classes: list[blocks.Block] = [_confusions(groups)]
  statements: list[blocks.Block] = []
  for (encoder, row), group in groups.items():
    title = f"{encoder}, {row}"
    classes += [blocks.Heading(text=title), _classes(group)]
    statements += [
      blocks.Heading(text=f"{title}, seed {group[0].seed}"),
      *claims.paragraphs(group[0].statement),
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
        "Neighbours and head, means over seeds",
        _scores(groups, "neighbours", "k-NN accuracy"),
        blocks.Heading(text="The head on coarse classes"),
        _scores(groups, "coarse", "Head accuracy"),
      ),
      frame.part("How they were trained", _training(groups)),
      frame.part(
        "Relative accuracy in the paper, on CIFAR-10 (quoted, not measured)",
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
      frame.part("Loss", *_losses_drawn(groups)),
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


def _scores(groups: Groups, kind: str, title: str) -> blocks.Table:
  """Returns the scores of neighbours' labels, or of the head's."""

  def of(group: Group, name: str) -> list[float]:
    values = [getattr(getattr(one, kind), name) for one in group]
    return [max(v) if isinstance(v, tuple) else v for v in values]

  def relative(group: Group) -> str:
    reference = _reference(groups, group[0].encoder)
    if reference is None:
      return "-"
    share = statistics.fmean(of(group, "accuracy"))
    return f"{share / statistics.fmean(of(reference, 'accuracy')):.3f}"

  def mean(name: str):
    return lambda group: f"{statistics.fmean(of(group, name)):.3f}"

  return tables.of(
    groups.values(),
    {
      "Encoder": lambda group: group[0].encoder,
      "Row": lambda group: group[0].row,
      "epsilon": lambda group: tables.claimed(group[0].statement),
      "Seeds": lambda group: str(len(group)),
      title: lambda group: tables.spread(of(group, "accuracy")),
      "Relative": relative,
      "Precision": mean("macro_precision"),
      "Recall": mean("macro_recall"),
      "F1": mean("macro_f1"),
      "Most precision": mean("precision"),
      "Most recall": mean("recall"),
      "Most F1": mean("f1"),
    },
    left=("Encoder", "Row"),
  )


def _training(groups: Groups) -> blocks.Table:
  def speed(group: Group) -> str:
    rate = _rate(group)
    return f"{rate:,.0f}" if rate else "-"

  return tables.of(
    [group for group in groups.values() if group[0].steps],
    {
      "Encoder": lambda group: group[0].encoder,
      "Row": lambda group: group[0].row,
      "Parameters": lambda group: tables.count(group[0].num_parameters),
      "Batches": lambda group: tables.count(group[0].steps),
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
      "A step": lambda group: tables.count(group[0].accumulation),
      "Loss": lambda group: "".join(f"{x:.3f}" for x in _losses(group)[-1:]),
    },
    left=("Encoder", "Row"),
  )


def _rate(group: Group) -> float:
  """Returns the median of pairs a second; 0 where nothing was timed."""
  rates = [one.examples_per_second for one in group]
  timed = [rate for rate in rates if not math.isnan(rate)]
  return statistics.median(timed) if timed else 0.0


def _given(value: float, form: str) -> str:
  return format(value, form) if value else "-"


def _noise(study: training.Study) -> blocks.Table:
  """Sets the published sensitivity of a mean beside those that are needed."""
  settings = list(_PAPER_NOISE)
  settings += sorted({(one.max_batch_size, 1.0) for one in study.trainings})
  rows = []
  for size, temperature in dict.fromkeys(settings):
    given = published_noise.published(batch_size=size, temperature=temperature)
    needed = published_noise.needed(batch_size=size, temperature=temperature)
    norms = (f"{x:.4g}" for x in (given, *needed, 2 / temperature))
    ratios = (f"{x / given:.2f}" for x in needed)
    rows.append((str(size), f"{temperature:g}", *norms, *ratios))
  header = (
    "Batch", "Temperature", "Published", "Needed", "Needed, replace",
    "2/temperature", "Ratio", "Ratio, replace",
  )  # fmt: skip
  return blocks.Table(header=header, rows=tuple(rows), numeric=header)


def _losses_drawn(groups: Groups) -> Iterator[blocks.Block]:
  """Yields the loss against steps, seconds and, where it varies, batches."""
  yield _WORDS("relative_loss")
  yield blocks.Figure(
    svg=_drawn(_relative(groups), label="held-out loss over non-private"),
    caption="Loss against steps, for each row",
    file="study.svg",
  )
  seconds: Panels = {}
  batches: dict[int, list[Group]] = {}
  for (encoder, row), group in groups.items():
    if not group[0].curve_steps:
      continue
    batches.setdefault(group[0].num_parameters, []).append(group)
    if rate := _rate(group):
      times = [one * group[0].batch_size / rate for one in group[0].curve_steps]
      seconds.setdefault(encoder, {})[row] = (times, _losses(group))
  if seconds:
    yield blocks.Figure(
      svg=_drawn(
        seconds, label="held-out loss, nats", across="seconds", level=None
      ),
      caption="Loss against time, compiling aside",
      file="time.svg",
    )
  sizes = _by_batch(batches.values())
  if sizes:
    yield blocks.Figure(
      svg=_drawn(
        sizes,
        label="held-out loss, nats",
        across="pairs of a batch",
        level=None,
      ),
      caption="Loss at the end against the batch",
      file="batches.svg",
    )


def _by_batch(nets: Iterable[Sequence[Group]]) -> Panels:
  """Returns the last losses of rows that were trained with several batches."""
  panels: Panels = {}
  for groups in nets:
    for row, members in frame.grouped(groups, lambda one: one[0].row).items():
      points = sorted((one[0].batch_size, _losses(one)[-1]) for one in members)
      if len({size for size, _ in points}) > 1:
        panel = panels.setdefault(members[0][0].encoder, {})
        panel[row] = tuple(map(list, zip(*points, strict=True)))
  return panels


def _drawn(
  panels: Panels,
  *,
  label: str,
  across: str = "optimizer steps",
  level: float | None = 1.0,
) -> str:
  if not panels:
    return "<svg xmlns='http://www.w3.org/2000/svg'></svg>"
  return plots.together(panels, label=label, across=across, level=level)


def _relative(groups: Groups) -> Panels:
  panels: Panels = {}
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
  return panels


def _losses(group: Group) -> list[float]:
  by_step = zip(*(one.curve_losses for one in group), strict=True)
  return [statistics.fmean(at) for at in by_step]


def _counts(group: Group) -> list[list[int]]:
  """Returns the confusion of neighbours' labels, summed over seeds."""
  return [
    [sum(cells) for cells in zip(*rows, strict=True)]
    for rows in zip(*(one.neighbours.confusion for one in group), strict=True)
  ]


def _confusions(groups: Groups) -> blocks.Figure:
  return blocks.Figure(
    svg=plots.matrices(
      {f"{a}, {b}": _counts(group) for (a, b), group in groups.items()},
      rows="class",
      columns="labels of neighbours",
    ),
    caption="Shares of the neighbours' labels for each class, over all seeds",
    file="confusion.svg",
  )


def _classes(group: Group) -> blocks.Table:
  counts = _counts(group)
  scores = neighbours.scores_of(counts)
  names = tuple(str(label) for label in range(len(counts)))
  each = zip(scores.precision, scores.recall, scores.f1, strict=True)
  header = ("Class", *names, "Precision", "Recall", "F1")
  rows = tuple(
    (name, *map(str, row), *(f"{value:.3f}" for value in values))
    for name, row, values in zip(names, counts, each, strict=True)
  )
  return blocks.Table(header=header, rows=rows, numeric=header)
