"""Optimizers that take a clipped sum and make private steps."""

import math

import jax
import jax.numpy as jnp
import optax

from synthq_jax.optim import _rules
from synthq_jax.optim import noise as noise_lib

# By name: the package's attributes `adafactor` and `privatize` are functions.
from synthq_jax.optim.adafactor import adafactor
from synthq_jax.optim.privatize import privatize
from synthq_jax.privacy import _checks

__all__ = ["dp_adafactor", "dp_adam", "dp_aggregate"]


def dp_adafactor(
  learning_rate: optax.ScalarOrSchedule,
  *,
  l2_sensitivity: float,
  noise_multiplier: float,
  denominator: float,
  key: jax.Array,
  noise: noise_lib.Noise | None = None,
  **options: object,
) -> optax.GradientTransformationExtraArgs:
  """Builds Adafactor on the private mean of a clipped sum.

  Formal guarantee:
    That of `privatize`; Adafactor is post-processing.

  Args:
    learning_rate: a number or a function of the step.
    l2_sensitivity: as in `privatize`.
    noise_multiplier: as in `privatize`.
    denominator: as in `privatize`.
    key: as in `privatize`.
    noise: as in `privatize`.
    **options: the other arguments of `adafactor`.

  Returns:
    An optax transform whose `update` takes the clipped sum and parameters.

  Raises:
    ValueError: if a number is out of its range.
  """
  return optax.chain(
    privatize(
      l2_sensitivity=l2_sensitivity,
      noise_multiplier=noise_multiplier,
      denominator=denominator,
      key=key,
      noise=noise,
    ),
    adafactor(learning_rate, **options),
  )


def dp_adam(
  learning_rate: optax.ScalarOrSchedule,
  *,
  l2_sensitivity: float,
  noise_multiplier: float,
  denominator: float,
  key: jax.Array,
  noise: noise_lib.Noise | None = None,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  weight_decay: float = 0.0,
  second_moment_floor: float | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Builds Adam on the private mean of a clipped sum.

  The square of a noisy mean is on average the square of the mean plus the
  variance of the noise, which is public. Where noise dominates, all second
  moments are about that variance and Adam is no more than momentum; with a
  `second_moment_floor` the variance is taken out again.

  Formal guarantee:
    That of `privatize`; Adam is post-processing.

  Args:
    learning_rate: a number or a function of the step.
    l2_sensitivity: as in `privatize`.
    noise_multiplier: as in `privatize`.
    denominator: as in `privatize`.
    key: as in `privatize`.
    noise: as in `privatize`.
    b1: decay of the first moment, in [0, 1).
    b2: decay of the second moment, in [0, 1).
    eps: added to the root of the second moment.
    weight_decay: decoupled, times the learning rate, at least 0.
    second_moment_floor: None leaves the noise in the second moments; a number
      above 0 takes its variance out, and what is left counts as at least that
      many times the variance. For independent noise alone.

  Returns:
    An optax transform whose `update` takes the clipped sum and parameters.

  Raises:
    ValueError: if a number is out of its range, or the noise is correlated
      where its variance is to be taken out.

  References:
    Tang et al. (2023), arXiv:2312.14334 (the second moment's correction).
  """
  for name, value in (("b1", b1), ("b2", b2)):
    if not 0 <= value < 1:
      raise ValueError(f"expected {name} in [0, 1), got {name}={value!r}")
  if second_moment_floor is None:
    adam = optax.scale_by_adam(b1, b2, eps)
  else:
    if not (second_moment_floor > 0 and math.isfinite(second_moment_floor)):
      raise ValueError(
        "expected second_moment_floor > 0 and finite, or None, got"
        f" {second_moment_floor=}"
      )
    if noise is not None and noise.min_separation > 1:
      raise ValueError(
        "expected independent noise, whose variance is the same in every step,"
        f" with second_moment_floor={second_moment_floor}, got correlated noise"
      )
    std = noise_multiplier * l2_sensitivity / denominator
    adam = _adam_without_noise(b1, b2, eps, std**2, second_moment_floor)
  return optax.chain(
    privatize(
      l2_sensitivity=l2_sensitivity,
      noise_multiplier=noise_multiplier,
      denominator=denominator,
      key=key,
      noise=noise,
    ),
    adam,
    optax.add_decayed_weights(weight_decay),
    optax.scale_by_learning_rate(learning_rate),
  )


def _adam_without_noise(
  b1: float, b2: float, eps: float, variance: float, floor: float
) -> optax.GradientTransformation:
  """Is `scale_by_adam` with the variance of the noise out of its moments."""
  inner = optax.scale_by_adam(b1, b2, eps)

  def update_fn(
    updates: optax.Updates,
    state: optax.ScaleByAdamState,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, optax.ScaleByAdamState]:
    _, state = inner.update(updates, state, params)
    first = optax.tree.bias_correction(state.mu, b1, state.count)
    second = optax.tree.bias_correction(state.nu, b2, state.count)
    scaled = jax.tree.map(
      lambda m, v: (
        m / (jnp.sqrt(jnp.maximum(v - variance, floor * variance)) + eps)
      ),
      first,
      second,
    )
    return scaled, state

  return optax.GradientTransformation(inner.init, update_fn)


def dp_aggregate(
  *,
  l2_clip_norm: float,
  noise_multiplier: float,
  denominator: float,
  key: jax.Array,
) -> optax.GradientTransformationExtraArgs:
  """Builds the transform from stacked per-example gradients to a private mean.

  For gradients that exist already, such as jax.vmap(jax.grad(f)); otherwise
  `clipped_grad` does the same in less time and memory.

  Formal guarantee:
    Unit: one entry of the leading axis. Each is clipped over all leaves to
    `l2_clip_norm` (zero if it is not finite), so their sum has that
    sensitivity under ADD_OR_REMOVE_ONE and REPLACE_SPECIAL; the rest is that
    of `privatize`. Assumes that each entry depends on its example alone.

  Args:
    l2_clip_norm: the clip norm, finite and at least 1e-12.
    noise_multiplier: as in `privatize`.
    denominator: as in `privatize`.
    key: as in `privatize`.

  Returns:
    An optax transform; `update` takes gradients [batch, ...] and optionally
    `is_padding_example`, bool [batch], for entries that do not count.

  Raises:
    ValueError: if a number is out of its range.
  """
  _checks.check_clip_norm(l2_clip_norm)

  def update_fn(
    updates: optax.Updates,
    state: optax.EmptyState,
    params: optax.Params | None = None,
    *,
    is_padding_example: jax.Array | None = None,
    **extra: object,
  ) -> tuple[optax.Updates, optax.EmptyState]:
    del params, extra
    norms = jax.vmap(optax.tree.norm)(  # [batch]
      jax.tree.map(lambda x: x.astype(jnp.float32), updates)
    )
    counted = jnp.isfinite(norms)
    if is_padding_example is not None:
      counted &= ~is_padding_example
    weights = jnp.where(counted, jnp.minimum(1.0, l2_clip_norm / norms), 0.0)
    total = jax.tree.map(lambda x: _rules.weigh(x, weights), updates)
    return total, state

  return optax.chain(
    optax.GradientTransformationExtraArgs(optax.init_empty_state, update_fn),
    privatize(
      l2_sensitivity=l2_clip_norm,
      noise_multiplier=noise_multiplier,
      denominator=denominator,
      key=key,
    ),
  )
