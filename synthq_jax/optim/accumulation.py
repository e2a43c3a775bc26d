"""Clipped sums that are added up over several calls, before one noisy step."""

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
    part: int32 [], how many parts the sum has so far.
    total: float32 in the structure of the parameters. As private as the data.
    lost: what adding has rounded away.
    inner: state of the transform.
  """

  part: jax.Array
  total: Any
  lost: Any
  inner: Any


def accumulate(
  transform: optax.GradientTransformation, *, parts: int
) -> optax.GradientTransformationExtraArgs:
  """Builds the transform that adds up clipped sums, and makes every k-th step.

  For batches that do not fit in one call: draw one batch, divide it
  (`sampling.split`), and update with each part's sum. Updates are zero until
  the last part; then the whole sum goes through the transform, which adds noise
  once. Sums are float32, whatever the parameters are, and are not averaged.

  A part needs no call of its own where the examples themselves fit on the
  device: `microbatch_size` of `clipped_grad` does that inside of one call.

  Formal guarantee:
    That of the transform for the whole sum. Asked of the caller: the parts are
    those of ONE drawn batch, so that a record is in one of them and moves the
    whole as far as it moves its part; of several batches, a record that is drawn
    for k of them would move the sum k times as far. Each part's sum must not
    depend on the others' records: true for `clipped_grad` (with a key and no
    "example_id", if each part has a key of its own), and not for
    `contrastive_clipped_grad`, where a record that comes or goes may move others
    from part to part. The state holds a sum without noise: until the last part
    it is as private as the data, saved ones too.

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
    parts: sums of a step, at least 1.

  Returns:
    An optax transform.

  Raises:
    ValueError: if `parts` is no number of parts; in a call, if it is not given
      a whole sum.
  """
  if parts < 1 or parts != int(parts):
    raise ValueError(f"expected an integer parts >= 1, got {parts=}")
  transform = optax.with_extra_args_support(transform)

  def init_fn(params: optax.Params) -> AccumulateState:
    check_whole(params)
    zeros = optax.tree.zeros_like(params, dtype=jnp.float32)
    return AccumulateState(
      jnp.zeros([], jnp.int32), zeros, zeros, transform.init(params)
    )

  def update_fn(
    updates: optax.Updates,
    state: Any,  # AccumulateState: optax's type takes any tree
    params: optax.Params | None = None,
    **extra: Any,
  ) -> tuple[optax.Updates, AccumulateState]:
    check_whole(updates)
    total, lost = sums.add_exactly(state.total, state.lost, updates)

    def step() -> tuple[optax.Updates, AccumulateState]:
      whole = jax.tree.map(jnp.add, total, lost)
      made, inner = transform.update(whole, state.inner, params, **extra)
      zeros = optax.tree.zeros_like(total)
      return made, AccumulateState(
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
