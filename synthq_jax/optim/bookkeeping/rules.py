"""Computes norms and weighted sums of per-example gradients from their factors.

The gradient of one parameter for one example is a sum over its uses. A product
with data contributes sum_t left[t] right[t]^T, a lookup contributes right[t] to
the row ids[t]. Norms and sums come from the factors: an array of the shape
[batch, rows, columns] is never formed.

Squared norms are those of the sum, so every pair of different uses enters
twice (its two orders), and every use once with itself.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from synthq_jax.optim.bookkeeping import sums

__all__ = [
  "UNIT",
  "Outer",
  "Rows",
  "compute_allowance",
  "compute_clip_weights",
  "compute_cross_terms",
  "compute_lengths",
  "compute_norms",
  "compute_squared_norm",
  "compute_squared_norms",
  "compute_weighted_sum",
  "count_flops_from_factors",
  "count_flops_from_product",
  "count_units",
  "reduce",
  "sum_of_squares",
  "widen",
]


# TPUs and recent GPUs round factors of matrix products to 8 or 11 bits unless
# told otherwise; a norm that comes out too small is clipped too little.
_EXACT = jax.lax.Precision.HIGHEST


UNIT = 2.0**-24
"""Largest relative error of rounding to float32."""
_TINY = 2.0**-126
"""Largest number that float32 may round to zero."""
_HALVES = 64
"""Units that a weighted sum loses if its factors are in bfloat16."""


class Outer(NamedTuple):
  """Uses in matrix products: the gradient is sum_t left[t] right[t]^T."""

  left: jax.Array  # [batch, groups, position, rows]
  right: jax.Array  # [batch, groups, position, columns]


class Rows(NamedTuple):
  """Uses in lookups: the gradient adds right[t] to the row ids[t]."""

  ids: jax.Array  # [batch, position] int32, negative: no row
  right: jax.Array  # [batch, position, columns]


def _multiply(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """Computes an einsum in float32."""
  dtype = jnp.promote_types(jnp.result_type(a, b), jnp.float32)
  return jnp.einsum(spec, a, b, preferred_element_type=dtype, precision=_EXACT)


def _multiply_all(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns all inner products of two stacks of vectors, in float32."""
  return _multiply("...sk,...tk->...st", a, b)


def _sum_by_axis(values: jax.Array) -> jax.Array:
  """Sums over all axes but the first, one axis after the other.

  A barrier keeps the compiler from making one long sum of them, whose rounding
  error could be as large as its number of terms.
  """
  while values.ndim > 1:
    values = jax.lax.optimization_barrier(jnp.sum(values, axis=-1))
  return values


def _pair_outer_outer(a: Outer, b: Outer) -> jax.Array:
  """Returns <sum_s l_s r_s^T, sum_t l_t r_t^T> for each example, [batch]."""
  left = _multiply_all(a.left, b.left)  # [batch, groups, position, position]
  right = _multiply_all(a.right, b.right)
  return _sum_by_axis(left * right)


def _pair_rows_rows(a: Rows, b: Rows) -> jax.Array:
  """Returns the sum of right[s].right[t] over pairs with equal ids, [batch]."""
  return _sum_by_axis(
    jnp.where(_match_rows(a, b), _multiply_all(a.right, b.right), 0)
  )


def _match_rows(a: Rows, b: Rows) -> jax.Array:
  """Compares the ids of all lookups: bool [batch, position, position]."""
  equal = a.ids[:, :, None] == b.ids[:, None, :]
  return equal & (a.ids >= 0)[:, :, None]


def _pair_outer_rows(a: Outer, b: Rows) -> jax.Array:
  """Returns sum_{s,t} (right[s].right[t]) left[s, ids[t]], [batch]."""
  entries = jnp.take_along_axis(  # [batch, position of a, position of b]
    a.left[:, 0], jnp.maximum(b.ids, 0)[:, None, :], axis=2
  )
  entries = jnp.where((b.ids >= 0)[:, None, :], entries, 0)
  return _sum_by_axis(entries * _multiply_all(a.right[:, 0], b.right))


def _pair(a: Outer | Rows, b: Outer | Rows) -> jax.Array:
  """Returns the inner product of two uses' gradients, [batch]."""
  if isinstance(a, Outer):
    return (
      _pair_outer_outer(a, b)
      if isinstance(b, Outer)
      else _pair_outer_rows(a, b)
    )
  if isinstance(b, Outer):
    return _pair_outer_rows(b, a)
  return _pair_rows_rows(a, b)


