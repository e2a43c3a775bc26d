"""What the study of image encoders finds: frozen, JSON."""

import dataclasses

from synthq_jax.privacy import statement as statement_lib
from synthq_jax.retrieval import neighbours

__all__ = ["Study", "Training"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
  """One encoder, trained once and scored on the public test images."""

  encoder: str
  """Name of the encoder's configuration."""
  row: str
  """Name of the method's configuration; "untrained" for the initial weights."""
  seed: int
  """Of the initial weights; also tells the secrets apart."""
  statement: statement_lib.PrivacyStatement
  """What may be claimed about the encoder."""
  num_parameters: int
  """All of them trained."""
  steps: int
  """Optimizer steps."""
  batch_size: int
  """Expected pairs of a batch."""
  max_batch_size: int
  """Pairs of a batch with padding."""
  noise_multiplier: float
  """Noise over sensitivity; 0 without noise."""
  l2_sensitivity: float
  """Of the clipped sum when one pair comes or goes; 0 without clipping."""
  l2_clip_norm: float
  """0 without clipping."""
  neighbours: neighbours.Scores
  """Of the nearest test images' labels."""
  coarse_accuracy: float
  """Of a linear head on the frozen vectors."""
  curve_steps: tuple[int, ...]
  """Where the loss was written down."""
  curve_losses: tuple[float, ...]
  """Mean loss of the held-out pairs in the steps before."""
  examples_per_second: float
  """Pairs a second, compiling aside; nan if it was not timed."""
  seconds: float
  """How long it took, compiling included."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """All trainings of a study."""

  source: str
  """Which images."""
  num_pairs: int
  """Private pairs n."""
  num_test: int
  """Public test images."""
  epsilon: float
  """The target of each private training."""
  delta: float
  """Of each private training."""
  neighbours: int
  """Nearest neighbours of each test image that count."""
  head: str
  """What the linear head was trained and scored on, in one sentence."""
  trainings: tuple[Training, ...]
  """By encoder, row and seed."""
  seconds: float
  """Of all trainings, whenever they ran."""
