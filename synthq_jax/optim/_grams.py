"""Norms of J^T v for many v, from the Gram matrix J J^T of each example.

One pass back for each dimension gives the rows of an example's Jacobian in
factors. Their Gram matrix [dim, dim] holds every |J^T v|^2 = v^T (J J^T) v, so
that the number of vectors v costs next to nothing.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from synthq_jax.optim import _jacobians, _plan, _rules, _sites, _towers

__all__ = ["norms"]

_EXACT = jax.lax.Precision.HIGHEST

# A quadratic form cancels where v is close to a vector that J^T takes to zero,
# as the embedding itself is for cosines. So units in the last place of what is
# summed are added: for factors those of `_rules`; for gradients that are formed,
# whose inner products are long sums of squares, 16 were enough (measured).
_FORMED_UNITS = 16


def norms(
  tower: _towers.Tower, examples: Any, others: jax.Array, memory_bytes: int
) -> jax.Array:
  """Returns |J^T v| for all examples and vectors.

  Args:
    tower: the encoder.
    examples: arrays with a leading axis [batch].
    others: the vectors v, [other, dim].
    memory_bytes: what the Jacobians of the examples taken at once may take.

  Returns:
    float32 [batch, other]; too large where rounding might make it too small,
    by about 1e-3 of the Jacobian's norm where the product nearly vanishes.
  """
  size, dim = jax.tree.leaves(examples)[0].shape[0], others.shape[1]
  each = max(1, _jacobians.memory_bytes(tower, 1, dim))
  block = int(min(size, max(1, memory_bytes // each)))

  def of_one(example: Any) -> jax.Array:
    one = jax.tree.map(lambda x: x[None], example)
    _, records, pull = _towers.linearize(tower, one)
    gram, errors = _gram(tower, records, _jacobians.make(pull, 1, dim), dim)
    squares = jnp.einsum("vk,kl,vl->v", others, gram, others, precision=_EXACT)
    summed = jnp.abs(others) @ jnp.sqrt(errors)
    return jnp.sqrt(jnp.maximum(squares, 0.0) + summed**2)

  return jax.lax.map(of_one, examples, batch_size=block)


def _gram(
  tower: _towers.Tower,
  records: list[jax.Array],
  rows: _towers.Factors,
  dim: int,
) -> tuple[jax.Array, jax.Array]:
  """Returns J J^T [dim, dim], and [dim] the rounding error of its diagonal."""
  gram, errors = jnp.zeros((dim, dim)), jnp.zeros(dim)
  flat = [row.astype(jnp.float32).reshape(dim, -1) for row in rows.formed]
  for leaf in tower.followed:
    own = [i for i, site in enumerate(tower.sites) if site.leaf == leaf]
    if not own:
      continue
    sites = [tower.sites[i] for i in own]
    lefts = [records[i][0] for i in own]
    cotangents = [rows.cotangents[i][:, 0] for i in own]
    if _plan.must_swap(sites) or _is_long(sites):
      flat.append(_formed(sites, lefts, cotangents, dim))
      continue
    uses = [
      (site, left, _rights(site, cotangent, dim))
      for site, left, cotangent in zip(sites, lefts, cotangents, strict=True)
    ]
    errors += _rules.UNIT * max(map(_units, uses)) * _lengths(uses) ** 2
    for number, use in enumerate(uses):
      gram += _product(_kernel(use, use), use[2], use[2])
      for other in uses[number + 1 :]:
        cross = _product(_kernel(use, other), use[2], other[2])
        gram += cross + cross.T
  for row in flat:
    gram += jnp.matmul(row, row.T, precision=_EXACT)
  errors += _FORMED_UNITS * _rules.UNIT * jnp.diagonal(gram)
  return gram, errors


def _is_long(sites: list[_sites.Site]) -> bool:
  """Whether products have so many positions that the gradient is smaller."""
  return any(
    not site.is_lookup and site.positions > site.layout.num_rows
    for site in sites
  )


def _formed(
  sites: list[_sites.Site],
  lefts: list[jax.Array],
  cotangents: list[jax.Array],
  dim: int,
) -> jax.Array:
  """Returns one parameter's rows of the Jacobian, [dim, entries]."""
  records = [left[None] for left in lefts]

  def row(cotangents: list[jax.Array]) -> jax.Array:
    expanded = [cotangent[None] for cotangent in cotangents]
    (pairs,) = _plan.uses(sites, records, expanded).values()
    layout = pairs[0][0]
    groups = math.prod(size for _, size in layout.groups)
    shape = (groups, layout.num_rows, layout.num_columns)
    return _rules.weighted_sum([use for _, use in pairs], jnp.ones(1), shape)

  return jax.vmap(row)(cotangents).reshape(dim, -1)


_Use = tuple[_sites.Site, jax.Array, jax.Array]


def _rights(site: _sites.Site, cotangents: jax.Array, dim: int) -> jax.Array:
  """Returns the factors that depend on the dimension, [dim, groups, s, c]."""
  rights = jax.vmap(site.columns)(cotangents).astype(jnp.float32)
  return rights.reshape(dim, -1, *rights.shape[-2:])


def _units(use: _Use) -> int:
  """Returns the rounding error of a use's inner products, in units."""
  groups, positions, rows, columns = _plan.matrices(use[0])
  return rows + columns + 2 * positions + groups + 4


def _lengths(uses: list[_Use]) -> jax.Array:
  """Returns the summed lengths of all positions' contributions, [dim]."""
  total = 0.0
  for site, left, right in uses:
    lengths = _rules.lengths(right)  # [dim, groups, s]
    if not site.is_lookup:
      lengths *= _rules.lengths(left)[None]
    total += jnp.sum(lengths, axis=(1, 2))
  return total


def _kernel(a: _Use, b: _Use) -> jax.Array:
  """Returns the inner products of the other factors, [groups, s, t]."""
  if a[0].is_lookup and b[0].is_lookup:
    equal = (a[1][:, None] == b[1][None, :]) & (a[1] >= 0)[:, None]
    return equal.astype(jnp.float32)[None]
  if b[0].is_lookup:
    found = a[1][0][:, jnp.maximum(b[1], 0)]
    return jnp.where((b[1] >= 0)[None, :], found, 0.0)[None]
  if a[0].is_lookup:
    return jnp.swapaxes(_kernel(b, a), 1, 2)
  return jnp.einsum(
    "gsr,gtr->gst", a[1], b[1], precision=_EXACT,
    preferred_element_type=jnp.float32,
  )  # fmt: skip


def _product(kernel: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns sum_{g,s,t} kernel[g,s,t] <a[k,g,s], b[l,g,t]> for all k, l."""
  moved = jnp.einsum("gst,lgtc->lgsc", kernel, b, precision=_EXACT)
  return jnp.matmul(
    a.reshape(len(a), -1), moved.reshape(len(b), -1).T, precision=_EXACT
  )
