"""Squared norms of the gradients of all pairs, from both Jacobians.

For entry p of a parameter the gradients of all similarities are one matrix
product, [J_q[p], q] [d, J_d[p]]^T: rows and columns of length 2 dim. Entry after
entry is multiplied, squared and added up, so that the Jacobians are read once
and what is written stays in cache. Nothing cancels: these are sums of squares.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

__all__ = ["squared_norms"]

_UNROLLED = 4  # products between which a sum stays where it is


def squared_norms(
  q: jax.Array,
  d: jax.Array,
  of_queries: Mapping[int, jax.Array],
  of_documents: Mapping[int, jax.Array],
) -> jax.Array:
  """Returns the squared norms over some parameters.

  Args:
    q: embeddings of queries, [query, dim].
    d: embeddings of documents, [document, dim].
    of_queries: Jacobians [dim, query, ...] by parameter; one that is missing
      is zero.
    of_documents: Jacobians [dim, document, ...], the same.

  Returns:
    float32 [query, document].
  """
  total = jnp.zeros((len(q), len(d)))
  for leaf in of_queries.keys() | of_documents.keys():
    rows = _by_entry(of_queries.get(leaf))
    columns = _by_entry(of_documents.get(leaf))

    def add(total: jax.Array, entry: tuple) -> tuple[jax.Array, None]:
      row, column = entry  # [query, dim] and [document, dim], or None
      left = [x for x in (row, None if column is None else q) if x is not None]
      right = [x for x in (None if row is None else d, column) if x is not None]
      gradients = jnp.matmul(
        jnp.concatenate(left, axis=1),
        jnp.concatenate(right, axis=1).T,
        precision=jax.lax.Precision.HIGHEST,
      )
      return total + gradients * gradients, None

    total, _ = jax.lax.scan(add, total, (rows, columns), unroll=_UNROLLED)
  return total


def _by_entry(jacobian: jax.Array | None) -> jax.Array | None:
  """Turns [dim, batch, ...] into [entry, batch, dim], float32."""
  if jacobian is None:
    return None
  dim, size = jacobian.shape[:2]
  flat = jacobian.astype(jnp.float32).reshape(dim, size, -1)
  return jnp.transpose(flat, (2, 1, 0))
