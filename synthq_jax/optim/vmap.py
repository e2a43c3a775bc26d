"""Per-example clipping with jax_privacy: one gradient per example by vmap."""

from typing import Any

import jax
import jax.numpy as jnp
from jax_privacy import clipping

from synthq_jax import typing

__all__ = ["clipped_sum"]


def clipped_sum(
  loss_fn: Any,
  params: typing.Params,
  batch: typing.Batch,
  keys: jax.Array | None,
  is_padding_example: jax.Array,
  l2_clip_norm: float,
) -> tuple[typing.Params, jax.Array, jax.Array]:
  """Returns the sum of clipped gradients, the losses and the norms.

  Args:
    loss_fn: `(params, batch)` or `(params, batch, key)` to losses [batch];
      it is called with a batch of one example.
    params: the parameters.
    batch: arrays with a leading axis [batch].
    keys: one key per example [batch], or None.
    is_padding_example: bool [batch].
    l2_clip_norm: the clip norm.

  Returns:
    The sum (float32, the structure of `params`), losses and norms [batch].
  """

  dtypes = jax.tree.map(lambda x: x.dtype, params)

  def loss(
    wide: typing.Params, batch: typing.Batch, keys: jax.Array | None
  ) -> jax.Array:
    rest = () if keys is None else (keys[0],)
    params = jax.tree.map(lambda x, dtype: x.astype(dtype), wide, dtypes)
    value = loss_fn(params, batch, *rest)[0].astype(jnp.float32)
    # No gradient flows back from a loss that is not finite.
    return jnp.where(jnp.isfinite(value), value, jax.lax.stop_gradient(value))

  def drop_if_not_finite(gradient: typing.Params) -> typing.Params:
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient)]
    keep = jnp.stack(finite).all()
    return jax.tree.map(lambda leaf: jnp.where(keep, leaf, 0), gradient)

  # Differentiated in float32, so that norms are computed in float32.
  wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
  total, aux = clipping.clipped_grad(
    loss,
    l2_clip_norm=l2_clip_norm,
    batch_argnums=(1, 2),
    return_values=True,
    return_grad_norms=True,
    pre_clipping_transform=drop_if_not_finite,
  )(wide, batch, keys, is_padding_example=is_padding_example)
  return total, aux.values, aux.grad_norms