def compute_cross_terms(uses: Sequence[Outer | Rows]) -> jax.Array | float:
  """Returns the part of the squared norms from pairs of different uses, [batch]."""
  pairs = [_pair(a, b) for i, a in enumerate(uses) for b in list(uses)[i + 1 :]]
  return 2.0 * sum(pairs) if pairs else 0.0


def compute_squared_norms(uses: Sequence[Outer | Rows]) -> jax.Array:
  """Returns each example's squared gradient norm for one parameter.

  Formal guarantee:
    The result is not below the square of the exact norm of the factors'
    gradient. Nor is it below that of `compute_weighted_sum` for one example at
    weight 1: `compute_allowance` is added. Assumed: sums and products are in
    float32, in any order. The guarantee holds up to a relative 1e-6 for adding
    up the parts.

  Args:
    uses: all uses of the parameter, in one common layout.

  Returns:
    float32 [batch]; infinite or nan where it does not fit into float32.

  References:
    Goodfellow (2015), arXiv:1510.01799 (norms from inputs and cotangents).
    Li et al. (2022), arXiv:2110.05679, section 4 (sequences, embeddings).
  """
  total = sum(_pair(use, use) for use in uses) + compute_cross_terms(uses)
  return total + compute_allowance(uses, total)


def compute_allowance(
  uses: Sequence[Outer | Rows], squares: jax.Array | float
) -> jax.Array:
  """Bounds how far rounding may have lowered squared norms, [batch].

  A sum of k products, in any order, is off by at most k units of the sum of
  their sizes, and by the loss of products below float32's range. The norm takes
  inner products of p and of q entries, and sums their products over both
  positions and the groups. Its error is p + q + 2 positions + groups units of
  A^2, with `A = sum_t |left_t| |right_t|`. The weighted sum that the norm is
  for is off by `positions` units of A, which adds as much to the norm.

  Args:
    uses: all uses of the parameter, in one common layout.
    squares: float32 [batch], the squared norms computed from `uses`.

  Returns:
    float32 [batch], small against the squares unless positions cancel.

  References:
    Higham (2002), Accuracy and Stability of Numerical Algorithms, section 3.1.
  """
  sizes = [_measure_size(use) for use in uses]
  met = sum(size.met for size in sizes)
  for number, size in enumerate(sizes):
    met += sum(2.0 * size.length * other.length for other in sizes[:number])
  down = max(_count_units(use) for use in uses) * UNIT * met
  down += sum(size.lost for size in sizes)
  summed = sum(
    _bound_sum_rounding(use) * size.length
    for use, size in zip(uses, sizes, strict=True)
  )
  norms = jnp.sqrt(jnp.maximum(squares + down, 0.0))
  return down + (2.0 * norms + summed) * summed


class _Size(NamedTuple):
  """Sizes of a use's contributions before they cancel; all [batch]."""

  length: jax.Array  # sum_t |left_t| |right_t|
  met: jax.Array  # sum of products of lengths, over positions that meet
  lost: jax.Array  # the largest loss of the squared norm by underflow


def _measure_size(use: Outer | Rows) -> _Size:
  right = compute_lengths(use.right)
  if isinstance(use, Rows):
    right = jnp.where(use.ids >= 0, right, 0.0)
    length = jnp.sum(right, axis=1)
    pairs = right[:, :, None] * right[:, None, :]
    met = _sum_by_axis(jnp.where(_match_rows(use, use), pairs, 0.0))
    lost = _TINY * use.right.shape[1] ** 2 * use.right.shape[2]
    return _Size(length, met, jnp.full_like(length, lost))
  left = compute_lengths(use.left)
  group_lengths = jnp.sum(left * right, axis=2)
  # An inner product of p entries loses at most p _TINY.
  root = _TINY**0.5
  lost = use.left.shape[3] * jnp.sum(root * right, axis=2) ** 2
  lost += use.right.shape[3] * jnp.sum(root * left, axis=2) ** 2
  return _Size(
    jnp.sum(group_lengths, axis=1),
    jnp.sum(group_lengths**2, axis=1),
    jnp.sum(lost, axis=1),
  )


def compute_lengths(vectors: jax.Array) -> jax.Array:
  """Returns the lengths of vectors along the last axis, or slightly more."""
  squares = jnp.sum(jnp.square(vectors.astype(jnp.float32)), axis=-1)
  return jnp.sqrt(squares + vectors.shape[-1] * _TINY)


