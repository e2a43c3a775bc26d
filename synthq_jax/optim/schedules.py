"""Learning-rate schedules: constant, and linear warmup into a decay.

Warmup ends at its peak: step t of a warmup of w steps has (t + 1) / w of the
peak, so that step 0 already learns. A private step that changes nothing would
still cost privacy.
"""

import math

import jax
import jax.numpy as jnp
import optax

__all__ = ["constant", "cosine", "linear", "rsqrt"]


def constant(peak: float, *, warmup_steps: int = 0) -> optax.Schedule:
  """Returns a schedule that stays at `peak` after the warmup.

  >>> print(constant(0.5)(7))
  0.5

  Args:
    peak: learning rate, at least 0.
    warmup_steps: steps of linear warmup, at least 0.

  Returns:
    A function from the step (0, 1, ...) to the learning rate, float32.
  """
  _check(peak, warmup_steps)
  return lambda step: peak * _warmup(step, warmup_steps)


def rsqrt(peak: float, *, warmup_steps: int) -> optax.Schedule:
  """Returns a schedule that falls like 1/sqrt(step + 1) after the warmup.

  T5's pre-training without warmup, 1/sqrt(max(step, 10000)), has peak 0.01 at
  warmup_steps = 10000, but stays at the peak where this one climbs to it.

  Args:
    peak: learning rate at the end of the warmup, at least 0.
    warmup_steps: steps of linear warmup, at least 1.

  Returns:
    A function from the step (0, 1, ...) to the learning rate, float32.
  """
  _check(peak, warmup_steps)
  if warmup_steps < 1:
    raise ValueError(f"expected warmup_steps >= 1, got {warmup_steps=}")

  def schedule(step: jax.typing.ArrayLike) -> jax.Array:
    count = jnp.asarray(step, jnp.float32) + 1.0
    decay = jnp.sqrt(warmup_steps / jnp.maximum(count, warmup_steps))
    return peak * _warmup(step, warmup_steps) * decay

  return schedule


def cosine(
  peak: float, *, steps: int, warmup_steps: int = 0, end: float = 0.0
) -> optax.Schedule:
  """Returns a schedule that falls along half a cosine after the warmup.

  Args:
    peak: learning rate at the end of the warmup, at least 0.
    steps: steps in all, more than the warmup; `end` is reached after them.
    warmup_steps: steps of linear warmup, at least 0.
    end: learning rate at the end, at least 0.

  Returns:
    A function from the step (0, 1, ...) to the learning rate, float32.
  """
  _check(peak, warmup_steps, steps)

  def schedule(step: jax.typing.ArrayLike) -> jax.Array:
    part = _part(step, warmup_steps, steps)
    level = end + (peak - end) * 0.5 * (1.0 + jnp.cos(math.pi * part))
    return level * _warmup(step, warmup_steps)

  return schedule


def linear(
  peak: float, *, steps: int, warmup_steps: int = 0, end: float = 0.0
) -> optax.Schedule:
  """Returns a schedule that falls along a line after the warmup.

  Args:
    peak: learning rate at the end of the warmup, at least 0.
    steps: steps in all, more than the warmup; `end` is reached after them.
    warmup_steps: steps of linear warmup, at least 0.
    end: learning rate at the end, at least 0.

  Returns:
    A function from the step (0, 1, ...) to the learning rate, float32.
  """
  _check(peak, warmup_steps, steps)

  def schedule(step: jax.typing.ArrayLike) -> jax.Array:
    part = _part(step, warmup_steps, steps)
    return (peak + (end - peak) * part) * _warmup(step, warmup_steps)

  return schedule


def _warmup(step: jax.typing.ArrayLike, warmup_steps: int) -> jax.Array:
  """Returns the part of the peak that the warmup allows."""
  count = jnp.asarray(step, jnp.float32) + 1.0
  return jnp.minimum(1.0, count / max(warmup_steps, 1))


def _part(
  step: jax.typing.ArrayLike, warmup_steps: int, steps: int
) -> jax.Array:
  """Returns how much of the time after the warmup is over, in [0, 1]."""
  past = jnp.asarray(step, jnp.float32) - warmup_steps
  return jnp.clip(past / (steps - warmup_steps), 0.0, 1.0)


def _check(peak: float, warmup_steps: int, steps: int | None = None) -> None:
  if not (peak >= 0 and math.isfinite(peak)):
    raise ValueError(f"expected peak >= 0 and finite, got {peak=}")
  if warmup_steps < 0:
    raise ValueError(f"expected warmup_steps >= 0, got {warmup_steps=}")
  if steps is not None and steps <= warmup_steps:
    raise ValueError(
      f"expected more steps than warmup_steps={warmup_steps}, got {steps=}"
    )
