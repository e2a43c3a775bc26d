"""Norms of the gradients of all similarities of a batch.

The gradient of S_ij = <q_i, d_j> is J_qi^T d_j + J_dj^T q_i, with J_q and J_d the
Jacobians of the embeddings with respect to all parameters. Where the encoders
share parameters, its squared norm has the cross term
2 <J_qi^T d_j, J_dj^T q_i>, which no Gram matrix of one example holds.

All pairs (i, i + shift) take one pass back through both encoders, with rows and
columns as in an ordinary batch: a pass for each of the n shifts. Where dim is
less than n, memory allows and it takes less work, there is a pass for each
dimension instead: what is formed of the Jacobians is then multiplied for all
pairs at once, what stays in factors is combined shift by shift. No array has an
axis for pairs and one for parameters.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from synthq_jax.optim import _grams, _jacobians, _pair_products, _towers

__all__ = ["bound", "exact", "of_one_encoder"]


def exact(
  towers: _towers.Towers,
  queries: Any,
  documents: Any,
  *,
  memory_bytes: int,
  microbatch_size: int | None = None,
) -> jax.Array:
  """Returns the norms of the gradients of all similarities.

  Args:
    towers: both encoders.
    queries: arrays with a leading axis [query].
    documents: arrays with a leading axis [document].
    memory_bytes: what Jacobians may take.
    microbatch_size: queries, and documents, taken at once; all pairs of blocks
      are gone through. None: all.

  Returns:
    float32 [query, document].
  """
  if towers.are_disjoint:
    return jnp.hypot(*_both(towers, queries, documents, memory_bytes))
  n, m = (jax.tree.leaves(x)[0].shape[0] for x in (queries, documents))
  block = functools.partial(_exact_block, towers, memory_bytes)
  size = microbatch_size
  if size is None or size >= m:
    return block(queries, documents)
  query_blocks = _towers.split(queries, n, min(size, n))
  document_blocks = _towers.split(documents, m, size)
  norms = jax.lax.map(
    lambda q: jax.lax.map(lambda d: block(q, d), document_blocks), query_blocks
  )  # [query block, document block, query, document]
  swapped = jnp.swapaxes(norms, 1, 2)
  return swapped.reshape(-1, norms.shape[1] * norms.shape[3])[:n, :m]


class _Side(NamedTuple):
  """One encoder and all its examples."""

  tower: _towers.Tower
  vectors: jax.Array  # [batch, dim]
  records: list[jax.Array]
  pull: Callable[[jax.Array], _towers.Factors]


def _exact_block(
  towers: _towers.Towers, memory_bytes: int, queries: Any, documents: Any
) -> jax.Array:
  """Returns the norms for queries and documents that are taken at once."""
  query = _Side(towers.query, *_towers.linearize(towers.query, queries))
  document = _Side(
    towers.document, *_towers.linearize(towers.document, documents)
  )
  sides = query, document
  (n, dim), m = query.vectors.shape, len(document.vectors)
  needed = sum(
    _jacobians.memory_bytes(side.tower, len(side.vectors), dim)
    for side in sides
  )
  squares = jnp.zeros((n, m))
  if dim < max(n, m) and needed <= memory_bytes:
    pays = [
      _jacobians.pays(side.pull, len(side.vectors), dim, max(n, m))
      for side in sides
    ]
    rows = [
      _jacobians.make(side.pull, len(side.vectors), dim) if pay else None
      for side, pay in zip(sides, pays, strict=True)
    ]
    if all(pays):
      squares = _pair_products.squared_norms(
        query.vectors,
        document.vectors,
        *[
          dict(zip(side.tower.formed, row.formed, strict=True))
          for side, row in zip(sides, rows, strict=True)
        ],
      )
      sides = [
        side._replace(tower=side.tower._replace(formed=())) for side in sides
      ]
      rows = [row._replace(formed=[]) for row in rows]
    query, document = (
      side if row is None else side._replace(pull=_jacobians.combine(row))
      for side, row in zip(sides, rows, strict=True)
    )
  squares += _by_shifts(query, document)
  return jnp.sqrt(jnp.maximum(squares, 0.0))


def _by_shifts(query: _Side, document: _Side) -> jax.Array:
  """Returns squared norms, with a pass through both encoders for each shift."""
  q, d = query.vectors, document.vectors
  n, m = len(q), len(d)
  shifts = max(n, m)

  def of_shift(shift: jax.Array) -> jax.Array:
    columns = (jnp.arange(n) + shift) % shifts  # the document of each query
    rows = (jnp.arange(m) - shift) % shifts  # the query of each document
    columns = jnp.minimum(columns, m - 1)  # beyond the last there is none
    own = jnp.where((rows < n)[:, None], q[jnp.minimum(rows, n - 1)], 0.0)
    found, records = jax.tree.map(
      lambda x: x[columns], (document.pull(own), document.records)
    )
    return _towers.squared_norms(
      [
        (query.tower, query.records, query.pull(d[columns])),
        (document.tower, records, found),
      ],
      n,
    )

  squares = jax.lax.map(of_shift, jnp.arange(shifts))  # [shift, query]
  return _unshifted(squares)[:, :m]


def bound(
  towers: _towers.Towers, queries: Any, documents: Any, *, memory_bytes: int
) -> jax.Array:
  """Returns |J_q^T d| + |J_d^T q|, at least the norm of each gradient.

  Args:
    towers: both encoders.
    queries: arrays with a leading axis [query].
    documents: arrays with a leading axis [document].
    memory_bytes: what Jacobians may take.

  Returns:
    float32 [query, document].
  """
  return jnp.add(*_both(towers, queries, documents, memory_bytes))


def _both(
  towers: _towers.Towers, queries: Any, documents: Any, memory_bytes: int
) -> tuple[jax.Array, jax.Array]:
  """Returns |J_q^T d| and |J_d^T q|, [query, document] each."""
  q = _towers.vectors(towers.query, queries)
  d = _towers.vectors(towers.document, documents)
  of_queries = of_one_encoder(towers.query, queries, d, memory_bytes)
  of_documents = of_one_encoder(towers.document, documents, q, memory_bytes)
  return of_queries, of_documents.T


def of_one_encoder(
  tower: _towers.Tower, examples: Any, others: jax.Array, memory_bytes: int
) -> jax.Array:
  """Returns |J^T v| for all examples and other vectors.

  Args:
    tower: the encoder.
    examples: arrays with a leading axis [batch].
    others: vectors [other, dim].
    memory_bytes: what Jacobians may take.

  Returns:
    float32 [batch, other]; at most as much too large as rounding allows.
  """
  if others.shape[1] < others.shape[0]:
    return _grams.norms(tower, examples, others, memory_bytes)
  size = jax.tree.leaves(examples)[0].shape[0]
  _, records, pull = _towers.linearize(tower, examples)

  def of_shift(shift: jax.Array) -> jax.Array:
    columns = (jnp.arange(size) + shift) % len(others)
    return _towers.squared_norms(
      [(tower, records, pull(others[columns]))], size
    )

  squares = jax.lax.map(of_shift, jnp.arange(len(others)))
  return jnp.sqrt(jnp.maximum(_unshifted(squares), 0.0))


def _unshifted(squares: jax.Array) -> jax.Array:
  """Turns [shift, query] into [query, document]."""
  shifts, size = squares.shape
  rows = jnp.arange(size)[:, None]
  return squares[(jnp.arange(shifts)[None, :] - rows) % shifts, rows]
