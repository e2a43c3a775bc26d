"""Sums noisy gradients and removes the known noise from the sum.

The mean of a private step holds Gaussian noise whose standard deviation is
public. A matrix of 384 x 384 numbers holds 147,456 numbers of noise and a few
directions of signal. `denoise` shrinks each singular value by the part that
noise explains, to zero if noise explains all of it: only directions that the
records teach remain.

References:
  Gavish and Donoho, "Optimal Shrinkage of Singular Values", IEEE Transactions
  on Information Theory 2017, equation 7 (`denoise`).
  Xiao, "Dual Averaging Methods for Regularized Stochastic Learning and Online
  Optimization", JMLR 2010, algorithm 1 (`dp_dual_averaging`).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from synthq_jax import checks, typing

# By name: the package's attribute `privatize` is a function.
from synthq_jax.optim.privatize import privatize

__all__ = ["DualAveragingState", "denoise", "dp_dual_averaging"]


def denoise(
  matrix: Float[Array, "row column"], noise_std: jax.typing.ArrayLike
) -> Float[Array, "row column"]:
  """Shrinks singular values by the noise that a matrix is known to hold.

  The result is the best estimate in mean square, for large matrices of low
  rank. Noise alone has singular values up to noise_std (sqrt(rows) +
  sqrt(columns)); values up to that bound become 0.

  Formal guarantee: post-processing of a noisy matrix; `noise_std` is public.

  >>> print(denoise(jnp.diag(jnp.array([5.0, 1.0])), 0.0))
  [[5. 0.]
   [0. 1.]]

  Args:
    matrix: a signal of low rank plus independent Gaussian noise.
    noise_std: standard deviation of the noise in each entry, at least 0.

  Returns:
    float32; the matrix itself if `noise_std` is 0.
  """
  matrix, noise_std = jnp.asarray(matrix, jnp.float32), jnp.asarray(noise_std)
  long, ratio = max(matrix.shape), min(matrix.shape) / max(matrix.shape)
  left, values, right = jnp.linalg.svd(matrix, full_matrices=False)
  unit = noise_std * math.sqrt(long)
  # In units of the noise: sqrt((y^2 - ratio - 1)^2 - 4 ratio) / y.
  inside = (values**2 - (ratio + 1) * unit**2) ** 2 - 4 * ratio * unit**4
  shrunk = jnp.sqrt(jnp.maximum(inside, 0.0)) / jnp.maximum(values, 1e-30)
  is_seen = values > (1 + math.sqrt(ratio)) * unit
  shrunk = jnp.where(is_seen, shrunk, 0.0)
  return jnp.where(noise_std > 0, (left * shrunk[None]) @ right, matrix)


class DualAveragingState(NamedTuple):
  """State of `dp_dual_averaging` behind its noise."""

  step: jax.Array  # [] int32
  total: typing.Params  # sum of the noisy means so far, float32


def _dual_averaging(
  learning_rate: float, noise_std: float
) -> optax.GradientTransformation:
  """Builds the optimizer of private means with noise of this deviation."""

  def init_fn(params: optax.Params) -> DualAveragingState:
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
    return DualAveragingState(jnp.zeros([], jnp.int32), zeros)

  def update_fn(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, DualAveragingState]:
    if params is None:
      raise ValueError("expected params in update(updates, state, params)")
    assert isinstance(state, DualAveragingState)  # as `init_fn` made it
    step = jnp.asarray(optax.safe_increment(state.step))
    total = jax.tree.map(jnp.add, state.total, updates)
    std = noise_std * jnp.sqrt(step.astype(jnp.float32))
    changes = jax.tree.map(
      lambda x, p: -learning_rate * (denoise(x, std) if x.ndim == 2 else x) - p,
      total,
      params,
    )
    return changes, DualAveragingState(step, total)

  return optax.GradientTransformation(init_fn, update_fn)


def dp_dual_averaging(
  learning_rate: float,
  *,
  l2_sensitivity: float,
  noise_multiplier: float,
  denominator: float,
  key: jax.Array,
) -> optax.GradientTransformationExtraArgs:
  """Builds the optimizer whose parameters are a denoised sum of private means.

  After step t every matrix is -learning_rate x denoise(sum of t noisy means,
  noise_std sqrt(t)), whatever the initial parameters are. The noise is removed
  from the sum and not from single steps: with t, a direction of signal rises
  above the noise of the sum. Parameters that are no matrices are not denoised.

  Formal guarantee:
    That of `privatize`; dual averaging is post-processing.

  >>> transform = dp_dual_averaging(2.0, l2_sensitivity=1.0, noise_multiplier=0.0,
  ...                               denominator=1.0, key=jax.random.key(0))
  >>> params = {"map": jnp.zeros((2, 2))}
  >>> state = transform.init(params)
  >>> updates, state = transform.update({"map": jnp.eye(2)}, state, params)
  >>> print(jnp.diag(updates["map"]))
  [-2. -2.]

  Args:
    learning_rate: a number above 0.
    l2_sensitivity, noise_multiplier, denominator, key: as in `privatize`.

  Returns:
    An optax transform whose `update` takes the clipped sum and parameters.

  Raises:
    TypeError: if a number is a schedule or traced.
    ValueError: if a number is out of its range.
  """
  numbers = {
    "l2_sensitivity": l2_sensitivity,
    "noise_multiplier": noise_multiplier,
    "denominator": denominator,
  }
  for name, value in {"learning_rate": learning_rate, **numbers}.items():
    if callable(value) or isinstance(value, jax.core.Tracer):
      raise TypeError(
        f"expected a constant number for {name}, got a schedule or a traced value:"
        " dual averaging denoises and scales the sum of all steps at once"
      )
  checks.within("(0, inf)", learning_rate=learning_rate)
  return optax.chain(
    privatize(**numbers, key=key),
    _dual_averaging(
      learning_rate, noise_multiplier * l2_sensitivity / denominator
    ),
  )
