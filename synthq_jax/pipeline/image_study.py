"""The Logit-DP paper's study: image encoders on pairs, with privacy or without.

Encoders are trained with a contrastive loss on pairs of images of one class;
one pair is the unit of privacy. Then the labels of nearest neighbours among the
test images are scored, as in the paper, and a linear head on the frozen vectors
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
import os
from collections.abc import Callable
from typing import Any

from synthq_jax import artifacts, optim
from synthq_jax.data import images
from synthq_jax.losses import contrastive
from synthq_jax.models import image_encoders
from synthq_jax.pipeline import (
  _image_data,
  _image_report,
  _image_results,
  _image_training,
  config_types,
  workspace,
)
from synthq_jax.training import loop

__all__ = ["NETS", "Config", "Encoder", "Row", "run"]

NETS = ("embedding_net", "resnet18")
"""What `Encoder.net` may be."""

_UNTRAINED = _image_training.UNTRAINED


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

  def __post_init__(self):
    config_types.positive(self, "learning_rate", "clip_norm")
    if not config_types.is_file_name(self.name) or self.name == _UNTRAINED:
      raise ValueError(
        "image_study.Row.name must be a word for a folder, and not"
        f" {_UNTRAINED!r}, got {self.name!r}"
      )


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
  """Optimizer steps."""
  batch_size: int = 64
  """Expected pairs of a Poisson batch."""
  image_size: int | None = None
  """Images are resized to this height and width, bilinearly; None: as read."""
  width: int = 64
  """Channels of the first group of "resnet18"; the paper's is 64."""
  dim: int = 8
  """Of the vectors."""

  def __post_init__(self):
    config_types.at_least(
      self, 1, "seeds", "steps", "batch_size", "image_size", "width", "dim"
    )
    config_types.one_of(self, "net", NETS)
    names = [row.name for row in self.rows]
    if len(set(names)) < len(names):
      raise ValueError(
        f"image_study.Encoder.rows must have different names, got {names}"
      )

  def build(self) -> Any:
    """Returns the Flax module."""
    if self.net == "embedding_net":
      return image_encoders.EmbeddingNet(dim=self.dim)
    return image_encoders.ResNet18(dim=self.dim, width=self.width)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The whole study."""

  encoders: tuple[Encoder, ...]
  """Each with its own rows."""
  source: str = "digits"
  """One of `data.images.SOURCES`."""
  head_source: str | None = None
  """Whose coarse classes the linear head learns, and is tested on; None: it
  learns on one half of the test images and is tested on the other."""
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
  settings: loop.Settings = dataclasses.field(
    default_factory=loop.Settings, metadata={"speed_only": True}
  )
  """Saving and reporting."""
  public_data: bool = False
  """Whether the train images are public. If not, all that comes from rows
  without privacy lies in private/, and so do the tables."""

  def __post_init__(self):
    config_types.positive(self, "epsilon", "delta", "held_out_temperature")
    config_types.at_least(self, 1, "neighbours")
    config_types.at_least(self, 2, "held_out_pairs")
    for source in filter(None, (self.source, self.head_source)):
      if source not in images.SOURCES:
        raise ValueError(
          f"image_study.Config.source must be one of {images.SOURCES}, got"
          f" {source!r}"
        )


def run(
  config: Config,
  workdir: str | os.PathLike,
  *,
  progress: bool = True,
  on_accepted: Callable[[], None] = lambda: None,
) -> str:
  """Trains and scores what is not finished, then writes the report.

  Args:
    config: the study.
    workdir: gets a folder for each training and the ledger; study.md, study.svg
      and result.json, below private/ unless the data is public.
    progress: whether bars are shown.
    on_accepted: called once the working directory is ours.

  Returns:
    The tables, and where the report lies.

  Raises:
    ValueError: if another run uses the directory, or a source is not there.
  """
  with workspace.study_root(
    workdir, is_public=config.public_data, on_accepted=on_accepted
  ) as root:
    space = workspace.Workspace(workdir, config.secret_seed)
    parts = images.load(
      config.source, seed=config.seed, data_dir=config.data_dir
    )
    head = None
    if config.head_source is not None:
      head = images.load(config.head_source, data_dir=config.data_dir)
    if not progress:
      quiet = dataclasses.replace(config.settings, progress=False)
      config = dataclasses.replace(config, settings=quiet)
    done = [
      training
      for encoder in config.encoders
      for training in _image_training.of_encoder(
        config,
        encoder,
        space,
        _image_data.build(config, encoder.image_size, *parts, head),
      )
    ]
    num_pairs = len(images.pairs(parts[0].labels, seed=config.seed))
    study = _study(config, num_pairs, len(parts[1]), done)
    artifacts.save(root, study, artifacts.fingerprint(config))
    return _image_report.write(study, root)


def _study(
  config: Config,
  num_pairs: int,
  num_test: int,
  done: list[_image_results.Training],
) -> _image_results.Study:
  head = (
    "one half of the public test images, tested on the other half"
    if config.head_source is None
    else f"the train images of {config.head_source}, tested on its test images"
  )
  return _image_results.Study(
    source=config.source,
    num_pairs=num_pairs,
    num_test=num_test,
    epsilon=config.epsilon,
    delta=config.delta or 1 / (2 * num_pairs),
    neighbours=config.neighbours,
    head=head,
    trainings=tuple(done),
    seconds=sum(one.seconds for one in done),
  )
