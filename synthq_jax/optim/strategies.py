"""Sums clipped gradients in three ways: vmap, book-keeping and ghost clipping.

All give the same numbers, up to rounding, at different cost.

Book-keeping takes one backward pass. The loss of ONE example is traced, and a
zero perturbation is added to each result of a matrix product or a lookup that
uses a parameter. One backward pass of all examples, with respect to the
perturbations and with the parameters shared, gives the cotangent of each
result. This cotangent and the recorded other operand are the factors of the
parameter's per-example gradient. Norms come from the factors, and so does the
sum of the clipped gradients. The gradient of the shared weights themselves is
never computed. Records are kept until the end, also those of a rematerialised
part.

A norm from factors is a sum of products, so its rounding error is relative to
the contributions of single positions. If these are far above the clip norm and
cancel each other, the norm could come out too small. An allowance for the
rounding is therefore added to it.

Ghost clipping takes two backward passes. The first computes norms alone: a
parameter that is used once gets a probe, which computes the squared norm of its
gradient where the backward pass has the gradient's factors. In the second pass
the same probes compute the sums of their gradients, weighted with the clip
factors. Memory holds no more than in ordinary training: rematerialised parts
and scans stay as they are, and a gradient of one example exists only while its
norm is computed.

Both passes are iterations of one loop, and so one compiled program. The second
sums bit for bit the gradients whose norms the first computed, in half precision
too, and whatever the rules of a custom derivative do with a cotangent. Sums and
their weights are float32.

A parameter that is used several times needs all its uses at once: an embedding
in encoder and decoder, or a weight that the iterations of a scan share. Its
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
  "get_plan_options",
  "get_probed",
]

KEEP_RATIOS = {"bookkeeping": 2.0, "ghost": 1 / 16}
"""Largest ratio of bytes, gradient to factors, at which a gradient is formed
for each example."""


def get_plan_options(name: str) -> dict[str, Any]:
  """Returns the options of `plans.make` for "bookkeeping" or "ghost"."""
  # Ghost clipping keeps formed gradients for all layers of a loop, but no factors:
  # forming would save work and cost the memory that ghost clipping is to save.
  return {
    "keep_ratio": KEEP_RATIOS[name],
    "saves_work": name == "bookkeeping",
  }


def _clip_by_vmap(
  loss_fn, params, arguments, is_padding_example, l2_clip_norm
) -> typing.Clipped:
  """Clips gradients that `jax.vmap` forms for each example."""
  wide, narrow = rules.widen(params)
  example_loss = plans.make_example_loss(loss_fn)

  def loss(wide: typing.Params, arguments: Any) -> jax.Array:
    return example_loss(narrow(wide), arguments).astype(jnp.float32)

  losses, gradients = jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0))(
    wide, arguments
  )
  # Norm and sum must see the same rounded values.
  gradients = jax.lax.optimization_barrier(gradients)
  leaves, structure = jax.tree.flatten(gradients)
  norms = rules.compute_norms(
    [rules.sum_of_squares(leaf) for leaf in leaves], losses
  )
  weights = rules.compute_clip_weights(
    losses, norms, is_padding_example, l2_clip_norm
  )
  total = [sums.weigh(leaf, weights) for leaf in leaves]
  return jax.tree.unflatten(structure, total), losses, norms


def _clip_by_bookkeeping(
  loss_fn, params, arguments, is_padding_example, l2_clip_norm
) -> typing.Clipped:
  """Clips in one backward pass, from gradients in factors.

  References:
    Bu et al. (2023), arXiv:2210.00038 (book-keeping).
  """
  leaves, structure = jax.tree.flatten(params)
  plan = plans.make(
    loss_fn, params, arguments, **get_plan_options("bookkeeping")
  )

  def differentiate_example(
    zeros: Sequence[jax.Array], formed: Sequence[jax.Array], arguments: Any
  ) -> tuple[jax.Array, list[jax.Array], list[jax.Array], list[jax.Array]]:
    """Returns loss, records, cotangents and formed gradients."""

    def loss(
      zeros: Sequence[jax.Array], formed: Sequence[jax.Array]
    ) -> tuple[jax.Array, list[jax.Array]]:
      tracer = trace.ParameterTracer(zeros)
      return plan.run(tracer, leaves, formed, arguments), tracer.records

    value_and_grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (value, records), (cotangents, gradients) = value_and_grad(zeros, formed)
    gradients = plan.rounded(gradients)
    return value.astype(jnp.float32), records, cotangents, gradients

  formed = [leaves[index] for index in plan.formed]
  zeros = devices.vary(plan.zeros(), devices.get_axes(leaves))
  losses, *factors = jax.vmap(differentiate_example, in_axes=(None, None, 0))(
    zeros, formed, arguments
  )
  # Norm and sum must see the same rounded values.
  records, cotangents, gradients = jax.lax.optimization_barrier(tuple(factors))
  uses = plans.collect_uses(plan.sites, records, cotangents)
  norms = rules.compute_norms(plans.compute_squares(uses, gradients), losses)
  weights = rules.compute_clip_weights(
    losses, norms, is_padding_example, l2_clip_norm
  )
  formed = dict(zip(plan.formed, gradients, strict=True))
  shapes = [jnp.shape(leaf) for leaf in leaves]
  total = plans.compute_weighted_sums(shapes, uses, formed, weights)
  return jax.tree.unflatten(structure, total), losses, norms


def _clip_by_ghost(
  loss_fn, params, arguments, is_padding_example, l2_clip_norm
) -> typing.Clipped:
  """Clips in two backward passes, with a probe for each parameter used once.

  References:
    Li et al. (2022), arXiv:2110.05679, section 4 (ghost clipping).
  """
  leaves, structure = jax.tree.flatten(params)
  plan = plans.make(loss_fn, params, arguments, **get_plan_options("ghost"))
  total, losses, norms = jax.vmap(
    functools.partial(_run_two_passes, plan, leaves, l2_clip_norm),
    out_axes=(None, 0, 0),
  )(arguments, is_padding_example)
  return jax.tree.unflatten(structure, total), losses, norms


STRATEGIES: dict[str, Callable[..., typing.Clipped]] = {
  "vmap": _clip_by_vmap,
  "bookkeeping": _clip_by_bookkeeping,
  "ghost": _clip_by_ghost,
}
"""Functions that compute clipped sums, by strategy: the same numbers at
different cost.

