"""Builds T5's Adafactor, and optimizers that make private steps of clipped sums."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from synthq_jax import checks
from synthq_jax.optim import noise as noise_lib
from synthq_jax.optim.bookkeeping import sums

# By name: the package's attribute `privatize` is a function.
from synthq_jax.optim.privatize import Number, check_shapes, privatize
from synthq_jax.privacy import sampling

__all__ = ["adafactor", "dp_adafactor", "dp_adam", "dp_aggregate"]


def adafactor(
  learning_rate: optax.ScalarOrSchedule,
  *,
  multiply_by_parameter_scale: bool = True,
  decay_rate: float = 0.8,
  clipping_threshold: float | None = 1.0,
  min_dim_size_to_factor: int = 128,
) -> optax.GradientTransformationExtraArgs:
  """Builds Adafactor with the update and the defaults of T5X.

  Second moments are kept in float32 whatever the parameters' dtype. If a
  parameter's two largest axes are long enough, they are kept as means over rows
  and columns. Unlike in T5X, a parameter of more than two axes needs no rule:
  its two largest axes are factored.

  >>> import jax.numpy as jnp
  >>> transform = adafactor(0.1)
  >>> params = {"w": jnp.array([2.0, -2.0])}
  >>> state = transform.init(params)
  >>> updates, _ = transform.update({"w": jnp.array([5.0, -1.0])}, state, params)
  >>> print(updates["w"])
  [-0.2  0.2]

  Args:
    learning_rate: a number or a function of the step; relative to each
      parameter's scale if `multiply_by_parameter_scale`.
    multiply_by_parameter_scale: whether to multiply each update by the root
      mean square of its parameter.
    decay_rate: exponent c of the decay 1 - t^-c of second moments, t = 1, 2...
    clipping_threshold: largest root mean square of an update before it is
      scaled, or None.
    min_dim_size_to_factor: smallest second largest axis that is factored.

  Returns:
    An optax transform whose `update` needs the parameters.

  Raises:
    ValueError: if a number is out of its range.

  References:
    Shazeer and Stern (2018), arXiv:1804.04235, algorithms 4 and 6.
  """
  if decay_rate <= 0:
    raise ValueError(f"expected decay_rate > 0, got {decay_rate=}")
  if clipping_threshold is not None and clipping_threshold <= 0:
    raise ValueError(
      f"expected clipping_threshold > 0 or None, got {clipping_threshold=}"
    )
  parts = [
    optax.scale_by_factored_rms(
      decay_rate=decay_rate, min_dim_size_to_factor=min_dim_size_to_factor
    )
  ]
  if clipping_threshold is not None:
    parts.append(optax.clip_by_block_rms(clipping_threshold))
  if multiply_by_parameter_scale:
    parts.append(optax.scale_by_param_block_rms(1e-3))
  parts.append(optax.scale_by_learning_rate(learning_rate, flip_sign=False))
  return _in_float32(optax.chain(*parts, optax.scale(-1.0)))


def _in_float32(
  inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
  """Runs a transform on float32 copies of gradients and parameters."""

  def cast(tree: optax.Params) -> optax.Params:
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)

  def init_fn(params: optax.Params) -> optax.OptState:
    return inner.init(cast(params))

  def update_fn(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    **extra: object,
  ) -> tuple[optax.Updates, optax.OptState]:
    if params is not None:
      params = cast(params)
    return inner.update(cast(updates), state, params, **extra)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def dp_adafactor(
  learning_rate: optax.ScalarOrSchedule,
  *,
  l2_sensitivity: Number,
  noise_multiplier: Number,
  denominator: Number,
  key: jax.Array,
  noise: noise_lib.Noise | None = None,
  **options: Any,
) -> optax.GradientTransformationExtraArgs:
  """Builds Adafactor on the private mean of a clipped sum.

  Formal guarantee:
    That of `privatize`; Adafactor is post-processing.

  Args:
    learning_rate: a number or a function of the step.
    l2_sensitivity, noise_multiplier, denominator, key, noise: as in
      `privatize`.
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
  l2_sensitivity: Number,
  noise_multiplier: Number,
  denominator: Number,
  key: jax.Array,
  noise: noise_lib.Noise | None = None,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  weight_decay: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
  """Builds Adam on the private mean of a clipped sum.

  The square of a noisy mean is on average the square of the mean plus the
  variance of the noise. If noise dominates, all second moments are about that
  variance, and Adam is no more than momentum.

  Formal guarantee:
    That of `privatize`; Adam is post-processing.

  Args:
    learning_rate: a number or a function of the step.
    l2_sensitivity, noise_multiplier, denominator, key, noise: as in
      `privatize`.
    b1: decay of the first moment, in [0, 1).
    b2: decay of the second moment, in [0, 1).
    eps: added to the root of the second moment.
    weight_decay: decoupled, times the learning rate, at least 0.

  Returns:
    An optax transform whose `update` takes the clipped sum and parameters.

  Raises:
    ValueError: if a number is out of its range.
  """
  for name, value in (("b1", b1), ("b2", b2)):
    if not isinstance(value, jax.core.Tracer) and not 0 <= value < 1:
      raise ValueError(f"expected {name} in [0, 1), got {name}={value!r}")
  return optax.chain(
    privatize(
      l2_sensitivity=l2_sensitivity,
      noise_multiplier=noise_multiplier,
      denominator=denominator,
      key=key,
      noise=noise,
    ),
    _in_float32(
      optax.with_extra_args_support(optax.scale_by_adam(b1, b2, eps))
    ),
    optax.add_decayed_weights(weight_decay),
    optax.scale_by_learning_rate(learning_rate),
  )


