"""Computes the claim of a private training in T5X from its public settings."""

import dataclasses
import functools
import math
import os
import re

import dp_accounting

from synthq_jax.privacy import claim as claim_lib
from synthq_jax.privacy import sampling, terms
from synthq_jax.privacy import unit as unit_lib

__all__ = ["Settings", "get_last_step"]

_RELATION = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """The public settings of one private training.

  Formal guarantee: `claim` holds if the clipped sum of each of `steps` batches
  of `sampler` gets noise of standard deviation `claim.noise_multiplier` times
  `l2_clip_norm`.
  """

  num_examples: int
  """Number of examples of the training split, public."""
  expected_batch_size: int
  """Mean number of examples in a batch, which is also the public divisor."""
  max_batch_size: int
  """Number of rows of a batch, padding included: T5X's BATCH_SIZE."""
  steps: int
  """Number of private steps: T5X's TRAIN_STEPS minus the initial checkpoint's
  step."""
  epsilon: float
  """Target epsilon; inf trains without noise and claims nothing."""
  l2_clip_norm: float
  """Largest L2 norm of each example's gradient, by clipping."""
  delta: float | None = None
  """Target delta; None: 1 / (2 num_examples)."""
  unit: str = "example"
  """Noun for one example in the statement."""

  def __post_init__(self):
    """Refuses numbers that contradict each other."""
    if not (self.l2_clip_norm > 0 and math.isfinite(self.l2_clip_norm)):
      raise ValueError(
        "expected Settings.l2_clip_norm (CLIP_NORM) > 0 and finite, got"
        f" {self.l2_clip_norm}"
      )
    if self.steps < 1:
      raise ValueError(
        "expected Settings.steps (PRIVATE_STEPS) of at least 1, got"
        f" {self.steps}"
      )
    if self.delta is None:
      object.__setattr__(self, "delta", 1 / (2 * self.num_examples))
    self.sampler.check_relation(_RELATION)

  @property
  def sampler(self) -> sampling.Poisson:
    """The sampler of batches."""
    return sampling.Poisson(
      num_examples=self.num_examples,
      expected_batch_size=self.expected_batch_size,
      max_batch_size=self.max_batch_size,
    )

  @functools.cached_property
  def claim(self) -> claim_lib.Claim:
    """The privacy claim, with the least noise that reaches the target."""
    return claim_lib.calibrated(
      epsilon=self.epsilon,
      sampler=self.sampler,
      steps=self.steps,
      l2_clip_norm=self.l2_clip_norm,
      delta=self.delta,
      relation=_RELATION,
      words=terms.T5X.but(unit=unit_lib.Unit(kind=self.unit)),
    )


def get_last_step(
  initial_checkpoint: str | os.PathLike | None, steps: int
) -> int:
  """Returns T5X's TRAIN_STEPS: the step of a checkpoint plus private steps.

  >>> get_last_step("gs://t5-data/t5_base/checkpoint_999900", 14_730)
  1014630

  Args:
    initial_checkpoint: INITIAL_CHECKPOINT_PATH, a folder checkpoint_N; None: the
      training begins at step 0.
    steps: PRIVATE_STEPS.

  Raises:
    ValueError: if the folder's name does not hold its step.
  """
  if initial_checkpoint is None:
    return steps
  name = os.fspath(initial_checkpoint).rstrip("/").rpartition("/")[2]
  step = re.fullmatch(r"checkpoint_(\d+)", name)
  if step is None:
    raise ValueError(
      "expected INITIAL_CHECKPOINT_PATH of a folder checkpoint_N, got"
      f" {initial_checkpoint}: set TRAIN_STEPS, its step + {steps}"
    )
  return int(step[1]) + steps
