"""Trains models without privacy, by Adam over shuffled epochs."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optax
from jaxtyping import Int

from synthq_jax import field_kinds, optim
from synthq_jax.training import loop

__all__ = ["Recipe"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """Length, batches and learning rate of a training without noise."""

  steps: int = 300
  """The number of optimizer steps."""
  batch_size: int = 128
  """The number of rows of a step."""
  learning_rate: float = 1e-3
  """Peak learning rate of Adam, with linear warm-up and decay."""
  warmup_steps: int = 30
  """The number of warm-up steps."""
  seed: int = 0
  """Seed of the order of the rows, and of random draws in training."""
  settings: loop.Settings = field_kinds.speed_only(make=loop.Settings)
  """Settings for saving and reporting."""

  def optimizer(self) -> optax.GradientTransformation:
    """Makes Adam with the learning rate schedule."""
    schedule = optim.schedules.linear(
      self.learning_rate, steps=self.steps, warmup_steps=self.warmup_steps
    )
    return optax.adam(schedule, b2=0.98)

  def rows(self, step: int, total: int) -> Int[np.ndarray, " row"]:
    """Returns the row numbers of a step, which depend on seed and step alone.

    Every epoch has its own order, and leaves out an incomplete last batch.

    Args:
      step: the number of the step, from 0.
      total: the number of rows, at least `batch_size`.
    """
    epoch, position = divmod(step, total // self.batch_size)
    order = np.random.default_rng([self.seed, epoch]).permutation(total)
    return order[position * self.batch_size :][: self.batch_size]

  def train(
    self,
    step_fn: Callable[[Any, Any, int], tuple[Any, Mapping[str, Any]]],
    state: Any,
    batch_fn: Callable[[Int[np.ndarray, " row"]], Any],
    total: int,
    files: loop.Files,
  ) -> Any:
    """Trains on shuffled rows; resumes from the newest saved state.

    Args:
      step_fn: (state, batch, step) -> (state, metrics).
      state: the initial state.
      batch_fn: makes the batch of a step from its row numbers.
      total: the number of rows.
      files: the files for states and metrics.

    Returns:
      The last state.

    Raises:
      ValueError: if there are fewer rows than a batch has.
    """
    if self.batch_size > total:
      raise ValueError(
        f"{files.description}: batch_size must be at most {total}, the number"
        f" of rows, got {self.batch_size}: take a smaller batch"
      )
    return loop.train(
      step_fn,
      state,
      lambda step: batch_fn(self.rows(step, total)),
      files,
      steps=self.steps,
      examples_per_step=self.batch_size,
      settings=self.settings,
    )
