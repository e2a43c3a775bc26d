"""Exact per-example clipping in one backward pass (book-keeping).

The loss of ONE example is traced, and each use of a parameter in a matrix
product or a lookup gets a perturbation of its result, which is zero. One
backward pass of all examples, with respect to the perturbations and with the
parameters shared, gives the cotangent of each result; together with the
recorded other operand it is the parameter's per-example gradient in factors.
Norms come from the factors, and so does the sum of the clipped gradients. The
backward pass of the shared weights themselves is never asked for.

What is neither a product nor a lookup (scales, biases, convolutions, weights
inside `scan`) is differentiated per example as it stands, which is right for
everything and cheap for small parameters; a large one is logged by name.

A norm from factors is a sum of products, so its rounding error is relative to
the largest contribution of a single position: it can matter only where
positions with contributions far above the clip norm cancel each other.
"""

import functools
import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from synthq_jax import typing
from synthq_jax.optim import _rules, _trace, _views

__all__ = ["clipped_sum"]

_log = logging.getLogger(__name__)

LARGE = 1 << 16
"""Parameters with this many entries are logged when used in an odd way."""

KEEP_RATIO = 2.0
"""A gradient is formed per example if at most this times its factors' size."""


class _Plan(NamedTuple):
  """What to do with each parameter; all lists run over flattened parameters."""

  closed: Any  # the loss of one example, as a closed jaxpr
  followed: tuple[int, ...]  # parameters whose gradient stays in factors
  formed: tuple[int, ...]  # parameters whose gradient is formed per example
  sites: tuple[_trace.Dense | _trace.Lookup, ...]  # uses of the followed ones


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
  plan = _make_plan(loss_fn, params, arguments)
  backward = jax.vmap(
    functools.partial(_one_example, plan, leaves),
    in_axes=(None, None, 0),
  )
  zeros = [jnp.zeros(s.output.shape, s.output.dtype) for s in plan.sites]
  formed = [leaves[index] for index in plan.formed]
  losses, records, cotangents, gradients = backward(zeros, formed, arguments)
  uses = _uses(plan, records, cotangents)
  squares = [
    _rules.squared_norms([use for _, use in pairs]) for pairs in uses.values()
  ]
  squares += [_sum_of_squares(gradient) for gradient in gradients]
  # Differences of nearly equal products may round to just below zero.
  norms = jnp.sqrt(jnp.maximum(sum(squares, jnp.zeros_like(losses)), 0.0))
  counted = jnp.isfinite(losses) & jnp.isfinite(norms) & ~is_padding_example
  weights = jnp.where(  # [batch]
    counted, jnp.minimum(1.0, l2_clip_norm / norms), 0.0
  )
  total = _sums(plan, leaves, uses, gradients, weights)
  return jax.tree.unflatten(structure, total), losses, norms


def _one_example(
  plan: _Plan,
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
  return value.astype(jnp.float32), records, cotangents, gradients


def _make_plan(loss_fn: Any, params: typing.Params, arguments: Any) -> _Plan:
  """Traces the loss of one example and decides what to do with each leaf."""

  def loss(params: typing.Params, arguments: Any) -> jax.Array:
    batch = jax.tree.map(lambda x: x[None], arguments[0])
    losses = loss_fn(params, batch, *arguments[1:])
    if jnp.shape(losses) != (1,):
      raise ValueError(
        "expected a loss_fn that returns losses [batch], got shape="
        f"{jnp.shape(losses)} for a batch of one: do not average over it"
      )
    return losses[0]

  example = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), arguments
  )
  closed = jax.make_jaxpr(loss)(params, example)
  paths = jax.tree_util.tree_flatten_with_path(params)[0]
  names = [jax.tree_util.keystr(path) for path, _ in paths]
  shapes = [jnp.shape(leaf) for _, leaf in paths]
  walk = _trace.Walk()
  jax.eval_shape(
    lambda *values: walk.run(closed, values, range(len(shapes))),
    *[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in closed.in_avals],
  )
  formed = tuple(
    index
    for index in range(len(shapes))
    if _must_form(index, walk, names[index], shapes[index])
  )
  return _Plan(
    closed=closed,
    followed=tuple(i for i in range(len(shapes)) if i not in formed),
    formed=formed,
    sites=tuple(site for site in walk.sites if site.leaf not in formed),
  )


