"""Makes the page of the image study: tables, curves and statements."""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence

from synthq_jax.privacy import rounding
from synthq_jax.report import blocks, claims, plots, tables
from synthq_jax.retrieval import neighbours
from synthq_jax.studies import frame
from synthq_jax.studies.images import published_noise, training

__all__ = ["make_page"]

_PAPER = (("embedding net", 0.819, 0.827), ("ResNet-18", 0.730, 0.599))
_PAPER_NOISE = ((100, 0.2), (100, 1.0))  # (batch size, temperature)

_WORDS = frame.load_words("images")

Group = Sequence[training.Training]
"""All seeds of one row."""
Groups = dict[tuple[str, str], list[training.Training]]
"""Trainings by (encoder, row)."""
Panels = dict[str, dict[str, tuple[list[float], list[float]]]]
"""Curves by panel and row: steps and values."""


def make_page(study: training.Study) -> blocks.Page:
  """Makes the page, whose first four parts are the tables."""
  groups = frame.group_by(
    study.trainings, lambda member: (member.encoder, member.row)
  )
  classes: list[blocks.Block] = [_draw_confusions(groups)]
  statements: list[blocks.Block] = []
  for (encoder, row), group in groups.items():
    title = f"{encoder}, {row}"
    classes += [blocks.Heading(text=title), _make_class_table(group)]
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
      frame.make_part(
        "Neighbours and head, means over seeds",
        _make_score_table(groups, "neighbours", "k-NN accuracy"),
        blocks.Heading(text="The head on coarse classes"),
        _make_score_table(groups, "coarse", "Head accuracy"),
      ),
      frame.make_part("How they were trained", _make_training_table(groups)),
      frame.make_part(
        "Relative accuracy in the paper, on CIFAR-10 (quoted, not measured)",
        tables.of(
          _PAPER,
          {
            "Encoder": lambda member: member[0],
            "Logit-DP": lambda member: f"{member[1]:.3f}",
            "Naive": lambda member: f"{member[2]:.3f}",
          },
        ),
      ),
      frame.make_part(
        "Noise of the paper's published code, whose sensitivity leaves out"
        " 1/temperature (in clip norms, of the mean)",
        _make_noise_table(study),
      ),
      frame.make_part("Loss", *_draw_losses(groups)),
      frame.make_part(
        "Each class",
        _WORDS("each_class"),
        *classes,
      ),
      frame.make_part(
        "Privacy",
        *statements,
        _WORDS("releases"),
      ),
    ),
  )


def _find_reference(groups: Groups, encoder: str) -> Group | None:
  """Returns the encoder's first row without privacy."""
  for (name, _), group in groups.items():
    if name == encoder and math.isinf(group[0].statement.epsilon):
      return group
  return None


def _make_score_table(groups: Groups, kind: str, title: str) -> blocks.Table:
  """Makes the table of scores of the neighbours ("neighbours") or head ("coarse").

  Of a score for each class, the table shows the greatest.
  """

  def get(group: Group, name: str) -> list[float]:
    values = [getattr(getattr(member, kind), name) for member in group]
    return [max(v) if isinstance(v, tuple) else v for v in values]

  def relative(group: Group) -> str:
    reference = _find_reference(groups, group[0].encoder)
    if reference is None:
      return "-"
    share = statistics.fmean(get(group, "accuracy"))
    return f"{share / statistics.fmean(get(reference, 'accuracy')):.3f}"

  def mean(name: str):
    return lambda group: f"{statistics.fmean(get(group, name)):.3f}"

  return tables.of(
    groups.values(),
    {
      "Encoder": lambda group: group[0].encoder,
      "Row": lambda group: group[0].row,
      "epsilon": lambda group: tables.claimed(group[0].statement),
      "Seeds": lambda group: str(len(group)),
      title: lambda group: tables.spread(get(group, "accuracy")),
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


def _make_training_table(groups: Groups) -> blocks.Table:
  def speed(group: Group) -> str:
    rate = _compute_rate(group)
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
      "Clip norm": lambda group: _format(group[0].l2_clip_norm, "g"),
      "Sensitivity": lambda group: _format(group[0].l2_sensitivity, ".4g"),
      "Noise multiplier": lambda group: _format(
        group[0].noise_multiplier, ".4g"
      ),
      "Pairs/s": speed,
      "Time": lambda group: tables.duration(
        statistics.fmean(member.seconds for member in group)
      ),
      "A step": lambda group: tables.count(group[0].accumulation),
      "Loss": lambda group: "".join(
        f"{x:.3f}" for x in _compute_losses(group)[-1:]
      ),
    },
    left=("Encoder", "Row"),
  )


def _compute_rate(group: Group) -> float:
  """Returns the median of pairs a second; 0 without timed trainings."""
  rates = [member.examples_per_second for member in group]
  timed = [rate for rate in rates if not math.isnan(rate)]
  return statistics.median(timed) if timed else 0.0


def _format(value: float, form: str) -> str:
  return format(value, form) if value else "-"


