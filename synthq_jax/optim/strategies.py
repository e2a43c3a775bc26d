"""Sums clipped gradients in three ways: vmap, book-keeping and ghost clipping.

All give the same numbers, up to rounding, at different cost.

Book-keeping takes one backward pass. The loss of ONE example is traced, and each
use of a parameter in a matrix product or a lookup gets a perturbation of its
result, which is zero. One backward pass of all examples, with respect to the
perturbations and with the parameters shared, gives the cotangent of each result;
together with the recorded other operand it is the parameter's per-example
gradient in factors. Norms come from the factors, and so does the sum of the
clipped gradients. The backward pass of the shared weights themselves is never
asked for. What is recorded is kept until the end, also of a rematerialised part.

A norm from factors is a sum of products, so its rounding error is relative to
the contributions of single positions. Where these are far above the clip norm
and cancel each other, the norm could come out too small: an allowance for the
rounding is added to it.

Ghost clipping takes two backward passes. The first asks for norms alone: each
parameter that is used once is metered, so that the squared norm of its gradient
is made where the backward pass makes the gradient's factors. The second asks the
same places for the sums of their gradients, weighted with the clip factors.
Nothing but what ordinary training keeps is kept, rematerialised parts and scans
stay what they are, and no gradient of one example is in memory for longer than
its norm takes.

Both passes are two turns of one loop, so one compiled program: what is summed in
the second is bit for bit what was measured in the first, in half precision too,
and whatever the rules of a custom derivative do with a cotangent. Sums are
float32, of weights in float32.

Parameters that are used several times (an embedding in encoder and decoder, a
weight shared by the iterations of a scan) need all their uses at once: their
factors are kept, as in book-keeping, and so are gradients that are formed.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from synthq_jax import typing
from synthq_jax.optim.bookkeeping import (
  devices,
  plans,
  rules,
  sums,
  trace,
  use_sites,
)

__all__ = [
  "KEEP_RATIOS",
  "STRATEGIES",
  "metered",
  "plan_options",
]

KEEP_RATIOS = {"bookkeeping": 2.0, "ghost": 1 / 16}
"""A gradient is formed per example if at most this times its factors' bytes."""


def plan_options(name: str) -> dict[str, Any]:
  """Returns what `plans.make` is told for "bookkeeping" or "ghost"."""
  # What ghost clipping forms is kept for all layers of a loop; its factors are
  # not, so forming saves it work alone, at the price of what it is for.
  return {
    "keep_ratio": KEEP_RATIOS[name],
    "saves_work": name == "bookkeeping",
  }


def _vmap(
  loss_fn, params, arguments, is_padding_example, l2_clip_norm
) -> typing.Clipped:
  """Clips gradients that are formed for each example, as vmap makes them."""
  wide, narrow = rules.widened(params)
  loss_of_one = plans.loss_of_one(loss_fn)

  def loss(wide: typing.Params, arguments: Any) -> jax.Array:
    return loss_of_one(narrow(wide), arguments).astype(jnp.float32)

  losses, gradients = jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0))(
    wide, arguments
  )
  # One value each, for norm and sum, however it was rounded.
  gradients = jax.lax.optimization_barrier(gradients)
  leaves, structure = jax.tree.flatten(gradients)
  norms = rules.norms([rules.sum_of_squares(leaf) for leaf in leaves], losses)
  weights = rules.clip_weights(losses, norms, is_padding_example, l2_clip_norm)
  total = [sums.weigh(leaf, weights) for leaf in leaves]
  return jax.tree.unflatten(structure, total), losses, norms


