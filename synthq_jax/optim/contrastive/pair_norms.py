"""Computes the norms of the gradients of all similarities of a batch.

The gradient of S_ij = <q_i, d_j> is J_qi^T d_j + J_dj^T q_i, with J_q and J_d
the Jacobians of the embeddings with respect to all parameters. Where the
encoders share parameters, its squared norm has the cross term
2 <J_qi^T d_j, J_dj^T q_i>, which no Gram matrix of one example holds.

All pairs (i, i + shift) take one backward pass through both encoders, with rows
and columns as in an ordinary batch: a pass for each of the n shifts. If dim is
less than n, memory allows and it takes less work, there is a pass for each
dimension instead. Formed parts of the Jacobians are then multiplied for all
pairs at once, and factors are combined shift by shift. No array has an axis for
pairs and one for parameters.

If the encoders share no parameter, one backward pass for each dimension gives
the rows of an example's Jacobian in factors. Their Gram matrix [dim, dim] holds
every `|J^T v|^2 = v^T (J J^T) v`, so that more vectors v cost next to nothing.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from synthq_jax.optim.bookkeeping import jaxprs, plans, rules, use_sites
from synthq_jax.optim.contrastive import encoders, shares

__all__ = [
  "bound",
  "choose_block_size",
  "combine",
  "combining_pays",
  "compute_encoder_norms",
  "compute_exact",
  "compute_jacobians",
  "compute_squared_products",
  "estimate_allowance",
]

_EXACT = jax.lax.Precision.HIGHEST
_UNROLLED = 4  # unrolled products, between which the sum stays in place

# A quadratic form cancels if v is close to a vector that J^T maps to zero, as the
# embedding itself is for cosines. So units in the last place of the terms are
# added: for factors those of `rules`; for formed gradients, whose inner products
# are long sums of squares, 16 were enough (measured).
_FORMED_UNITS = 16
_DIRECTIONS = 4


def compute_exact(
  towers: encoders.Towers,
  queries: Any,
  documents: Any,
  *,
  memory_bytes: int,
  microbatch_size: int | None = None,
  share: shares.Share = shares.ONE_DEVICE,
) -> jax.Array:
  """Returns the norms of the gradients of all similarities.

  Args:
    towers: both encoders.
    queries: arrays with a leading axis [query].
    documents: arrays with a leading axis [document].
    memory_bytes: largest size of Jacobians.
    microbatch_size: queries, and documents, processed at once, over all pairs
      of blocks. None: all.
    share: the share of both that the device works on.

  Returns:
    float32 [query, document].
  """
  if towers.are_disjoint:
    return jnp.hypot(
      *_compute_both_norms(towers, queries, documents, memory_bytes, share)
    )
  n, m = (jax.tree.leaves(x)[0].shape[0] for x in (queries, documents))
  block = functools.partial(_compute_block, memory_bytes)
  size = microbatch_size
  own, held = share.take(queries), share.take(documents)
  if size is None or size >= share.count(m):
    query = _make_side(towers.query, own)
    norms = share.map_ring(
      lambda held: block(query, _Side(towers.document, *held)),
      _make_side(towers.document, held)[1:],
    )
  else:
    norms = share.map_ring(
      functools.partial(_compute_in_blocks, towers, block, size, own), held
    )
  return share.gather(norms[:, :m], n)


def _compute_in_blocks(
  towers: encoders.Towers,
  block: Callable[..., jax.Array],
  size: int,
  queries: Any,
  documents: Any,
) -> jax.Array:
  """Returns the norms of all pairs, with `size` examples of each side in memory."""
  n, m = (jax.tree.leaves(x)[0].shape[0] for x in (queries, documents))
  query_blocks = encoders.split(queries, n, min(size, n))
  document_blocks = encoders.split(documents, m, size)
  norms = jax.lax.map(
    lambda q: jax.lax.map(
      lambda d: block(
        _make_side(towers.query, q), _make_side(towers.document, d)
      ),
      document_blocks,
    ),
    query_blocks,
  )  # [query block, document block, query, document]
  swapped = jnp.swapaxes(norms, 1, 2)
  return swapped.reshape(-1, norms.shape[1] * norms.shape[3])[:n, :m]


class _Side(NamedTuple):
  """One encoder and all its examples."""

  tower: encoders.Tower
  vectors: jax.Array  # [batch, dim]
  records: list[jax.Array]
  pull: Callable[[jax.Array], encoders.Factors]


def _make_side(tower: encoders.Tower, examples: Any) -> _Side:
  return _Side(tower, *encoders.linearize(tower, examples))


def _compute_block(
  memory_bytes: int, query: _Side, document: _Side
) -> jax.Array:
  """Returns the norms of queries and documents that are processed at once."""
  sides = query, document
  (n, dim), m = query.vectors.shape, len(document.vectors)
  needed = sum(
    _count_jacobian_bytes(side.tower, len(side.vectors), dim) for side in sides
  )
  squares = jnp.zeros((n, m))
  if dim < max(n, m) and needed <= memory_bytes:
    pays = [
      combining_pays(side.pull, len(side.vectors), dim, max(n, m))
      for side in sides
    ]
    rows = [
      compute_jacobians(side.pull, len(side.vectors), dim) if pay else None
      for side, pay in zip(sides, pays, strict=True)
    ]
    paid = [row for row in rows if row is not None]
    if len(paid) == len(sides):
      squares = compute_squared_products(
        query.vectors,
        document.vectors,
        *[
          dict(zip(side.tower.plan.formed, row.formed, strict=True))
          for side, row in zip(sides, paid, strict=True)
        ],
      )
      sides = [
        side._replace(
          tower=side.tower._replace(plan=side.tower.plan._replace(formed=()))
        )
        for side in sides
      ]
      rows = [row._replace(formed=[]) for row in paid]
    query, document = (
      side if row is None else side._replace(pull=combine(row))
      for side, row in zip(sides, rows, strict=True)
    )
  squares += _compute_by_shifts(query, document)
  return jnp.sqrt(jnp.maximum(squares, 0.0))


def _compute_by_shifts(query: _Side, document: _Side) -> jax.Array:
  """Returns squared norms, with a pass through both encoders for each shift."""
  q, d = query.vectors, document.vectors
  n, m = len(q), len(d)
  shifts = max(n, m)

  def compute_shift(shift: jax.Array) -> jax.Array:
    columns = (jnp.arange(n) + shift) % shifts  # the document of each query
    rows = (jnp.arange(m) - shift) % shifts  # the query of each document
    columns = jnp.minimum(columns, m - 1)  # beyond the last there is none
    own = jnp.where((rows < n)[:, None], q[jnp.minimum(rows, n - 1)], 0.0)
    factors, records = jax.tree.map(
      lambda x: x[columns], (document.pull(own), document.records)
    )
    return encoders.compute_squared_norms(
      [
        (query.tower, query.records, query.pull(d[columns])),
        (document.tower, records, factors),
      ],
      n,
    )

  squares = jax.lax.map(compute_shift, jnp.arange(shifts))  # [shift, query]
  return _undo_shifts(squares)[:, :m]


def bound(
  towers: encoders.Towers,
  queries: Any,
  documents: Any,
  *,
  memory_bytes: int,
  share: shares.Share = shares.ONE_DEVICE,
) -> jax.Array:
  """Returns `|J_q^T d| + |J_d^T q|`, at least the norm of each gradient.

  Args:
    towers, queries, documents, memory_bytes, share: as in `compute_exact`.

  Returns:
    float32 [query, document].
  """
  return jnp.add(
    *_compute_both_norms(towers, queries, documents, memory_bytes, share)
  )


def _compute_both_norms(
  towers: encoders.Towers,
  queries: Any,
  documents: Any,
  memory_bytes: int,
  share: shares.Share,
) -> tuple[jax.Array, jax.Array]:
  """Returns |J_q^T d| and |J_d^T q|, [query, document] each."""

  def vectors(tower: encoders.Tower, examples: Any) -> jax.Array:
    return share.map(lambda own: encoders.linearize(tower, own)[0], examples)

  def norms(tower: encoders.Tower, examples: Any, others: Any) -> jax.Array:
    return share.map(
      lambda own: compute_encoder_norms(tower, own, others, memory_bytes),
      examples,
    )

  q, d = vectors(towers.query, queries), vectors(towers.document, documents)
  document_norms = norms(towers.document, documents, q)
  return norms(towers.query, queries, d), document_norms.T


def choose_block_size(
  tower: encoders.Tower,
  size: int,
  microbatch_size: int | None,
  memory_bytes: int,
) -> int:
  """Returns the number of examples in a backward pass; fewer if it forms gradients.

  Args:
    tower: the encoder.
    size: number of all examples.
    microbatch_size: largest number at once; None: no such limit.
    memory_bytes: largest size of the gradients that are formed for each
      example.
  """
  each = 4 * sum(tower.leaves[index].size for index in tower.plan.formed)
  most = memory_bytes // each if each else size
  return max(1, min(size, microbatch_size or size, most))


def estimate_allowance(
  tower: encoders.Tower,
  examples: Any,
  dim: int,
  *,
  memory_bytes: int,
  microbatch_size: int | None = None,
) -> jax.Array:
  """Estimates the squared rounding error of each example's backward passes.

  A backward pass rounds by units of its Jacobian J, even if the exact result
  vanishes, as that of a cosine does along the vector itself. The allowance is
  sixteen units of `|J|^2`, which is the mean of `|J^T v|^2` over random
  directions v. Four fixed and public directions estimate it. An encoder that is
  made to hide from all four would succeed.

  Args:
    tower: the encoder.
    examples: arrays with a leading axis [batch].
    dim: length of the vectors.
    memory_bytes: largest size of the gradients that are formed for each
      example.
    microbatch_size: examples at once; None: as many as `memory_bytes` allows.

  Returns:
    float32 [batch].
  """
  directions = jax.random.normal(jax.random.key(0), (_DIRECTIONS, dim))
  size = jax.tree.leaves(examples)[0].shape[0]
  block = choose_block_size(tower, size, microbatch_size, memory_bytes)

  def measure_block(examples: Any) -> jax.Array:
    _, records, pull = encoders.linearize(tower, examples)

    def measure_direction(direction: jax.Array) -> jax.Array:
      cotangents = jnp.broadcast_to(direction, (block, dim))
      part = tower, records, pull(cotangents)
      return encoders.compute_squared_norms([part], block)

    return jnp.mean(jax.lax.map(measure_direction, directions), axis=0)

  blocks = encoders.split(examples, size, block)
  squares = jax.lax.map(measure_block, blocks).reshape(-1)[:size]
  return _FORMED_UNITS * rules.UNIT * squares


def compute_encoder_norms(
  tower: encoders.Tower, examples: Any, others: jax.Array, memory_bytes: int
) -> jax.Array:
  """Returns `|J^T v|` for all examples and other vectors.

  Args:
    tower: the encoder.
    examples: arrays with a leading axis [batch].
    others: vectors [other, dim].
    memory_bytes: largest size of Jacobians.

  Returns:
    float32 [batch, other], too large by no more than an allowance for rounding.
  """
  if others.shape[1] < others.shape[0]:
    return _compute_gram_norms(tower, examples, others, memory_bytes)
  size = jax.tree.leaves(examples)[0].shape[0]
  _, records, pull = encoders.linearize(tower, examples)

  def compute_shift(shift: jax.Array) -> jax.Array:
    columns = (jnp.arange(size) + shift) % len(others)
    return encoders.compute_squared_norms(
      [(tower, records, pull(others[columns]))], size
    )

  squares = jax.lax.map(compute_shift, jnp.arange(len(others)))
  return jnp.sqrt(jnp.maximum(_undo_shifts(squares), 0.0))


def _undo_shifts(squares: jax.Array) -> jax.Array:
  """Rearranges [shift, query] to [query, document]."""
  shifts, size = squares.shape
  rows = jnp.arange(size)[:, None]
  return squares[(jnp.arange(shifts)[None, :] - rows) % shifts, rows]


def compute_squared_products(
  q: jax.Array,
  d: jax.Array,
  query_jacobians: Mapping[int, jax.Array],
  document_jacobians: Mapping[int, jax.Array],
) -> jax.Array:
  """Returns the squared norms over some parameters, from both Jacobians.

  For entry p of a parameter the gradients of all similarities are one matrix
  product, [J_q[p], q] [d, J_d[p]]^T: rows and columns of length 2 dim. Entry
  after entry is multiplied, squared and added up, so that the Jacobians are
  read once and the products stay in cache. Nothing cancels: these are sums of
  squares.

  Jacobians are [dim, query, ...] and [dim, document, ...] by parameter; a
  missing Jacobian is zero.
  """
  total = jnp.zeros((len(q), len(d)))
  for leaf in query_jacobians.keys() | document_jacobians.keys():
    rows = _split_entries(query_jacobians.get(leaf))
    columns = _split_entries(document_jacobians.get(leaf))

    def add(total: jax.Array, entry: tuple) -> tuple[jax.Array, None]:
      row, column = entry  # [query, dim] and [document, dim], or None
      left = [x for x in (row, None if column is None else q) if x is not None]
      right = [x for x in (None if row is None else d, column) if x is not None]
      gradients = jnp.matmul(
        jnp.concatenate(left, axis=1),
        jnp.concatenate(right, axis=1).T,
        precision=_EXACT,
      )
      return total + gradients * gradients, None

    total, _ = jax.lax.scan(add, total, (rows, columns), unroll=_UNROLLED)
  return total


def _split_entries(jacobian: jax.Array | None) -> jax.Array | None:
  """Rearranges [dim, batch, ...] to [entry, batch, dim], float32."""
  if jacobian is None:
    return None
  dim, size = jacobian.shape[:2]
  flat = jacobian.astype(jnp.float32).reshape(dim, size, -1)
  return jnp.transpose(flat, (2, 1, 0))


def combine(rows: encoders.Factors) -> Callable[[jax.Array], encoders.Factors]:
  """Makes a pullback from Jacobians, which takes no further backward passes.

  Args:
    rows: the factors for each dimension, [dim, batch, ...].
  """

  def contract(row: jax.Array, cotangents: jax.Array) -> jax.Array:
    flat = row.astype(jnp.float32).reshape(*row.shape[:2], -1)
    summed = jnp.einsum("kbp,bk->bp", flat, cotangents, precision=_EXACT)
    return summed.reshape(row.shape[1:])

  return lambda cotangents: jax.tree.map(
    lambda row: contract(row, cotangents), rows
  )


def compute_jacobians(
  pull: Callable[[jax.Array], encoders.Factors], size: int, dim: int
) -> encoders.Factors:
  """Returns the factors for each dimension's unit vector, [dim, batch, ...]."""
  basis = jnp.broadcast_to(jnp.eye(dim)[:, None, :], (dim, size, dim))
  return jax.lax.map(pull, basis)


