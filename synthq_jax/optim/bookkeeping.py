"""Exact per-example clipping in one backward pass (book-keeping).

The loss of ONE example is traced, and each use of a parameter in a matrix
product or a lookup gets a perturbation of its result, which is zero. One
backward pass of all examples, with respect to the perturbations and with the
parameters shared, gives the cotangent of each result; together with the
recorded other operand it is the parameter's per-example gradient in factors.
Norms come from the factors, and so does the sum of the clipped gradients. The
backward pass of the shared weights themselves is never asked for.

What is recorded is kept until the end, also of a rematerialised part: where
memory is short, `ghost` recomputes it.

A norm from factors is a sum of products, so its rounding error is relative to
the contributions of single positions. Where these are far above the clip norm
and cancel each other, the norm could come out too small: an allowance for the
rounding is added to it.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from synthq_jax import typing
from synthq_jax.optim import _devices, _plan, _rules, _trace

__all__ = ["clipped_sum"]

KEEP_RATIO = 2.0
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
    Bu et al. (2023), arXiv:2210.00038 (book-keeping).
  """
  leaves, structure = jax.tree.flatten(params)
  arguments = (batch,) if keys is None else (batch, keys)
  plan = _plan.make(loss_fn, params, arguments, keep_ratio=KEEP_RATIO)
  backward = jax.vmap(
    functools.partial(_one_example, plan, leaves),
    in_axes=(None, None, 0),
  )
  formed = [leaves[index] for index in plan.formed]
  zeros = _devices.vary(plan.zeros(), _devices.axes_of(leaves))
  losses, records, cotangents, gradients = backward(zeros, formed, arguments)
  # One value each, for norm and sum, however it was rounded.
  records, cotangents, gradients = jax.lax.optimization_barrier(
    (records, cotangents, gradients)
  )
  uses = _plan.uses(plan.sites, records, cotangents)
  squares = [
    _rules.squared_norms([use for _, use in pairs]) for pairs in uses.values()
  ]
  squares += [_rules.sum_of_squares(gradient) for gradient in gradients]
  norms = _rules.norms(squares, losses)
  weights = _rules.clip_weights(losses, norms, is_padding_example, l2_clip_norm)
  formed = dict(zip(plan.formed, gradients, strict=True))
  shapes = [jnp.shape(leaf) for leaf in leaves]
  total = _plan.weighted_sums(shapes, uses, formed, weights)
  return jax.tree.unflatten(structure, total), losses, norms


def _one_example(
  plan: _plan.Plan,
  leaves: Sequence[jax.Array],
  zeros: Sequence[jax.Array],
  formed: Sequence[jax.Array],
  arguments: Any,
) -> tuple[jax.Array, list[jax.Array], list[jax.Array], list[jax.Array]]:
  """Returns loss, records, cotangents and formed gradients of one example."""

  def loss(
    zeros: Sequence[jax.Array], formed: Sequence[jax.Array]
  ) -> tuple[jax.Array, list[jax.Array]]:
    values = list(leaves)
    for index, value in zip(plan.formed, formed, strict=True):
      values[index] = value
    walk = _trace.Walk(zeros)
    values += jax.tree.leaves(arguments)
    (value,) = walk.run(plan.closed, values, plan.followed)
    return value, walk.records

  value_and_grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
  (value, records), (cotangents, gradients) = value_and_grad(zeros, formed)
  pairs = zip(gradients, plan.dtypes, strict=True)
  gradients = [gradient.astype(dtype) for gradient, dtype in pairs]
  return value.astype(jnp.float32), records, cotangents, gradients