def dp_aggregate(
  *,
  l2_clip_norm: float | jax.Array,
  noise_multiplier: Number,
  denominator: Number,
  key: jax.Array,
) -> optax.GradientTransformationExtraArgs:
  """Builds the transform from stacked per-example gradients to a private mean.

  Use it for gradients that exist already, such as those of
  jax.vmap(jax.grad(f)); otherwise `clipped_grad` does the same in less time and
  memory.

  Formal guarantee:
    Unit: one entry of the leading axis. Each entry is clipped over all leaves
    to `l2_clip_norm` (zero if it is not finite), so their sum has that
    sensitivity under ADD_OR_REMOVE_ONE and REPLACE_SPECIAL. The rest of the
    guarantee is that of `privatize`. Assumed: each entry depends on its example
    alone, and all padding is marked. An example takes the place of a row of
    padding: if that row counted, the sum would move by twice the clip norm.

  Args:
    l2_clip_norm: the clip norm, finite and at least 1e-12, or a traced scalar.
    noise_multiplier, denominator, key: as in `privatize`.

  Returns:
    An optax transform; `update` takes gradients [batch, ...] and, by name,
    `is_padding_example`, bool [batch], True for entries that do not count; None
    if every row is a record.

  Raises:
    TypeError: if the clip norm is a schedule, or `key` is no random key.
    ValueError: if a number is out of its range; in a call, if nothing says which
      rows are padding.
  """
  if callable(l2_clip_norm):
    raise TypeError(
      "expected a number for l2_clip_norm, got a schedule: give it to"
      " optax.inject_hyperparams(dp_aggregate, static_args='key')"
    )
  if not isinstance(l2_clip_norm, jax.core.Tracer):
    checks.clip_norm(float(l2_clip_norm))

  def update_fn(
    updates: optax.Updates,
    state: Any,  # EmptyState: optax's type takes any tree
    params: optax.Params | None = None,
    **extra: Any,
  ) -> tuple[optax.Updates, optax.EmptyState]:
    if sampling.IS_PADDING not in extra:
      raise ValueError(
        f"expected {sampling.IS_PADDING} beside stacked gradients, got none: pass"
        f" update(..., {sampling.IS_PADDING}=batch['{sampling.IS_PADDING}']), or"
        " None if every row is a record"
      )
    is_padding_example = extra[sampling.IS_PADDING]
    check_shapes(updates, params, is_stacked=True)
    norms = jax.vmap(optax.tree.norm)(  # [batch]
      jax.tree.map(lambda x: x.astype(jnp.float32), updates)
    )
    counted = jnp.isfinite(norms)
    if is_padding_example is not None:
      is_padding = jnp.asarray(is_padding_example, bool)
      if is_padding.shape != norms.shape:
        raise ValueError(
          f"expected {sampling.IS_PADDING} of shape {norms.shape}, got shape="
          f"{is_padding.shape}: one flag for each example"
        )
      counted &= ~is_padding
    weights = jnp.where(counted, jnp.minimum(1.0, l2_clip_norm / norms), 0.0)
    total = jax.tree.map(lambda x: sums.weigh(x, weights), updates)
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