def combining_pays(
  pull: Callable[[jax.Array], encoders.Factors],
  size: int,
  dim: int,
  passes: int,
) -> bool:
  """Checks whether `combine` takes less work than that many backward passes.

  Args:
    pull: from `linearize`.
    size: its number of examples.
    dim: length of the vectors.
    passes: number of backward passes, one for each array of cotangents.
  """
  closed: Any = jax.make_jaxpr(pull)(jnp.zeros((size, dim)))
  once = jaxprs.count_products(closed.jaxpr).flops
  contraction = 2 * dim * sum(a.size for a in closed.out_avals)
  return dim * once + passes * contraction < passes * once


def _count_jacobian_bytes(tower: encoders.Tower, size: int, dim: int) -> int:
  """Returns the bytes of `compute_jacobians` for `size` examples."""
  each = sum(math.prod(site.output.shape) for site in tower.plan.sites)
  each += sum(tower.leaves[index].size for index in tower.plan.formed)
  return 4 * each * size * dim


def _compute_gram_norms(
  tower: encoders.Tower, examples: Any, others: jax.Array, memory_bytes: int
) -> jax.Array:
  """Computes the norms of `compute_encoder_norms` from Gram matrices.

  An allowance for rounding makes norms too large rather than too small: by
  about 1e-3 of the Jacobian's norm if the product nearly vanishes.
  """
  size, dim = jax.tree.leaves(examples)[0].shape[0], others.shape[1]
  each = max(1, _count_jacobian_bytes(tower, 1, dim))
  block = int(min(size, max(1, memory_bytes // each)))

  def compute_one(example: Any) -> jax.Array:
    batch = jax.tree.map(lambda x: x[None], example)
    _, records, pull = encoders.linearize(tower, batch)
    gram, errors = _compute_gram(
      tower, records, compute_jacobians(pull, 1, dim), dim
    )
    squares = jnp.einsum("vk,kl,vl->v", others, gram, others, precision=_EXACT)
    summed = jnp.abs(others) @ jnp.sqrt(errors)
    return jnp.sqrt(jnp.maximum(squares, 0.0) + summed**2)

  return jax.lax.map(compute_one, examples, batch_size=block)


def _compute_gram(
  tower: encoders.Tower,
  records: list[jax.Array],
  rows: encoders.Factors,
  dim: int,
) -> tuple[jax.Array, jax.Array]:
  """Returns J J^T [dim, dim], and the rounding error of its diagonal [dim]."""
  gram, errors = jnp.zeros((dim, dim)), jnp.zeros(dim)
  flat = [row.astype(jnp.float32).reshape(dim, -1) for row in rows.formed]
  for leaf in tower.plan.followed:
    own = [i for i, site in enumerate(tower.plan.sites) if site.leaf == leaf]
    if not own:
      continue
    sites = [tower.plan.sites[i] for i in own]
    lefts = [records[i][0] for i in own]
    cotangents = [rows.cotangents[i][:, 0] for i in own]
    if plans.must_swap(sites) or _is_long(sites):
      flat.append(_form_rows(sites, lefts, cotangents, dim))
      continue
    uses = [
      (site, left, _compute_rights(site, cotangent, dim))
      for site, left, cotangent in zip(sites, lefts, cotangents, strict=True)
    ]
    units = max(rules.count_units(*plans.get_sizes(site)) for site in sites)
    errors += rules.UNIT * units * _sum_lengths(uses) ** 2
    for number, use in enumerate(uses):
      gram += _contract(_compute_kernel(use, use), use[2], use[2])
      for other in uses[number + 1 :]:
        cross = _contract(_compute_kernel(use, other), use[2], other[2])
        gram += cross + cross.T
  for row in flat:
    gram += jnp.matmul(row, row.T, precision=_EXACT)
  errors += _FORMED_UNITS * rules.UNIT * jnp.diagonal(gram)
  return gram, errors


def _is_long(sites: list[use_sites.Site]) -> bool:
  """Checks whether some product has more positions than the gradient has rows."""
  return any(
    not site.is_lookup and site.positions > site.layout.num_rows
    for site in sites
  )


def _form_rows(
  sites: list[use_sites.Site],
  lefts: list[jax.Array],
  cotangents: list[jax.Array],
  dim: int,
) -> jax.Array:
  """Returns one parameter's rows of the Jacobian, [dim, entries]."""
  records = [left[None] for left in lefts]

  def row(cotangents: list[jax.Array]) -> jax.Array:
    expanded = [cotangent[None] for cotangent in cotangents]
    (pairs,) = plans.collect_uses(sites, records, expanded).values()
    layout = pairs[0][0]
    groups = math.prod(size for _, size in layout.groups)
    shape = (groups, layout.num_rows, layout.num_columns)
    return rules.compute_weighted_sum(
      [use for _, use in pairs], jnp.ones(1), shape
    )

  return jax.vmap(row)(cotangents).reshape(dim, -1)


_Use = tuple[use_sites.Site, jax.Array, jax.Array]


def _compute_rights(
  site: use_sites.Site, cotangents: jax.Array, dim: int
) -> jax.Array:
  """Returns the factors that depend on the dimension, [dim, groups, s, c]."""
  rights = jax.vmap(site.columns)(cotangents).astype(jnp.float32)
  return rights.reshape(dim, -1, *rights.shape[-2:])


def _sum_lengths(uses: list[_Use]) -> jax.Array | float:
  """Returns the summed lengths of all positions' contributions, [dim]."""
  total = 0.0
  for site, left, right in uses:
    lengths = rules.compute_lengths(right)  # [dim, groups, s]
    if not site.is_lookup:
      lengths *= rules.compute_lengths(left)[None]
    total += jnp.sum(lengths, axis=(1, 2))
  return total


def _compute_kernel(a: _Use, b: _Use) -> jax.Array:
  """Returns the inner products of the other factors, [groups, s, t]."""
  if a[0].is_lookup and b[0].is_lookup:
    equal = (a[1][:, None] == b[1][None, :]) & (a[1] >= 0)[:, None]
    return equal.astype(jnp.float32)[None]
  if b[0].is_lookup:
    entries = a[1][0][:, jnp.maximum(b[1], 0)]
    return jnp.where((b[1] >= 0)[None, :], entries, 0.0)[None]
  if a[0].is_lookup:
    return jnp.swapaxes(_compute_kernel(b, a), 1, 2)
  return jnp.einsum(
    "gsr,gtr->gst", a[1], b[1], precision=_EXACT,
    preferred_element_type=jnp.float32,
  )  # fmt: skip


def _contract(kernel: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns sum_{g,s,t} kernel[g,s,t] <a[k,g,s], b[l,g,t]> for all k, l."""
  moved = jnp.einsum("gst,lgtc->lgsc", kernel, b, precision=_EXACT)
  return jnp.matmul(
    a.reshape(len(a), -1), moved.reshape(len(b), -1).T, precision=_EXACT
  )
