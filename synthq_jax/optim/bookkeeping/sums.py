"""Sums over examples so that one example hardly changes the others' rounding.

Sums are float32 and made in parts. If rounding between the parts could exceed
half a percent of the clip norm, the rounding errors are summed and added at the
end.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from synthq_jax.optim.bookkeeping import devices

__all__ = ["CHUNK", "add_exactly", "add_up", "sum_in_chunks", "weigh"]

CHUNK = 256
"""Number of examples that are summed at once."""


def add_exactly(total: Any, lost: Any, more: Any) -> tuple[Any, Any]:
  """Adds to a running sum, and the rounding error to the sum of such errors.

  Without the errors, thousands of additions in a row would round alike. The
  example that is added first could then move all others by a rounding error
  each, together by more than a clip norm.

  Args:
    total: the sum so far, a tree of float32.
    lost: the sum of its rounding errors so far.
    more: the term to add.

  Returns:
    Both sums after the addition.

  References:
    Knuth (1997), The Art of Computer Programming 2, section 4.2.2, theorem B.
  """

  def rest(lost: jax.Array, t: jax.Array, m: jax.Array) -> jax.Array:
    summed = t + m
    seen = summed - t
    return lost + ((t - (summed - seen)) + (m - seen))

  return jax.tree.map(jnp.add, total, more), jax.tree.map(
    rest, lost, total, more
  )


_MAX_PLAIN = CHUNK**2
"""Largest number of parts times examples for a plain sum of parts.

