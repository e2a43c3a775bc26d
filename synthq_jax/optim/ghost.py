"""Exact per-example clipping in two backward passes (ghost clipping).

The first pass asks for norms alone: each parameter that is used once is metered,
so that the squared norm of its gradient is made where the backward pass makes
the gradient's factors. The second pass asks the same places for the sums of
their gradients, weighted with the clip factors. Nothing but what ordinary
training keeps is kept, rematerialised parts and scans stay what they are, and no
gradient of one example is in memory for longer than its norm takes.

Both passes are two turns of one loop, so one compiled program: what is summed in
the second is bit for bit what was measured in the first, in half precision too,
and whatever the rules of a custom derivative do with a cotangent. Sums are
float32, of weights in float32.

Parameters that are used several times (an embedding in encoder and decoder, a
weight shared by the iterations of a scan) need all their uses at once: their
factors are kept, as in `bookkeeping`, and so are gradients that are formed.
"""

import collections
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from synthq_jax import typing
from synthq_jax.optim import _batches, _devices, _plan, _rules, _trace

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
  leaves, structure = jax.tree.flatten(params)
  arguments = (batch,) if keys is None else (batch, keys)
  plan = _plan.make(loss_fn, params, arguments, keep_ratio=KEEP_RATIO)
  total, losses, norms = jax.vmap(
    functools.partial(_one_example, plan, leaves, l2_clip_norm),
    out_axes=(None, 0, 0),
  )(arguments, is_padding_example)
  return jax.tree.unflatten(structure, total), losses, norms


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
  l2_clip_norm: float,
  arguments: Any,
  is_padding: jax.Array,
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
  """Returns the whole batch's sum, and the loss and norm of one example."""
  metered = _used_once(plan)
  sites = [site for site in plan.sites if site.leaf not in metered]
  shapes = [jnp.shape(leaf) for leaf in leaves]
  axes = _devices.axes_of(leaves)

  def loss(
    zeros: Sequence[jax.Array],
    formed: Sequence[jax.Array],
    meters: _trace.Meters,
  ) -> tuple[tuple[jax.Array, jax.Array], list[jax.Array]]:
    values = list(leaves)
    for index, value in zip(plan.formed, formed, strict=True):
      values[index] = value
    walk = _trace.Walk(zeros, meters=meters, metered=metered)
    values += jax.tree.leaves(arguments)
    (value,) = walk.run(plan.closed, values, plan.followed)
    return (value, _devices.vary(walk.weight, axes)), walk.records

  sinks = {leaf: jnp.zeros(shapes[leaf], jnp.float32) for leaf in metered}
  meters = _trace.Meters(jnp.zeros((), jnp.float32), sinks)
  zeros, meters = _devices.vary((plan.zeros(metered), meters), axes)
  formed = [leaves[index] for index in plan.formed]
  (value, _), pull, records = jax.vjp(loss, zeros, formed, meters, has_aux=True)
  loss_value = value.astype(jnp.float32)

  def kept_squares(cotangents: Any, gradients: Any) -> list[jax.Array]:
    """Squared norms of what is kept of one example."""
    one = jax.tree.map(lambda x: x[None], (records, cotangents, gradients))
    uses = _plan.uses(sites, *one[:2])
    squares = [
      _rules.squared_norms([use for _, use in pairs]) for pairs in uses.values()
    ]
    squares += [_rules.sum_of_squares(gradient) for gradient in one[2]]
    return [each[0] for each in squares]

  def kept_sums(
    records: Any, cotangents: Any, gradients: Any, weights: jax.Array
  ) -> list[jax.Array]:
    """Weighted sums over the batch of what is kept; zero for the others."""
    return _plan.weighted_sums(
      shapes,
      _plan.uses(sites, records, cotangents),
      dict(zip(plan.formed, gradients, strict=True)),
      weights,
    )

  nothing = [jnp.zeros(shape, jnp.float32) for shape in shapes]
  nothing = _devices.vary(nothing, axes)
  one = _devices.vary(jnp.ones_like(value), axes)

  def turn(is_second: jax.Array, carry: Any) -> Any:
    weight, norm, _ = carry
    # Hides that the turns' cotangents are equal: the compiler would make them
    # before the loop and keep them all.
    start, _ = jax.lax.optimization_barrier((one, weight))
    cotangents, gradients, meters = pull((start, weight))
    gradients = [
      gradient.astype(dtype)
      for gradient, dtype in zip(gradients, plan.dtypes, strict=True)
    ]
    # One value each, for norm and sum, however it was rounded.
    cotangents, gradients = jax.lax.optimization_barrier(
      (cotangents, gradients)
    )

    def measure() -> tuple[jax.Array, jax.Array, list[jax.Array]]:
      squares = [*kept_squares(cotangents, gradients), meters.token]
      norm = _rules.norms(squares, loss_value)
      weight = _rules.clip_weights(loss_value, norm, is_padding, l2_clip_norm)
      return weight, norm, nothing

    def add() -> tuple[jax.Array, jax.Array, list[jax.Array]]:
      summed = _batches.reduce(kept_sums, is_summed=[True] * len(shapes))
      total = list(summed(records, cotangents, gradients, weight))
      for leaf, sink in meters.sinks.items():
        total[leaf] = sink
      return weight, norm, _devices.vary(total, axes)

    return jax.lax.cond(is_second, add, measure)

  first = _devices.vary(jnp.full((), _trace.NORMS, jnp.float32), axes)
  start = first, jnp.zeros_like(first), nothing
  _, norm, total = jax.lax.fori_loop(0, 2, turn, _devices.vary(start, axes))
  return total, loss_value, norm
