"""The Logit-DP paper's study: image encoders on pairs, with privacy or without.

Encoders are trained with a contrastive loss on pairs of images of one class;
one pair is the unit of privacy. As in the paper, the study scores the labels of
nearest neighbours among the test images. A head on the frozen vectors learns
coarse classes. Test images are public. Scores on them of a privately trained
encoder are public as far as the encoder's statement goes.

Formal guarantee:
  Outside of `private/` are results of encoders with a finite epsilon and of untrained
  weights. They hold the number of pairs n, settings, times, and digests that are
  keyed with the secret of the working directory. Tables and drawings also show rows
  without privacy. So tables and drawings are outside only if `Config.public_data`
  says that the images are public.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from synthq_jax import field_kinds, optim
from synthq_jax.data import images
from synthq_jax.losses import contrastive
from synthq_jax.models import image_encoders
from synthq_jax.runtime import config_types
from synthq_jax.studies import frame
from synthq_jax.studies.images import page, training
from synthq_jax.training import loop

__all__ = ["NETS", "STUDY", "Config", "Encoder", "Row"]

NETS = ("embedding_net", "resnet18")
"""Values of `Encoder.net`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One way to train."""

  name: str
  """Name in tables and of a folder."""
  method: optim.Logit | optim.Batch | None
  """Clipping method; None trains without privacy."""
  loss: contrastive.Softmax | contrastive.Spreadout
  """Loss of a batch's similarities."""
  learning_rate: float
  """Adam's peak learning rate, after a warmup over a tenth of the steps; linear
  decay follows."""
  clip_norm: float = 1.0
  """L2 norm to which the method clips; the noise scales with it."""
  accumulation: int = 1
  """Batches whose gradients make one step of Adam. Each batch has its own
  noise."""

  def __post_init__(self):
    config_types.positive(self, "learning_rate", "clip_norm")
    config_types.at_least(self, 1, "accumulation")
    config_types.named_as_folder(self, taken=training.UNTRAINED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
  """One encoder and the rows that train it."""

  name: str
  """Name in tables and of a folder."""
  net: str
  """One of `NETS`."""
  rows: tuple[Row, ...]
  """Ways to train; the untrained weights are scored too."""
  seeds: int = 1
  """Trainings of each row."""
  steps: int = 100
  """Number of batches, of which `Row.accumulation` make one step of Adam."""
  batch_size: int = 64
  """Expected pairs of a Poisson batch."""
  image_size: int | None = None
  """Height and width in pixels after bilinear resizing; None for no resizing."""
  width: int = 64
  """Channels of the first group of "resnet18"; a ResNet-18 has 64."""
  dim: int = 8
  """Dimension of the vectors."""
  norm: str = "none"
  """Normalisation of "resnet18", one of `image_encoders.NORMS`. "batch" couples
  the examples of a batch: only rows without privacy may have it."""

  def __post_init__(self):
    config_types.at_least(
      self, 1, "seeds", "steps", "batch_size", "image_size", "width", "dim"
    )
    config_types.one_of(self, "net", NETS)
    config_types.one_of(self, "norm", image_encoders.NORMS)
    for row in self.rows:
      if self.steps % row.accumulation:
        raise ValueError(
          "images.Encoder.steps must be a multiple of images.Row.accumulation="
          f"{row.accumulation} of row {row.name!r}, got {self.steps}"
        )
      if self.norm == "batch" and row.method is not None:
        raise ValueError(
          "images.Encoder.norm='batch' couples the examples of a batch, which"
          f" clipping cannot bound: row {row.name!r} must have method=None, or"
          " norm 'none' or 'group'"
        )
    config_types.named_as_folder(self)
    config_types.different_names(self, "rows")

  def build(self) -> Any:
    """Builds the Flax module."""
    if self.net == "embedding_net":
      return image_encoders.EmbeddingNet(dim=self.dim)
    return image_encoders.ResNet18(
      dim=self.dim, width=self.width, norm=self.norm
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(frame.Config):
  """Settings of the study."""

  encoders: tuple[Encoder, ...]
  """Encoders, each with its own rows."""
  source: str = "digits"
  """One of `data.images.SOURCES`."""
  head_source: str | None = None
  """Source of images whose coarse classes the head learns and is tested on. None:
  the head learns on one half of the test images and is tested on the other."""
  head_layers: tuple[int, ...] = ()
  """Widths of the head's hidden layers, (64, 32) in the paper's code; () for a linear
  head, fitted to convergence."""
  head_epochs: int = 10
  """Training epochs of a head with hidden layers."""
  data_dir: str | None = None
  """Data folder of TFDS."""
  epsilon: float = 8.0
  """Target epsilon of each private training."""
  delta: float | None = None
  """Target delta of each private training; None for 1 / (2n)."""
  neighbours: int = 3
  """Number of nearest neighbours of each test image that count."""
  held_out_pairs: int = 64
  """Pairs of test images whose loss the curves show."""
  held_out_temperature: float = 1.0
  """Temperature of the softmax loss on these pairs, the same for all rows."""
  seed: int = 0
  """Public seed of the split, the pairs and the initial weights."""
  secret_seed: int | None = None
  """Fixes batches and noise, which voids every claim; None draws a secret."""
  settings: loop.Settings = field_kinds.speed_only(make=loop.Settings)
  """Intervals of checkpoints and progress reports."""
  public_data: bool = False
  """Whether the train images are public. If not, the tables are saved in private/,
  as results of rows without privacy always are."""

  def __post_init__(self):
    config_types.positive(self, "epsilon", "delta", "held_out_temperature")
    config_types.at_least(self, 1, "neighbours", "head_epochs")
    config_types.at_least(self, 2, "held_out_pairs")
    config_types.different_names(self, "encoders")
    config_types.one_of(self, "source", images.SOURCES)
    if self.head_source is not None:
      config_types.one_of(self, "head_source", images.SOURCES)


def _list_jobs(
  task: frame.Task, data: dict[int | None, training.Data]
) -> list[frame.Job]:
  config = task.config
  return [
    training.Trainer(
      config, encoder, row, seed, task.folders, data[encoder.image_size]
    ).job()
    for encoder in config.encoders
    for row in (None, *encoder.rows)
    for seed in range(encoder.seeds)
  ]


def _make_result(
  task: frame.Task,
  data: dict[int | None, training.Data],
  trainings: Sequence[training.Training],
) -> training.Study:
  config, images_read = task.config, next(iter(data.values()))
  num_pairs = len(images_read.pairs)
  head = (
    "one half of the public test images, tested on the other half"
    if config.head_source is None
    else f"the train images of {config.head_source}, tested on its test images"
  )
  return training.Study(
    source=config.source,
    num_pairs=num_pairs,
    num_test=len(images_read.test),
    epsilon=config.epsilon,
    delta=config.delta or 1 / (2 * num_pairs),
    neighbours=config.neighbours,
    head=head,
    trainings=tuple(trainings),
    seconds=sum(training_result.seconds for training_result in trainings),
  )


STUDY = frame.Study(
  config=Config,
  prepare=lambda task: training.read(task.config),
  jobs=_list_jobs,
  result=_make_result,
  page=page.make_page,
  num_shown=4,
  needs_secret=True,
)
