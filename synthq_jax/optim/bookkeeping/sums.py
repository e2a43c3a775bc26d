"""Adds up over examples, so that no example makes the others round otherwise.

Sums are float32 and made in parts, with what is rounded away between the parts
where that could come to more than half a percent of the clip norm.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from synthq_jax.optim.bookkeeping import devices

__all__ = ["CHUNK", "add_exactly", "add_up", "in_chunks", "weigh"]

CHUNK = 256
"""Examples that are summed at once."""


def add_exactly(total: Any, lost: Any, more: Any) -> tuple[Any, Any]:
  """Adds to a running sum, and what that rounds away to what was lost.

  One after the other, thousands of sums round alike: who adds the first of them
  could move all others by a rounding error each, by more than a clip norm.

  Args:
    total: the sum so far, a tree of float32.
    lost: what it has lost so far.
    more: what to add.

  Returns:
    Both after it.

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


_PLAINLY = CHUNK**2
"""Parts times examples up to which sums of parts are added plainly.

Each of n parts is rounded in units of a sum of at most b clip norms, so that one
example can move the others by at most n b 2^-24 clip norms: here .4 percent.
"""


def add_up(
  of_part: Callable[[Any], tuple[Any, Any]],
  examples: Any,
  params: Any,
  microbatch_size: int,
  *,
  is_written_out: bool = False,
  is_empty: Callable[[Any], jax.Array] | None = None,
  is_dealt_out: bool = False,
) -> tuple[Any, Any]:
  """Adds up what a function makes of one microbatch after the other.

  Formal guarantee: that of the function, for every size: sums are added so that
  rounding moves with one example by less than half a percent of the clip norm.

  Args:
    of_part: from examples to a tree of float32 sums, and to a tree of arrays
      with a row for each of them.
    examples: a tree of arrays [batch, ...].
    params: arrays of the sums' shapes.
    microbatch_size: examples at once; it divides the batch.
    is_written_out: whether the loop over microbatches is written out.
    is_empty: says of a microbatch, bool [], whether all that the function makes
      of it is 0, so that it need not be called: batches have room for more
      examples than most draws have. None: it is called for each. It always is
      where the loop is written out, since what is slow in a loop is as slow in a
      conditional; and on devices that see parts of their own, of which one that
      leaves a part out would be waited for by those that do not.
    is_dealt_out: whether rows are dealt out to devices one by one, so that each
      has as much padding as the others. Then parts are left out there, too,
      unless the partitioner divides layers, whose collectives would wait.

  Returns:
    The sums over the whole batch, and the trees of rows as one.
  """
  size = len(jax.tree.leaves(examples)[0])
  if microbatch_size == size:
    return of_part(examples)
  count = size // microbatch_size
  parts = jax.tree.map(
    lambda x: x.reshape(count, microbatch_size, *x.shape[1:]), examples
  )
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
  zeros = devices.vary(zeros, devices.axes_of(params))

  waits = devices.manual_axes()
  if is_dealt_out:
    waits = devices.compiler_divides()
  if not (is_empty is None or is_written_out or waits):
    of_part = _unless(is_empty, of_part)

  def plainly(total: Any, part: Any) -> tuple[Any, Any]:
    more, rows = of_part(part)
    return jax.tree.map(jnp.add, total, more), rows

  def exactly(carry: Any, part: Any) -> tuple[Any, Any]:
    more, rows = of_part(part)
    total, lost = carry
    return add_exactly(total, lost, more), rows

  if count * size <= _PLAINLY:
    total, rows = jax.lax.scan(plainly, zeros, parts, unroll=is_written_out)
  else:
    (total, lost), rows = jax.lax.scan(
      exactly, (zeros, zeros), parts, unroll=is_written_out
    )
    total = jax.tree.map(jnp.add, total, lost)
  return total, jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), rows)


def _unless(
  is_empty: Callable[[Any], jax.Array],
  of_part: Callable[[Any], tuple[Any, Any]],
) -> Callable[[Any], tuple[Any, Any]]:
  """Returns the function that is 0, and takes no time, where a part is empty."""

  def zeros(part: Any) -> tuple[Any, Any]:
    made = jax.eval_shape(of_part, part)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made)

  return lambda part: jax.lax.cond(is_empty(part), zeros, of_part, part)


def in_chunks(of_chunk: Callable[[Any], Any], batch: Any) -> Any:
  """Adds up what a function makes of every `CHUNK` examples.

  Args:
    of_chunk: from arrays with a leading axis to a tree of float32 sums over it.
    batch: arrays with a leading axis [batch].

  Returns:
    The sums over the whole batch.
  """
  size = jax.tree.leaves(batch)[0].shape[0]
  if size <= CHUNK:
    return of_chunk(batch)
  whole = size // CHUNK * CHUNK
  chunks = jax.tree.map(
    lambda x: x[:whole].reshape(-1, CHUNK, *x.shape[1:]), batch
  )
  first, others = (
    jax.tree.map(lambda x, part=part: x[part], chunks)
    for part in (0, slice(1, None))
  )
  total = of_chunk(first)
  carry = total, jax.tree.map(jnp.zeros_like, total)
  carry = devices.vary(carry, devices.axes_of(total))

  def add(carry: Any, chunk: Any) -> tuple[Any, None]:
    total, lost = carry
    return add_exactly(total, lost, of_chunk(chunk)), None

  (total, lost), _ = jax.lax.scan(add, carry, others)
  if whole < size:
    rest = jax.tree.map(lambda x: x[whole:], batch)
    total, lost = add_exactly(total, lost, of_chunk(rest))
  return jax.tree.map(jnp.add, total, lost)


def weigh(gradients: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns the weighted sum over the first axis, in float32.

  An example with weight zero contributes exactly zero. The products with the
  weights are never an array of their own, which a plain sum over the first axis
  would make on CPUs.

  Args:
    gradients: [batch, ...].
    weights: float32 [batch].
  """
  return in_chunks(lambda chunk: _weighed(*chunk), (gradients, weights))


_TERMS = 8  # of a sum that is written out


def _weighed(gradients: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns the weighted sum of some examples, a few terms at once."""
  size = len(weights)

  def of_group(first: Any, terms: int) -> jax.Array:
    rows = range(terms)
    return _tree_sum([of_example(first + row) for row in rows])

  def of_example(row: Any) -> jax.Array:
    gradient = jax.lax.dynamic_index_in_dim(gradients, row, keepdims=False)
    weight = jax.lax.dynamic_index_in_dim(weights, row, keepdims=False)
    return jnp.where(weight > 0, gradient.astype(jnp.float32) * weight, 0)

  if size <= _TERMS:
    return of_group(0, size)
  total = jax.lax.fori_loop(
    1,
    size // _TERMS,
    lambda group, total: total + of_group(group * _TERMS, _TERMS),
    of_group(0, _TERMS),
  )
  rest = size % _TERMS
  return total + of_group(size - rest, rest) if rest else total


def _tree_sum(terms: list[jax.Array]) -> jax.Array:
  """Returns the sum, in pairs, pairs of pairs and so on."""
  while len(terms) > 1:
    pairs = [terms[i : i + 2] for i in range(0, len(terms), 2)]
    terms = [a[0] + a[1] if len(a) == 2 else a[0] for a in pairs]
  return terms[0]