Arguments: the loss, `(params, batch)` or `(params, batch, key)` to losses
[batch], which is called with a batch of one example; the parameters; `(batch,)`
or `(batch, keys)`, arrays with a leading axis [batch] and one key per example;
the padding mask, bool [batch]; and the clip norm. Results: the sum of clipped
gradients (float32, the structure of the parameters), losses and norms [batch].
"""


def get_probed(plan: plans.Plan) -> frozenset[int]:
  """Returns the parameters each entry of which is used once."""
  counts = collections.Counter(site.leaf for site in plan.sites)
  shared = {site.leaf for site in plan.sites if site.is_shared}
  return frozenset(
    leaf for leaf, count in counts.items() if count == 1 and leaf not in shared
  )


def _run_two_passes(
  plan: plans.Plan,
  leaves: Sequence[jax.Array],
  l2_clip_norm: float,
  arguments: Any,
  is_padding: jax.Array,
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
  """Runs both passes: returns the batch's sum, and one example's loss and norm."""
  axes = devices.get_axes(leaves)
  shapes = [jnp.shape(leaf) for leaf in leaves]
  zeros = [jnp.zeros(shape, jnp.float32) for shape in shapes]
  zeros = devices.vary(zeros, axes)
  probed = get_probed(plan)
  rest = [i for i in range(len(leaves)) if i not in probed]
  value, pull, unprobed = _linearize_example(
    plan, leaves, arguments, zeros, axes
  )
  loss = value.astype(jnp.float32)
  unit = devices.vary(jnp.ones_like(value), axes)

  def run_pass(is_second: jax.Array, carry: Any) -> Any:
    weight, norm, _ = carry
    # Hides that the passes' cotangents are equal: the compiler would compute them
    # before the loop and keep them all.
    start, _ = jax.lax.optimization_barrier((unit, weight))
    cotangents, gradients, probe = pull((start, weight))
    # Norm and sum must see the same rounded values.
    held = jax.lax.optimization_barrier((cotangents, gradients))

    def measure() -> tuple[jax.Array, jax.Array, list[jax.Array]]:
      norm = rules.compute_norms([*unprobed.squares(*held), probe.token], loss)
      weight = rules.compute_clip_weights(loss, norm, is_padding, l2_clip_norm)
      return weight, norm, [zeros[i] for i in rest]

    def add() -> tuple[jax.Array, jax.Array, list[jax.Array]]:
      total = unprobed.sums(held[0], held[1], weight, shapes)
      return weight, norm, devices.vary([total[i] for i in rest], axes)

    weight, norm, sums = jax.lax.cond(is_second, add, measure)
    # The probes' sums, zero in the first pass, share one buffer with those of the
    # second: each copy would be as large as the parameters.
    total = dict(probe.sinks) | dict(zip(rest, sums, strict=True))
    return weight, norm, [total[i] for i in range(len(leaves))]

  norms_weight = devices.vary(jnp.full((), trace.NORMS, jnp.float32), axes)
  start = norms_weight, devices.vary(jnp.zeros((), jnp.float32), axes), zeros
  _, norm, total = jax.lax.fori_loop(0, 2, run_pass, start)
  return total, loss, norm


@dataclasses.dataclass(frozen=True)
class _Unprobed:
  """Uses in factors and formed gradients of parameters without a probe."""

  sites: Sequence[use_sites.Site]
  formed: Sequence[int]
  records: Sequence[jax.Array]

  def squares(self, cotangents: Any, gradients: Any) -> list[jax.Array]:
    """Returns the squared norms of one example's gradients."""
    records, cotangents, gradients = jax.tree.map(
      lambda x: x[None], (self.records, cotangents, gradients)
    )
    uses = plans.collect_uses(self.sites, records, cotangents)
    return [each[0] for each in plans.compute_squares(uses, gradients)]

  def sums(
    self,
    cotangents: Any,
    gradients: Any,
    weight: jax.Array,
    shapes: Sequence[tuple[int, ...]],
  ) -> list[jax.Array]:
    """Returns weighted sums over the batch; zero for parameters with a probe."""

    def sum_batch(records, cotangents, gradients, weights):
      uses = plans.collect_uses(self.sites, records, cotangents)
      formed = dict(zip(self.formed, gradients, strict=True))
      return plans.compute_weighted_sums(shapes, uses, formed, weights)

    summed = rules.reduce(sum_batch, is_summed=[True] * len(shapes))
    return list(summed(self.records, cotangents, gradients, weight))


