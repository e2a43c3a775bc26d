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
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from synthq_jax import typing
from synthq_jax.optim import (
  _batches,
  _devices,
  _plan,
  _rules,
  _sites,
  _trace,
)

__all__ = ["clipped_sum", "metered"]

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


def metered(plan: _plan.Plan) -> frozenset[int]:
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
  axes = _devices.axes_of(leaves)
  shapes = [jnp.shape(leaf) for leaf in leaves]
  nothing = [jnp.zeros(shape, jnp.float32) for shape in shapes]
  nothing = _devices.vary(nothing, axes)
  value, pull, kept = _linearized(plan, leaves, arguments, nothing, axes)
  loss = value.astype(jnp.float32)
  one = _devices.vary(jnp.ones_like(value), axes)

  def turn(is_second: jax.Array, carry: Any) -> Any:
    weight, norm, _ = carry
    # Hides that the turns' cotangents are equal: the compiler would make them
    # before the loop and keep them all.
    start, _ = jax.lax.optimization_barrier((one, weight))
    cotangents, gradients, meters = pull((start, weight))
    # One value each, for norm and sum, however it was rounded.
    held = jax.lax.optimization_barrier((cotangents, gradients))

    def measure() -> tuple[jax.Array, jax.Array, list[jax.Array]]:
      norm = _rules.norms([*kept.squares(*held), meters.token], loss)
      weight = _rules.clip_weights(loss, norm, is_padding, l2_clip_norm)
      return weight, norm, nothing

    def add() -> tuple[jax.Array, jax.Array, list[jax.Array]]:
      total = kept.sums(*held, weight, shapes)
      for leaf, sink in meters.sinks.items():
        total[leaf] = sink
      return weight, norm, _devices.vary(total, axes)

    return jax.lax.cond(is_second, add, measure)

  asking = _devices.vary(jnp.full((), _trace.NORMS, jnp.float32), axes)
  start = asking, _devices.vary(jnp.zeros((), jnp.float32), axes), nothing
  _, norm, total = jax.lax.fori_loop(0, 2, turn, start)
  return total, loss, norm


@dataclasses.dataclass(frozen=True)
class _Kept:
  """What is not metered: uses in factors, and gradients that are formed."""

  sites: Sequence[_sites.Site]
  formed: Sequence[int]
  records: Sequence[jax.Array]

  def squares(self, cotangents: Any, gradients: Any) -> list[jax.Array]:
    """Returns the squared norms of one example's gradients."""
    records, cotangents, gradients = jax.tree.map(
      lambda x: x[None], (self.records, cotangents, gradients)
    )
    uses = _plan.uses(self.sites, records, cotangents)
    squares = [
      _rules.squared_norms([use for _, use in pairs]) for pairs in uses.values()
    ]
    squares += [_rules.sum_of_squares(gradient) for gradient in gradients]
    return [each[0] for each in squares]

  def sums(
    self,
    cotangents: Any,
    gradients: Any,
    weight: jax.Array,
    shapes: Sequence[tuple[int, ...]],
  ) -> list[jax.Array]:
    """Returns weighted sums over the batch; zero for what is metered."""

    def of_batch(records, cotangents, gradients, weights):
      uses = _plan.uses(self.sites, records, cotangents)
      formed = dict(zip(self.formed, gradients, strict=True))
      return _plan.weighted_sums(shapes, uses, formed, weights)

    summed = _batches.reduce(of_batch, is_summed=[True] * len(shapes))
    return list(summed(self.records, cotangents, gradients, weight))


def _linearized(
  plan: _plan.Plan,
  leaves: Sequence[jax.Array],
  arguments: Any,
  zeros: Sequence[jax.Array],
  axes: frozenset[str],
) -> tuple[jax.Array, Any, _Kept]:
  """Runs one example forward.

  Returns:
    The loss; a function from its cotangent and the weight that metered uses are
    told, to the cotangents of what is kept in factors, to the gradients that are
    formed, and to those of the meters; and how to go on with what is kept.
  """
  once = metered(plan)

  def loss(
    perturbations: Sequence[jax.Array],
    formed: Sequence[jax.Array],
    meters: _trace.Meters,
  ) -> tuple[tuple[jax.Array, jax.Array], list[jax.Array]]:
    values = list(leaves)
    for index, value in zip(plan.formed, formed, strict=True):
      values[index] = value
    walk = _trace.Walk(perturbations, meters=meters, metered=once)
    values += jax.tree.leaves(arguments)
    (value,) = walk.run(plan.closed, values, plan.followed)
    return (value, _devices.vary(walk.weight, axes)), walk.records

  token = _devices.vary(jnp.zeros((), jnp.float32), axes)
  meters = _trace.Meters(token, {leaf: zeros[leaf] for leaf in once})
  perturbations = _devices.vary(plan.zeros(once), axes)
  formed = [leaves[index] for index in plan.formed]
  (value, _), pull, records = jax.vjp(
    loss, perturbations, formed, meters, has_aux=True
  )

  def rounded(cotangents: tuple[jax.Array, jax.Array]) -> Any:
    kept, gradients, meters = pull(cotangents)
    pairs = zip(gradients, plan.dtypes, strict=True)
    return kept, [gradient.astype(dtype) for gradient, dtype in pairs], meters

  sites = [site for site in plan.sites if site.leaf not in once]
  return value, rounded, _Kept(sites, plan.formed, records)
