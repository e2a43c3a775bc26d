"""Adds up clipped sums over several calls, before one noisy step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from synthq_jax.optim.bookkeeping import sums
from synthq_jax.optim.privatize import check_whole

__all__ = ["AccumulateState", "accumulate"]


class AccumulateState(NamedTuple):
  """State of `accumulate`.

  Attributes:
    part: int32 [], number of parts in the sum so far.
    total: float32 sum in the structure of the parameters, as private as the
      data.
    lost: float32, rounding errors of `total` so far.
    inner: state of the transform.
  """

  part: jax.Array
  total: Any
  lost: Any
  inner: Any


def accumulate(
  transform: optax.GradientTransformation, *, parts: int
) -> optax.GradientTransformationExtraArgs:
  """Builds a transform that adds up `parts` clipped sums before each step.

  For batches that do not fit in one call: draw one batch, divide it
  (`sampling.split`), and update with each part's sum. Updates are zero until
  the last part; then the whole sum goes through the transform, which adds noise
  once. Sums are float32, whatever the parameters' dtype, and are not averaged.

  If the examples themselves fit on the device, use `microbatch_size` of
  `clipped_grad` instead, inside of one call.

  Formal guarantee:
    That of the transform for the whole sum, under two conditions for the
    caller. First, the parts come from ONE drawn batch. A record is then in one
    part and moves the whole sum as far as it moves its part; a record that is
    drawn for k of several batches would move the sum k times as far. Second,
    each part's sum does not depend on the records of other parts. This is true
    for `clipped_grad` (with a key and no "example_id", if each part has a key
    of its own). It is not true for `contrastive_clipped_grad`, where a record
    that comes or goes may move others from part to part. The state, saved or
    not, holds a sum without noise: until the last part it is as private as the
    data.

  >>> import jax, jax.numpy as jnp
  >>> from synthq_jax import optim
  >>> tx = accumulate(optim.privatize(
  ...     l2_sensitivity=1.0, noise_multiplier=0.0, denominator=4.0,
  ...     key=jax.random.key(0)), parts=2)
  >>> state = tx.init(jnp.zeros(1))
  >>> for part in (jnp.array([1.0]), jnp.array([3.0])):
  ...   mean, state = tx.update(part, state)
  ...   print(mean)
  [0.]
  [1.]

  Args:
    transform: `dp_adam(...)`, or `optax.chain(privatize(...), ...)`.
    parts: number of sums in a step, at least 1.

  Returns:
    An optax transform.

  Raises:
    ValueError: if `parts` is no integer >= 1; in a call, if the update is no
      whole sum.
  """
  if parts < 1 or parts != int(parts):
    raise ValueError(f"expected an integer parts >= 1, got {parts=}")
  transform = optax.with_extra_args_support(transform)

  def init_fn(params: optax.Params) -> AccumulateState:
    check_whole(params)
    # Two arrays: `jax.jit(..., donate_argnums=...)` takes no buffer twice.
    total, lost = (
      optax.tree.zeros_like(params, dtype=jnp.float32) for _ in range(2)
    )
    return AccumulateState(
      jnp.zeros([], jnp.int32), total, lost, transform.init(params)
    )

  def update_fn(
    updates: optax.Updates,
    state: Any,  # AccumulateState: optax's type takes any tree
    params: optax.Params | None = None,
    **extra: Any,
  ) -> tuple[optax.Updates, AccumulateState]:
    check_whole(updates, is_sum=True)
    total, lost = sums.add_exactly(state.total, state.lost, updates)

    def step() -> tuple[optax.Updates, AccumulateState]:
      full_sum = jax.tree.map(jnp.add, total, lost)
      changes, inner = transform.update(full_sum, state.inner, params, **extra)
      zeros = optax.tree.zeros_like(total)
      return changes, AccumulateState(
        jnp.zeros([], jnp.int32), zeros, zeros, inner
      )

    def wait() -> tuple[optax.Updates, AccumulateState]:
      shapes, _ = jax.eval_shape(step)
      return (
        optax.tree.zeros_like(shapes),
        AccumulateState(state.part + 1, total, lost, state.inner),
      )

    return jax.lax.cond(state.part == parts - 1, step, wait)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