def _bookkeeping(
  loss_fn, params, arguments, is_padding_example, l2_clip_norm
) -> typing.Clipped:
  """Clips in one backward pass.

  References:
    Bu et al. (2023), arXiv:2210.00038 (book-keeping).
  """
  leaves, structure = jax.tree.flatten(params)
  plan = plans.make(loss_fn, params, arguments, **plan_options("bookkeeping"))

  def one_example(
    zeros: Sequence[jax.Array], formed: Sequence[jax.Array], arguments: Any
  ) -> tuple[jax.Array, list[jax.Array], list[jax.Array], list[jax.Array]]:
    """Returns loss, records, cotangents and formed gradients."""

    def loss(
      zeros: Sequence[jax.Array], formed: Sequence[jax.Array]
    ) -> tuple[jax.Array, list[jax.Array]]:
      walk = trace.Walk(zeros)
      return plan.run(walk, leaves, formed, arguments), walk.records

    value_and_grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (value, records), (cotangents, gradients) = value_and_grad(zeros, formed)
    gradients = plan.rounded(gradients)
    return value.astype(jnp.float32), records, cotangents, gradients

  formed = [leaves[index] for index in plan.formed]
  zeros = devices.vary(plan.zeros(), devices.axes_of(leaves))
  losses, *kept = jax.vmap(one_example, in_axes=(None, None, 0))(
    zeros, formed, arguments
  )
  # One value each, for norm and sum, however it was rounded.
  records, cotangents, gradients = jax.lax.optimization_barrier(tuple(kept))
  uses = plans.uses(plan.sites, records, cotangents)
  norms = rules.norms(plans.squares(uses, gradients), losses)
  weights = rules.clip_weights(losses, norms, is_padding_example, l2_clip_norm)
  formed = dict(zip(plan.formed, gradients, strict=True))
  shapes = [jnp.shape(leaf) for leaf in leaves]
  total = plans.weighted_sums(shapes, uses, formed, weights)
  return jax.tree.unflatten(structure, total), losses, norms


def _ghost(
  loss_fn, params, arguments, is_padding_example, l2_clip_norm
) -> typing.Clipped:
  """Clips in two backward passes.

  References:
    Li et al. (2022), arXiv:2110.05679, section 4 (ghost clipping).
  """
  leaves, structure = jax.tree.flatten(params)
  plan = plans.make(loss_fn, params, arguments, **plan_options("ghost"))
  total, losses, norms = jax.vmap(
    functools.partial(_two_turns, plan, leaves, l2_clip_norm),
    out_axes=(None, 0, 0),
  )(arguments, is_padding_example)
  return jax.tree.unflatten(structure, total), losses, norms


STRATEGIES: dict[str, Callable[..., typing.Clipped]] = {
  "vmap": _vmap,
  "bookkeeping": _bookkeeping,
  "ghost": _ghost,
}
"""How clipped gradients are computed: different speed, the same numbers.

From the loss, `(params, batch)` or `(params, batch, key)` to losses [batch], which
is called with a batch of one example; the parameters; `(batch,)` or `(batch,
keys)`, arrays with a leading axis [batch] and one key per example; which examples
are padding, bool [batch]; and the clip norm: to the sum of clipped gradients
(float32, the structure of the parameters), losses and norms [batch].
"""


def metered(plan: plans.Plan) -> frozenset[int]:
  """Returns the parameters whose only use makes the whole gradient."""
  counts = collections.Counter(site.leaf for site in plan.sites)
  shared = {site.leaf for site in plan.sites if site.is_shared}
  return frozenset(
    leaf for leaf, count in counts.items() if count == 1 and leaf not in shared
  )