def _make_noise_table(study: training.Study) -> blocks.Table:
  """Makes the table of the published and the true sensitivities of a mean."""
  settings = list(_PAPER_NOISE)
  settings += sorted(
    {(member.max_batch_size, 1.0) for member in study.trainings}
  )
  rows = []
  for size, temperature in dict.fromkeys(settings):
    published = published_noise.published(
      batch_size=size, temperature=temperature
    )
    needed = published_noise.needed(batch_size=size, temperature=temperature)
    norms = (f"{x:.4g}" for x in (published, *needed, 2 / temperature))
    ratios = (f"{x / published:.2f}" for x in needed)
    rows.append((str(size), f"{temperature:g}", *norms, *ratios))
  header = (
    "Batch", "Temperature", "Published", "Needed", "Needed, replace",
    "2/temperature", "Ratio", "Ratio, replace",
  )  # fmt: skip
  return blocks.Table(header=header, rows=tuple(rows), numeric=header)


def _draw_losses(groups: Groups) -> Iterator[blocks.Block]:
  """Yields drawings of the loss against steps, seconds and batch sizes.

  Seconds need timed trainings; batch sizes need a row with several of them.
  """
  yield _WORDS("relative_loss")
  yield blocks.Figure(
    svg=_draw(
      _compute_relative(groups), label="held-out loss over non-private"
    ),
    caption="Loss against steps, for each row",
    file="study.svg",
  )
  seconds: Panels = {}
  batches: dict[int, list[Group]] = {}
  for (encoder, row), group in groups.items():
    if not group[0].curve_steps:
      continue
    batches.setdefault(group[0].num_parameters, []).append(group)
    if rate := _compute_rate(group):
      times = [
        step * group[0].batch_size / rate for step in group[0].curve_steps
      ]
      seconds.setdefault(encoder, {})[row] = (times, _compute_losses(group))
  if seconds:
    yield blocks.Figure(
      svg=_draw(
        seconds, label="held-out loss, nats", across="seconds", level=None
      ),
      caption="Loss against time, compiling aside",
      file="time.svg",
    )
  sizes = _group_by_batch(batches.values())
  if sizes:
    yield blocks.Figure(
      svg=_draw(
        sizes,
        label="held-out loss, nats",
        across="pairs of a batch",
        level=None,
      ),
      caption="Loss at the end against the batch",
      file="batches.svg",
    )


def _group_by_batch(nets: Iterable[Sequence[Group]]) -> Panels:
  """Returns the last losses of rows trained with several batch sizes."""
  panels: Panels = {}
  for groups in nets:
    for row, members in frame.group_by(
      groups, lambda group: group[0].row
    ).items():
      points = sorted(
        (group[0].batch_size, _compute_losses(group)[-1]) for group in members
      )
      if len({size for size, _ in points}) > 1:
        panel = panels.setdefault(members[0][0].encoder, {})
        panel[row] = tuple(map(list, zip(*points, strict=True)))
  return panels


def _draw(
  panels: Panels,
  *,
  label: str,
  across: str = "optimizer steps",
  level: float | None = 1.0,
) -> str:
  if not panels:
    return "<svg xmlns='http://www.w3.org/2000/svg'></svg>"
  return plots.together(panels, label=label, across=across, level=level)


def _compute_relative(groups: Groups) -> Panels:
  panels: Panels = {}
  for (encoder, row), group in groups.items():
    reference = _find_reference(groups, encoder)
    if reference is None or not group[0].curve_steps:
      continue
    base = dict(
      zip(reference[0].curve_steps, _compute_losses(reference), strict=True)
    )
    points = zip(group[0].curve_steps, _compute_losses(group), strict=True)
    shared = [
      (step, loss / base[step]) for step, loss in points if step in base
    ]
    panel = panels.setdefault(encoder, {})
    panel[row] = tuple(map(list, zip(*shared, strict=True)))
  return panels


def _compute_losses(group: Group) -> list[float]:
  by_step = zip(*(member.curve_losses for member in group), strict=True)
  return [statistics.fmean(values) for values in by_step]


def _sum_confusions(group: Group) -> list[list[int]]:
  """Returns the confusion matrix of neighbours' labels, summed over seeds."""
  return [
    [sum(cells) for cells in zip(*rows, strict=True)]
    for rows in zip(
      *(member.neighbours.confusion for member in group), strict=True
    )
  ]


def _draw_confusions(groups: Groups) -> blocks.Figure:
  return blocks.Figure(
    svg=plots.matrices(
      {f"{a}, {b}": _sum_confusions(group) for (a, b), group in groups.items()},
      rows="class",
      columns="labels of neighbours",
    ),
    caption="Shares of the neighbours' labels for each class, over all seeds",
    file="confusion.svg",
  )


def _make_class_table(group: Group) -> blocks.Table:
  counts = _sum_confusions(group)
  scores = neighbours.scores_of(counts)
  names = tuple(str(label) for label in range(len(counts)))
  each = zip(scores.precision, scores.recall, scores.f1, strict=True)
  header = ("Class", *names, "Precision", "Recall", "F1")
  rows = tuple(
    (name, *map(str, row), *(f"{value:.3f}" for value in values))
    for name, row, values in zip(names, counts, each, strict=True)
  )
  return blocks.Table(header=header, rows=rows, numeric=header)
