"""Exact per-example clipping in two backward passes (ghost clipping).

The first pass asks for norms alone: each parameter that is used once gets a
token, whose cotangent is the squared norm of the parameter's gradient, made
where the backward pass makes the gradient's factors. The second pass is an
ordinary one, of the sum of losses weighted with the clip factors. Nothing but
what ordinary training keeps is kept, rematerialised parts and scans stay what
they are, and no gradient of one example is in memory for longer than its norm
takes.

Parameters that are used several times (an embedding in encoder and decoder, a
weight shared by the iterations of a scan) need all their uses at once: their
factors are kept, as in `bookkeeping`.
"""

import collections
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from synthq_jax import typing
from synthq_jax.optim import _plan, _rules, _trace

__all__ = ["clipped_sum"]

KEEP_RATIO = 1 / 16
"""A gradient is formed per example if at most this times its factors' bytes."""


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

  References:
    Li et al. (2022), arXiv:2110.05679, section 4 (ghost clipping).
  """
  leaves = jax.tree.leaves(params)
  arguments = (batch,) if keys is None else (batch, keys)
  plan = _plan.make(loss_fn, params, arguments, keep_ratio=KEEP_RATIO)
  tokened = _used_once(plan)
  backward = jax.vmap(
    functools.partial(_one_example, plan, leaves, tokened),
    in_axes=(None, None, None, 0),
  )
  formed = [leaves[index] for index in plan.formed]
  token = jnp.zeros((), jnp.float32)
  losses, records, (cotangents, gradients, squared) = backward(
    plan.zeros(tokened), formed, token, arguments
  )
  sites = [site for site in plan.sites if site.leaf not in tokened]
  uses = _plan.uses(sites, records, cotangents)
  squares = [
    _rules.squared_norms([use for _, use in pairs]) for pairs in uses.values()
  ]
  squares += [_rules.sum_of_squares(gradient) for gradient in gradients]
  norms = _rules.norms([*squares, squared], losses)
  weights = _rules.clip_weights(losses, norms, is_padding_example, l2_clip_norm)
  total = _weighted_gradient(loss_fn, params, arguments, weights)
  return total, losses, norms


def _used_once(plan: _plan.Plan) -> frozenset[int]:
  """Returns the parameters whose only use makes the whole gradient."""
  counts = collections.Counter(site.leaf for site in plan.sites)
  shared = {site.leaf for site in plan.sites if site.is_shared}
  return frozenset(
    leaf for leaf, count in counts.items() if count == 1 and leaf not in shared
  )


def _one_example(
  plan: _plan.Plan,
  leaves: Sequence[jax.Array],
  tokened: frozenset[int],
  zeros: Sequence[jax.Array],
  formed: Sequence[jax.Array],
  token: jax.Array,
  arguments: Any,
) -> tuple[jax.Array, list[jax.Array], Any]:
  """Returns loss, records and the cotangents of zeros, formed and token."""

  def loss(
    zeros: Sequence[jax.Array], formed: Sequence[jax.Array], token: jax.Array
  ) -> tuple[jax.Array, list[jax.Array]]:
    values = list(leaves)
    for index, value in zip(plan.formed, formed, strict=True):
      values[index] = value
    walk = _trace.Walk(zeros, token=token, tokened=tokened)
    values += jax.tree.leaves(arguments)
    (value,) = walk.run(plan.closed, values, plan.followed)
    return value, walk.records

  value_and_grad = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
  (value, records), cotangents = value_and_grad(zeros, formed, token)
  return value.astype(jnp.float32), records, cotangents


def _weighted_gradient(
  loss_fn: Any,
  params: typing.Params,
  arguments: Any,
  weights: jax.Array,
) -> typing.Params:
  """Returns the gradient of the weighted sum of losses, float32.

  An example with weight zero may hold anything, so a sound one is put in its
  place: zero times something finite is zero.
  """
  counted = weights > 0
  places = jnp.where(counted, jnp.arange(len(weights)), jnp.argmax(counted))
  arguments = jax.tree.map(lambda x: x[places], arguments)
  dtypes = jax.tree.map(lambda x: x.dtype, params)
  loss = jax.vmap(_plan.loss_of_one(loss_fn), in_axes=(None, 0))

  def total(wide: typing.Params) -> jax.Array:
    params = jax.tree.map(lambda x, dtype: x.astype(dtype), wide, dtypes)
    return jnp.sum(weights * loss(params, arguments).astype(jnp.float32))

  # Differentiated in float32, so that the sum over examples is float32.
  wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
  gradient = jax.grad(total)(wide)
  return jax.tree.map(lambda x: jnp.where(counted.any(), x, 0.0), gradient)