Each of n parts is rounded in units of a sum of at most b clip norms. One
example can move the others by at most n b 2^-24 clip norms: here 0.4 percent.
"""


def add_up(
  sum_part: Callable[[Any], tuple[Any, Any]],
  examples: Any,
  params: Any,
  microbatch_size: int,
  *,
  is_unrolled: bool = False,
  is_empty: Callable[[Any], jax.Array] | None = None,
  is_dealt_out: bool = False,
) -> tuple[Any, Any]:
  """Adds up a function's sums over the microbatches of a batch.

  Formal guarantee: that of the function, for every microbatch size. One example
  changes the rounding of the additions by less than half a percent of the clip
  norm.

  Args:
    sum_part: from examples to a tree of float32 sums, and to a tree of arrays
      with a row for each example.
    examples: a tree of arrays [batch, ...].
    params: arrays of the sums' shapes.
    microbatch_size: examples at once; it divides the batch.
    is_unrolled: whether the loop over microbatches is unrolled.
    is_empty: from a microbatch to bool []: whether its sums and rows are all 0,
      so that it can be skipped. Batches have room for more examples than most
      draws have. None: no microbatch is skipped. Nor is one skipped in an
      unrolled loop, since an operation that is slow in a loop is as slow in a
      conditional; nor on devices that see parts of their own, which would wait
      for each other.
    is_dealt_out: whether rows are dealt out to devices one by one, so that each
      device has as much padding as the others. Then devices skip parts, too,
      unless the partitioner divides layers, whose collectives would wait.

  Returns:
    The sums over the whole batch, and the rows of all microbatches, [batch,
    ...].
  """
  size = len(jax.tree.leaves(examples)[0])
  if microbatch_size == size:
    return sum_part(examples)
  count = size // microbatch_size
  parts = jax.tree.map(
    lambda x: x.reshape(count, microbatch_size, *x.shape[1:]), examples
  )
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
  zeros = devices.vary(zeros, devices.get_axes(params))

  waits = devices.get_manual_axes()
  if is_dealt_out:
    waits = devices.compiler_divides()
  if not (is_empty is None or is_unrolled or waits):
    sum_part = _skip_empty(is_empty, sum_part)

  def add_plain(total: Any, part: Any) -> tuple[Any, Any]:
    more, rows = sum_part(part)
    return jax.tree.map(jnp.add, total, more), rows

  def add_compensated(carry: Any, part: Any) -> tuple[Any, Any]:
    more, rows = sum_part(part)
    total, lost = carry
    return add_exactly(total, lost, more), rows

  if count * size <= _MAX_PLAIN:
    total, rows = jax.lax.scan(add_plain, zeros, parts, unroll=is_unrolled)
  else:
    (total, lost), rows = jax.lax.scan(
      add_compensated, (zeros, zeros), parts, unroll=is_unrolled
    )
    total = jax.tree.map(jnp.add, total, lost)
  return total, jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), rows)


def _skip_empty(
  is_empty: Callable[[Any], jax.Array],
  sum_part: Callable[[Any], tuple[Any, Any]],
) -> Callable[[Any], tuple[Any, Any]]:
  """Wraps a function: an empty part gives zeros and takes no time."""

  def zeros(part: Any) -> tuple[Any, Any]:
    shapes = jax.eval_shape(sum_part, part)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

  return lambda part: jax.lax.cond(is_empty(part), zeros, sum_part, part)


def sum_in_chunks(sum_chunk: Callable[[Any], Any], batch: Any) -> Any:
  """Adds up a function's sums over chunks of `CHUNK` examples.

  Args:
    sum_chunk: from arrays with a leading axis to a tree of float32 sums over
      it.
    batch: arrays with a leading axis [batch].

  Returns:
    The sums over the whole batch.
  """
  size = jax.tree.leaves(batch)[0].shape[0]
  if size <= CHUNK:
    return sum_chunk(batch)
  num_chunked = size // CHUNK * CHUNK
  chunks = jax.tree.map(
    lambda x: x[:num_chunked].reshape(-1, CHUNK, *x.shape[1:]), batch
  )
  first, others = (
    jax.tree.map(lambda x, part=part: x[part], chunks)
    for part in (0, slice(1, None))
  )
  total = sum_chunk(first)
  carry = total, jax.tree.map(jnp.zeros_like, total)
  carry = devices.vary(carry, devices.get_axes(total))

  def add(carry: Any, chunk: Any) -> tuple[Any, None]:
    total, lost = carry
    return add_exactly(total, lost, sum_chunk(chunk)), None

  (total, lost), _ = jax.lax.scan(add, carry, others)
  if num_chunked < size:
    rest = jax.tree.map(lambda x: x[num_chunked:], batch)
    total, lost = add_exactly(total, lost, sum_chunk(rest))
  return jax.tree.map(jnp.add, total, lost)


def weigh(gradients: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns the weighted sum over the first axis, in float32.

  An example with weight zero contributes exactly zero. The products with the
  weights are not stored as an array, as a plain sum over the first axis would
  do on CPUs.

  Args:
    gradients: [batch, ...].
    weights: float32 [batch].
  """
  return sum_in_chunks(
    lambda chunk: _sum_weighted(*chunk), (gradients, weights)
  )


_TERMS = 8  # terms of an unrolled sum


def _sum_weighted(gradients: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns the weighted sum of some examples, a few terms at once."""
  size = len(weights)

  def sum_group(first: Any, terms: int) -> jax.Array:
    rows = range(terms)
    return _sum_pairwise([weigh_example(first + row) for row in rows])

  def weigh_example(row: Any) -> jax.Array:
    gradient = jax.lax.dynamic_index_in_dim(gradients, row, keepdims=False)
    weight = jax.lax.dynamic_index_in_dim(weights, row, keepdims=False)
    return jnp.where(weight > 0, gradient.astype(jnp.float32) * weight, 0)

  if size <= _TERMS:
    return sum_group(0, size)
  total = jax.lax.fori_loop(
    1,
    size // _TERMS,
    lambda group, total: total + sum_group(group * _TERMS, _TERMS),
    sum_group(0, _TERMS),
  )
  rest = size % _TERMS
  return total + sum_group(size - rest, rest) if rest else total


def _sum_pairwise(terms: list[jax.Array]) -> jax.Array:
  """Adds terms in pairs, then pairs of pairs, and so on."""
  while len(terms) > 1:
    pairs = [terms[i : i + 2] for i in range(0, len(terms), 2)]
    terms = [a[0] + a[1] if len(a) == 2 else a[0] for a in pairs]
  return terms[0]
