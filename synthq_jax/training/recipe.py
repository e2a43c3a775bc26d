"""Describes how what needs no privacy is trained: Adam over shuffled epochs."""

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
  """Optimizer steps."""
  batch_size: int = 128
  """Rows of a step."""
  learning_rate: float = 1e-3
  """Peak of Adam's; linear warm-up and decay."""
  warmup_steps: int = 30
  """Steps of the warm-up."""
  seed: int = 0
  """Of the order of the rows, and of what is drawn in training."""
  settings: loop.Settings = field_kinds.speed_only(make=loop.Settings)
  """Saving and reporting."""

  def optimizer(self) -> optax.GradientTransformation:
    """Returns Adam with its learning rate."""
    schedule = optim.schedules.linear(
      self.learning_rate, steps=self.steps, warmup_steps=self.warmup_steps
    )
    return optax.adam(schedule, b2=0.98)

  def rows(self, step: int, total: int) -> Int[np.ndarray, " row"]:
    """Returns the rows of a step, a function of (seed, step) alone.

    Every epoch has an order of its own; the last rows that fill no batch are
    left out.

    Args:
      step: its number, from 0.
      total: of rows, at least `batch_size`.
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
    """Trains; goes on from the newest state.

    Args:
      step_fn: from state, batch and number to the next state and metrics.
      state: where to start.
      batch_fn: from the rows of a step to its batch.
      total: of rows.
      files: where states and metrics go.

    Returns:
      The last state.

    Raises:
      ValueError: if there are fewer rows than a batch has.
    """
    if self.batch_size > total:
      raise ValueError(
        f"{files.description}: batch_size must be at most {total}, the number"
        f" of rows, got {self.batch_size}: take a smaller one"
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
