"""Jacobians of embeddings, in the factors of an encoder's gradients.

One pass back for each dimension makes all of them; any further cotangents are
then combinations, without another pass.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from synthq_jax.optim import _towers, auto

__all__ = ["combine", "make", "memory_bytes", "pays"]


def combine(rows: _towers.Factors) -> Callable[[jax.Array], _towers.Factors]:
  """Returns the function that `make` was made from, without passes back.

  Args:
    rows: the factors for each dimension, [dim, batch, ...].
  """

  def contract(row: jax.Array, cotangents: jax.Array) -> jax.Array:
    flat = row.astype(jnp.float32).reshape(*row.shape[:2], -1)
    summed = jnp.einsum(
      "kbp,bk->bp", flat, cotangents, precision=jax.lax.Precision.HIGHEST
    )
    return summed.reshape(row.shape[1:])

  return lambda cotangents: jax.tree.map(
    lambda row: contract(row, cotangents), rows
  )


def make(
  pull: Callable[[jax.Array], _towers.Factors], size: int, dim: int
) -> _towers.Factors:
  """Returns the factors for each dimension's unit vector, [dim, batch, ...]."""
  basis = jnp.broadcast_to(jnp.eye(dim)[:, None, :], (dim, size, dim))
  return jax.lax.map(pull, basis)


def pays(
  pull: Callable[[jax.Array], _towers.Factors], size: int, dim: int, passes: int
) -> bool:
  """Says whether `combine` takes less work than that many passes.

  Args:
    pull: from `linearize`.
    size: its number of examples.
    dim: of the vectors.
    passes: how many cotangents it will be given.
  """
  closed = jax.make_jaxpr(pull)(jnp.zeros((size, dim)))
  once = auto.count_products(closed.jaxpr).flops
  once += sum(_convolution_flops(e) for e in closed.jaxpr.eqns)
  contraction = 2 * dim * sum(a.size for a in closed.out_avals)
  return dim * once + passes * contraction < passes * once


def _convolution_flops(equation: Any) -> float:
  """Returns the work of a convolution, 0 for anything else."""
  if equation.primitive.name != "conv_general_dilated":
    return 0.0
  kernel = equation.invars[1].aval
  outputs = kernel.shape[equation.params["dimension_numbers"].rhs_spec[0]]
  return 2.0 * equation.outvars[0].aval.size * kernel.size / outputs


def memory_bytes(tower: _towers.Tower, size: int, dim: int) -> int:
  """Returns what `make` takes for `size` examples."""
  each = sum(math.prod(site.output.shape) for site in tower.sites)
  each += sum(tower.leaves[index].size for index in tower.formed)
  return 4 * each * size * dim