def _linearize_example(
  plan: plans.Plan,
  leaves: Sequence[jax.Array],
  arguments: Any,
  zeros: Sequence[jax.Array],
  axes: frozenset[str],
) -> tuple[jax.Array, Any, _Unprobed]:
  """Runs one example forward.

  Returns:
    The loss, a pullback, and the uses and formed gradients without a probe. The
    pullback takes the loss's cotangent and the weight for all probes. It
    returns the cotangents of the perturbations, the formed gradients and the
    probes' results.
  """
  probed = get_probed(plan)

  def loss(
    perturbations: Sequence[jax.Array],
    formed: Sequence[jax.Array],
    probe: trace.NormProbe,
  ) -> tuple[tuple[jax.Array, jax.Array], list[jax.Array]]:
    tracer = trace.ParameterTracer(perturbations, probe=probe, probed=probed)
    value = plan.run(tracer, leaves, formed, arguments)
    return (value, devices.vary(tracer.weight, axes)), tracer.records

  token = devices.vary(jnp.zeros((), jnp.float32), axes)
  probe = trace.NormProbe(token, {leaf: zeros[leaf] for leaf in probed})
  perturbations = devices.vary(plan.zeros(probed), axes)
  formed = [leaves[index] for index in plan.formed]
  (value, _), pull, records = jax.vjp(
    loss, perturbations, formed, probe, has_aux=True
  )

  def pull_rounded(cotangents: tuple[jax.Array, jax.Array]) -> Any:
    perturbations, gradients, probe = pull(cotangents)
    return perturbations, plan.rounded(gradients), probe

  sites = [site for site in plan.sites if site.leaf not in probed]
  return value, pull_rounded, _Unprobed(sites, plan.formed, records)