def _two_turns(
  plan: plans.Plan,
  leaves: Sequence[jax.Array],
  l2_clip_norm: float,
  arguments: Any,
  is_padding: jax.Array,
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
  """Returns the whole batch's sum, and the loss and norm of one example."""
  axes = devices.axes_of(leaves)
  shapes = [jnp.shape(leaf) for leaf in leaves]
  nothing = [jnp.zeros(shape, jnp.float32) for shape in shapes]
  nothing = devices.vary(nothing, axes)
  once = metered(plan)
  rest = [i for i in range(len(leaves)) if i not in once]
  value, pull, kept = _linearized(plan, leaves, arguments, nothing, axes)
  loss = value.astype(jnp.float32)
  one = devices.vary(jnp.ones_like(value), axes)

  def turn(is_second: jax.Array, carry: Any) -> Any:
    weight, norm, _ = carry
    # Hides that the turns' cotangents are equal: the compiler would make them
    # before the loop and keep them all.
    start, _ = jax.lax.optimization_barrier((one, weight))
    cotangents, gradients, meters = pull((start, weight))
    # One value each, for norm and sum, however it was rounded.
    held = jax.lax.optimization_barrier((cotangents, gradients))

    def measure() -> tuple[jax.Array, jax.Array, list[jax.Array]]:
      norm = rules.norms([*kept.squares(*held), meters.token], loss)
      weight = rules.clip_weights(loss, norm, is_padding, l2_clip_norm)
      return weight, norm, [nothing[i] for i in rest]

    def add() -> tuple[jax.Array, jax.Array, list[jax.Array]]:
      total = kept.sums(held[0], held[1], weight, shapes)
      return weight, norm, devices.vary([total[i] for i in rest], axes)

    weight, norm, sums = jax.lax.cond(is_second, add, measure)
    # Those of metered uses are zeros in the first turn, and have no other place:
    # each copy of them would be as large as the parameters.
    total = dict(meters.sinks) | dict(zip(rest, sums, strict=True))
    return weight, norm, [total[i] for i in range(len(leaves))]

  asking = devices.vary(jnp.full((), trace.NORMS, jnp.float32), axes)
  start = asking, devices.vary(jnp.zeros((), jnp.float32), axes), nothing
  _, norm, total = jax.lax.fori_loop(0, 2, turn, start)
  return total, loss, norm


@dataclasses.dataclass(frozen=True)
class _Kept:
  """What is not metered: uses in factors, and gradients that are formed."""

  sites: Sequence[use_sites.Site]
  formed: Sequence[int]
  records: Sequence[jax.Array]

  def squares(self, cotangents: Any, gradients: Any) -> list[jax.Array]:
    """Returns the squared norms of one example's gradients."""
    records, cotangents, gradients = jax.tree.map(
      lambda x: x[None], (self.records, cotangents, gradients)
    )
    uses = plans.uses(self.sites, records, cotangents)
    return [each[0] for each in plans.squares(uses, gradients)]

  def sums(
    self,
    cotangents: Any,
    gradients: Any,
    weight: jax.Array,
    shapes: Sequence[tuple[int, ...]],
  ) -> list[jax.Array]:
    """Returns weighted sums over the batch; zero for what is metered."""

    def of_batch(records, cotangents, gradients, weights):
      uses = plans.uses(self.sites, records, cotangents)
      formed = dict(zip(self.formed, gradients, strict=True))
      return plans.weighted_sums(shapes, uses, formed, weights)

    summed = rules.reduce(of_batch, is_summed=[True] * len(shapes))
    return list(summed(self.records, cotangents, gradients, weight))


def _linearized(
  plan: plans.Plan,
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
    meters: trace.Meters,
  ) -> tuple[tuple[jax.Array, jax.Array], list[jax.Array]]:
    walk = trace.Walk(perturbations, meters=meters, metered=once)
    value = plan.run(walk, leaves, formed, arguments)
    return (value, devices.vary(walk.weight, axes)), walk.records

  token = devices.vary(jnp.zeros((), jnp.float32), axes)
  meters = trace.Meters(token, {leaf: zeros[leaf] for leaf in once})
  perturbations = devices.vary(plan.zeros(once), axes)
  formed = [leaves[index] for index in plan.formed]
  (value, _), pull, records = jax.vjp(
    loss, perturbations, formed, meters, has_aux=True
  )

  def rounded(cotangents: tuple[jax.Array, jax.Array]) -> Any:
    kept, gradients, meters = pull(cotangents)
    return kept, plan.rounded(gradients), meters

  sites = [site for site in plan.sites if site.leaf not in once]
  return value, rounded, _Kept(sites, plan.formed, records)
