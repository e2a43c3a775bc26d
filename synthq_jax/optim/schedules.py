"""Computes learning rates: linear warmup, then linear decay.

Step t of a warmup of w steps has (t + 1) / w of the peak, so that step 0
already learns. A private step that changes nothing would still cost privacy.
"""

import jax
import jax.numpy as jnp
import optax

from synthq_jax import checks

__all__ = ["linear"]


def linear(peak: float, *, steps: int, warmup_steps: int = 0) -> optax.Schedule:
  """Builds a schedule that falls linearly from `peak` to 0 after the warmup.

  >>> print(linear(0.5, steps=2)(1))
  0.25

  Args:
    peak: learning rate at the end of the warmup, at least 0.
    steps: total steps, more than the warmup; 0 is reached after the last.
    warmup_steps: steps of linear warmup, at least 0.

  Returns:
    A function from the step (0, 1, ...) to the learning rate, float32.

  Raises:
    ValueError: if a number is out of range.
  """
  checks.within("[0, inf)", peak=peak)
  checks.at_least(0, warmup_steps=warmup_steps)
  if steps <= warmup_steps:
    raise ValueError(
      f"expected more steps than warmup_steps={warmup_steps}, got {steps=}"
    )

  def schedule(step: jax.typing.ArrayLike) -> jax.Array:
    count = jnp.asarray(step, jnp.float32)
    warmup = jnp.minimum(1.0, (count + 1.0) / max(warmup_steps, 1))
    part = jnp.clip((count - warmup_steps) / (steps - warmup_steps), 0.0, 1.0)
    return (peak - peak * part) * warmup

  return schedule