def _count_units(use: Outer | Rows) -> int:
  positions, columns = use.right.shape[-2:]
  if isinstance(use, Rows):
    return count_units(1, positions, 0, columns)
  return count_units(use.left.shape[1], positions, use.left.shape[3], columns)


def count_units(groups: int, positions: int, rows: int, columns: int) -> int:
  """Returns the rounding error of one use's squared norm, in units of `UNIT`."""
  return rows + columns + 2 * positions + groups + 4


def _bound_sum_rounding(use: Outer | Rows) -> float:
  """Returns the rounding error of a use's weighted sum, relative to lengths."""
  is_half = isinstance(use, Outer) and use.left.dtype == jnp.bfloat16
  return (use.right.shape[-2] + (_HALVES if is_half else 0)) * UNIT


def compute_squared_norm(use: Outer | Rows) -> jax.Array:
  """Returns each example's squared gradient norm of a parameter's only use.

  The norm comes from the factors, or from the gradient itself if this takes
  less work.

  Args:
    use: the only use of the parameter.

  Returns:
    float32 [batch].
  """
  if isinstance(use, Rows):
    return compute_squared_norms([use])
  shape = (*use.left.shape[1:], use.right.shape[3])
  if count_flops_from_factors(*shape) <= count_flops_from_product(*shape):
    return compute_squared_norms([use])
  gradients = _multiply("bgtp,bgtq->bgpq", use.left, use.right)
  # Every entry is a sum over positions, here and in the weighted sum.
  rounding = use.left.shape[2] * UNIT + _bound_sum_rounding(use)
  norms = jnp.sqrt(sum_of_squares(gradients))
  return jnp.square(norms + rounding * _measure_size(use).length)


def count_flops_from_factors(
  groups: int, positions: int, rows: int, columns: int
) -> float:
  """Returns the work of one example's norm from factors."""
  return 2.0 * groups * positions**2 * (rows + columns)


def count_flops_from_product(
  groups: int, positions: int, rows: int, columns: int
) -> float:
  """Returns the work of one example's norm from the gradient itself."""
  return 2.0 * groups * positions * max(rows, 1) * columns


def sum_of_squares(gradients: jax.Array) -> jax.Array:
  """Returns the sum of squares over all axes but the first, float32."""
  flat = gradients.reshape(gradients.shape[0], -1).astype(jnp.float32)
  return jnp.sum(jnp.square(flat), axis=1)


def compute_norms(squares: Sequence[jax.Array], losses: jax.Array) -> jax.Array:
  """Returns norms from the squared norms of all parameters, [batch]."""
  # Products that cancel may still round to just below zero.
  return jnp.sqrt(jnp.maximum(sum(squares, jnp.zeros_like(losses)), 0.0))


def compute_clip_weights(
  losses: jax.Array,
  norms: jax.Array,
  is_padding_example: jax.Array,
  l2_clip_norm: float,
) -> jax.Array:
  """Returns the clip factor of each example's gradient, in [0, 1], [batch].

  The factor is zero for padding, and for an example whose loss or norm is not
  finite.
  """
  counted = jnp.isfinite(losses) & jnp.isfinite(norms) & ~is_padding_example
  return jnp.where(counted, jnp.minimum(1.0, l2_clip_norm / norms), 0.0)


def compute_weighted_sum(
  uses: Sequence[Outer | Rows],
  weights: jax.Array,
  shape: tuple[int, int, int],
) -> jax.Array:
  """Returns the weighted sum over examples of one parameter's gradients.

  Args:
    uses: all uses of the parameter, in one common layout.
    weights: float32 [batch]; an example with weight zero contributes exactly
      zero, whatever its factors hold.
    shape: (groups, rows, columns).

  Returns:
    float32 [groups, rows, columns].
  """

  def sum_chunk(chunk: tuple[Sequence[Outer | Rows], jax.Array]) -> jax.Array:
    uses, weights = chunk
    total = jnp.zeros(shape, jnp.float32)
    for use in uses:
      if isinstance(use, Outer):
        total += _sum_outer(use, weights)
      else:
        total = _sum_rows(use, weights, total)
    return total

  return sums.sum_in_chunks(sum_chunk, (list(uses), weights))


