"""The Logit-DP paper's study: image encoders on pairs, with privacy or without.

Encoders are trained with a contrastive loss on pairs of images of one class;
one pair is the unit of privacy. Then the labels of nearest neighbours among the
test images are scored, as in the paper, and a head on the frozen vectors
learns coarse classes. Test images are public, and so is what is measured on
them with an encoder that was trained privately, as far as its statement goes.

Formal guarantee:
  Outside of `private/` stand results of encoders with a finite epsilon, the
  number of pairs n, settings, times, and digests that are keyed with the secret
  of the working directory. Tables and drawings show rows without privacy, too,
  and stand there only where `Config.public_data` says that the images are
  public.
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
"""What `Encoder.net` may be."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One way to train."""

  name: str
  """In tables, and a folder."""
  method: optim.Logit | optim.Batch | None
  """What is clipped; None trains without privacy."""
  loss: contrastive.Softmax | contrastive.Spreadout
  """Of the similarities."""
  learning_rate: float
  """Adam's peak; warm-up over a tenth of the steps, then linear decay."""
  clip_norm: float = 1.0
  """Of what the method clips; the noise follows it."""
  accumulation: int = 1
  """Batches whose gradients make one step of Adam. Each batch has noise of its
  own."""

  def __post_init__(self):
    config_types.positive(self, "learning_rate", "clip_norm")
    config_types.at_least(self, 1, "accumulation")
    config_types.named_as_folder(self, taken=training.UNTRAINED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
  """One encoder and the rows that train it."""

  name: str
  """In tables, and a folder."""
  net: str
  """One of `NETS`."""
  rows: tuple[Row, ...]
  """Ways to train; the untrained weights are scored too."""
  seeds: int = 1
  """How often each row is trained."""
  steps: int = 100
  """Batches, of which `Row.accumulation` make one step of Adam."""
  batch_size: int = 64
  """Expected pairs of a Poisson batch."""
  image_size: int | None = None
  """Images are resized to this height and width, bilinearly; None: as read."""
  width: int = 64
  """Channels of the first group of "resnet18"; the paper's is 64."""
  dim: int = 8
  """Of the vectors."""
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
    """Returns the Flax module."""
    if self.net == "embedding_net":
      return image_encoders.EmbeddingNet(dim=self.dim)
    return image_encoders.ResNet18(
      dim=self.dim, width=self.width, norm=self.norm
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(frame.Config):
  """The whole study."""

  encoders: tuple[Encoder, ...]
  """Each with its own rows."""
  source: str = "digits"
  """One of `data.images.SOURCES`."""
  head_source: str | None = None
  """Whose coarse classes the head learns, and is tested on; None: it learns on
  one half of the test images and is tested on the other."""
  head_layers: tuple[int, ...] = ()
  """Hidden layers of the head, (64, 32) in the paper; (): linear, and fitted to
  the end."""
  head_epochs: int = 10
  """Of a head with layers."""
  data_dir: str | None = None
  """Where TFDS keeps its data."""
  epsilon: float = 8.0
  """Target of each private training."""
  delta: float | None = None
  """Target; None: 1 / (2n)."""
  neighbours: int = 3
  """Nearest neighbours of each test image that count."""
  held_out_pairs: int = 64
  """Pairs of test images whose loss draws the curves."""
  held_out_temperature: float = 1.0
  """Of the softmax that is measured on them, the same for all rows."""
  seed: int = 0
  """Of the split, the pairs and the initial weights; public."""
  secret_seed: int | None = None
  """Fixes batches and noise, which voids every claim; None draws a secret."""
  settings: loop.Settings = field_kinds.speed_only(make=loop.Settings)
  """Saving and reporting."""
  public_data: bool = False
  """Whether the train images are public. If not, all that comes from rows
  without privacy lies in private/, and so do the tables."""

  def __post_init__(self):
    config_types.positive(self, "epsilon", "delta", "held_out_temperature")
    config_types.at_least(self, 1, "neighbours", "head_epochs")
    config_types.at_least(self, 2, "held_out_pairs")
    config_types.different_names(self, "encoders")
    config_types.one_of(self, "source", images.SOURCES)
    if self.head_source is not None:
      config_types.one_of(self, "head_source", images.SOURCES)


def _jobs(
  task: frame.Task, data: dict[int | None, training.Data]
) -> list[frame.Job]:
  settings = task.config.settings
  quiet = dataclasses.replace(
    settings, progress=settings.progress and task.progress
  )
  config = dataclasses.replace(task.config, settings=quiet)
  return [
    training.Trainer(
      config, encoder, row, seed, task.folders, data[encoder.image_size]
    ).job()
    for encoder in config.encoders
    for row in (None, *encoder.rows)
    for seed in range(encoder.seeds)
  ]


def _result(
  task: frame.Task,
  data: dict[int | None, training.Data],
  found: Sequence[training.Training],
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
    trainings=tuple(found),
    seconds=sum(one.seconds for one in found),
  )


STUDY = frame.Study(
  config=Config,
  prepare=lambda task: training.read(task.config),
  jobs=_jobs,
  result=_result,
  page=page.page,
  num_shown=4,
  needs_secret=True,
)