def _must_form(
  leaf: int, walk: _trace.Walk, name: str, shape: tuple[int, ...]
) -> bool:
  """Says whether a parameter's gradient is to be formed for each example."""
  size = math.prod(shape)
  sites = [site for site in walk.sites if site.leaf == leaf]
  if leaf in walk.odd:
    if size >= LARGE:
      _log_formed(name, shape, f"it is used in {walk.odd[leaf]!r}")
    return True
  if not sites:
    return False
  if any(_aligned(site, sites) is None for site in sites):
    if size >= LARGE:
      _log_formed(name, shape, "its uses contract different axes")
    return True
  factors = sum(_factor_size(site) for site in sites)
  return size <= KEEP_RATIO * factors


@functools.cache
def _log_formed(name: str, shape: tuple[int, ...], reason: str) -> None:
  """Logs, once, that a large parameter costs memory."""
  _log.warning(
    "book-keeping forms the gradient of %s %s for each example: %s",
    name,
    shape,
    reason,
  )


def _factor_size(site: _trace.Dense | _trace.Lookup) -> int:
  """Returns the entries of both factors of one use, for one example."""
  if isinstance(site, _trace.Lookup):
    return site.positions * site.layout.num_columns
  groups = math.prod(size for _, size in site.layout.groups)
  width = site.layout.num_rows + site.layout.num_columns
  return groups * site.positions * width


def _reference(
  sites: Sequence[_trace.Dense | _trace.Lookup],
) -> _views.Layout:
  """Returns the layout for all uses of a parameter: a lookup's if any."""
  lookups = [site for site in sites if isinstance(site, _trace.Lookup)]
  return (lookups or list(sites))[0].layout


def _aligned(
  site: _trace.Dense | _trace.Lookup,
  sites: Sequence[_trace.Dense | _trace.Lookup],
) -> bool | None:
  """Says if a use must be transposed to align with the others; None: cannot."""
  layout = _reference(sites)
  if site.layout == layout:
    return False
  swaps = isinstance(site, _trace.Dense) and site.layout.swap() == layout
  return True if swaps else None


def _uses(
  plan: _Plan,
  records: Sequence[jax.Array],
  cotangents: Sequence[jax.Array],
) -> dict[int, list[tuple[_views.Layout, _rules.Outer | _rules.Rows]]]:
  """Collects each followed parameter's uses in its one layout."""
  uses: dict[int, list[Any]] = {}
  for site, record, cotangent in zip(
    plan.sites, records, cotangents, strict=True
  ):
    sites = [other for other in plan.sites if other.leaf == site.leaf]
    right = jax.vmap(site.columns)(cotangent)
    if isinstance(site, _trace.Lookup):
      use = _rules.Rows(record, right)
    elif _aligned(site, sites):
      use = _rules.Outer(right, record)
    else:
      use = _rules.Outer(record, right)
    uses.setdefault(site.leaf, []).append((_reference(sites), use))
  return uses


def _sum_of_squares(gradient: jax.Array) -> jax.Array:
  """Returns the sum of squares over all axes but the first, float32."""
  flat = gradient.reshape(gradient.shape[0], -1).astype(jnp.float32)
  return jnp.sum(jnp.square(flat), axis=1)


def _sums(
  plan: _Plan,
  leaves: Sequence[jax.Array],
  uses: dict[int, list[Any]],
  gradients: Sequence[jax.Array],
  weights: jax.Array,
) -> list[jax.Array]:
  """Returns the weighted sum of gradients for every parameter."""
  total = [jnp.zeros(jnp.shape(leaf), jnp.float32) for leaf in leaves]
  for leaf, pairs in uses.items():
    layout = pairs[0][0]
    shape = (
      math.prod(size for _, size in layout.groups),
      layout.num_rows,
      layout.num_columns,
    )
    summed = _rules.weighted_sum([use for _, use in pairs], weights, shape)
    total[leaf] = layout.restore(summed, jnp.shape(leaves[leaf]))
  for leaf, gradient in zip(plan.formed, gradients, strict=True):
    total[leaf] = _rules.weigh(gradient, weights)
  return total