def widen(
  params: Any,
) -> tuple[Any, Callable[[Any], Any]]:
  """Returns parameters in float32, and the function back to their dtypes.

  Gradients with respect to float32 parameters have their norms and sums in
  float32.
  """
  dtypes = jax.tree.map(lambda x: jnp.asarray(x).dtype, params)
  wide = jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.float32), params)
  return wide, lambda wide: jax.tree.map(
    lambda x, dtype: x.astype(dtype), wide, dtypes
  )


def _scale(factors: jax.Array, weights: jax.Array) -> jax.Array:
  """Multiplies factors with weights; exactly zero for a weight of zero."""
  weights = weights.reshape(weights.shape + (1,) * (factors.ndim - 1))
  return jnp.where(weights > 0, factors * weights, 0)


def _sum_outer(use: Outer, weights: jax.Array) -> jax.Array:
  right = _scale(use.right.astype(jnp.float32), weights)

  def multiply_all() -> jax.Array:
    return _sum_products(use.left, right)

  def multiply_counted() -> jax.Array:
    left = _scale(use.left, jnp.sign(weights)).astype(use.left.dtype)
    return _sum_products(left, right)

  # Zero times a factor that is not finite is NaN. Setting such factors to zero
  # first costs CPUs an array of the same size.
  return jax.lax.platform_dependent(
    cpu=lambda: jax.lax.cond(
      jnp.isfinite(use.left).all(), multiply_all, multiply_counted
    ),
    default=multiply_counted,
  )


def _sum_products(left: jax.Array, right: jax.Array) -> jax.Array:
  """Sums products over examples and positions, to within `_HALVES` units."""
  spec = "bgtp,bgtq->gpq"
  if left.dtype != jnp.bfloat16:
    return _multiply(spec, left, right)
  # In two halves, which accelerators multiply exactly: one alone would leave
  # each example's rounding error outside its clip norm.
  high = right.astype(jnp.bfloat16)
  low = (right - high.astype(jnp.float32)).astype(jnp.bfloat16)
  return _multiply(spec, left, high) + _multiply(spec, left, low)


def _sum_rows(use: Rows, weights: jax.Array, total: jax.Array) -> jax.Array:
  right = _scale(use.right.astype(jnp.float32), weights)
  # A lookup without a row has no norm, and its cotangent may be anything.
  right = jnp.where((use.ids >= 0)[..., None], right, 0.0)
  # Each example is added to a row once. Otherwise its large positions that cancel
  # would round the sum of all others again and again.
  same = _match_rows(use, use)
  right = _multiply("bst,btc->bsc", same.astype(jnp.float32), right)
  is_first = ~jnp.tril(same, -1).any(axis=2) & (use.ids >= 0)
  # A scatter drops indices beyond the end, but counts negative ones from it.
  ids = jnp.where(is_first, use.ids, total.shape[1])
  flat = right.reshape(-1, right.shape[-1])
  return total.at[0, ids.reshape(-1)].add(flat, mode="drop")


def reduce(
  function: Callable[..., Any], *, is_summed: Sequence[bool]
) -> Callable[..., Any]:
  """Returns a function of one example that runs `function` on the whole batch.

  Code under `jax.vmap` sees one example. A sum over examples there would first
  be made for each of them, in an array of their number times the parameters.
  The whole batch can be summed in one product.

  Args:
    function: from pytrees of arrays [batch, ...] to a tuple of arrays.
    is_summed: for each result, True if it is a sum over the batch, and False if
      it has a leading axis [batch].

  Returns:
    A function of the same arguments without the batch axis. Under `jax.vmap`
    its sums are those of the batch and not mapped (`out_axes=None`); elsewhere
    they are those of a batch of one.
  """

  @jax.custom_batching.custom_vmap
  def reduce_one(*arguments: Any) -> tuple[Any, ...]:
    results = function(*jax.tree.map(lambda x: x[None], arguments))
    return tuple(
      result if summed else result[0]
      for result, summed in zip(results, is_summed, strict=True)
    )

  @reduce_one.def_vmap
  def reduce_batch(axis_size: int, is_mapped: Any, *arguments: Any) -> Any:
    arguments = jax.tree.map(
      lambda x, mapped: (
        x if mapped else jnp.broadcast_to(x, (axis_size, *jnp.shape(x)))
      ),
      arguments,
      tuple(is_mapped),
    )
    return tuple(function(*arguments)), tuple(not each for each in is_summed)

  return reduce_one
