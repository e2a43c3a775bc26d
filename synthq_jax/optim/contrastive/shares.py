"""Divides the work on a batch among devices that all hold the whole batch.

Each of k devices takes every k-th row, since padding stands at the end of a
batch. It encodes these rows, gathers the vectors of all other rows, and then
sums the clipped gradients of its own rows alone.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["ONE_DEVICE", "Share"]


@dataclasses.dataclass(frozen=True)
class Share:
  """The rows of a batch that one device works on.

  Attributes:
    axes: manual mesh axes along which the work is divided; (): one device does
      all of it.
  """

  axes: tuple[str, ...] = ()

  @property
  def ways(self) -> int:
    """Number of devices."""
    return jax.lax.axis_size(self.axes) if self.axes else 1

  def count(self, size: int, block: int | None = None) -> int:
    """Returns the number of rows that each device takes of `size` rows.

    Args:
      size: rows of the batch.
      block: a smaller number, to a multiple of which the count is rounded up;
        None: it is not rounded.
    """
    count = -(-size // self.ways)
    if not self.axes or block is None or block >= count:
      return count
    return -(-count // block) * block

  def _get_positions(self, size: int, block: int | None = None) -> jax.Array:
    """Returns the positions of the device's rows, some beyond the last one."""
    own = jnp.arange(self.count(size, block))
    return own * self.ways + jax.lax.axis_index(self.axes)

  def is_own(self, size: int, block: int | None = None) -> jax.Array:
    """Masks the rows of `take` that exist: bool [count].

    Args:
      size: rows of the batch.
      block: as in `count`.
    """
    if not self.axes:
      return jnp.ones(size, bool)
    return self._get_positions(size, block) < size

  def take(self, tree: Any, block: int | None = None) -> Any:
    """Returns the device's rows of arrays; the batch's last row fills up the count.

    Args:
      tree: arrays [batch, ...], the same on every device.
      block: as in `count`.
    """
    if not self.axes:
      return tree
    size = len(jax.tree.leaves(tree)[0])
    rows = jnp.minimum(self._get_positions(size, block), size - 1)
    return jax.tree.map(lambda x: jnp.asarray(x)[rows], tree)

  def gather(self, tree: Any, size: int) -> Any:
    """Returns the rows of all devices, in the order of the batch.

    Args:
      tree: arrays [count, ...] of the rows that `take` returned.
      size: rows of the batch.
    """
    if not self.axes:
      return tree

    def gather_leaf(x: jax.Array) -> jax.Array:
      parts = jax.lax.all_gather(x, self.axes)  # [device, count, ...]
      return jnp.swapaxes(parts, 0, 1).reshape(-1, *x.shape[1:])[:size]

    return jax.tree.map(gather_leaf, tree)

  def map(self, function: Callable[[Any], Any], tree: Any) -> Any:
    """Applies a function to all rows, each device to its own.

    Args:
      function: from arrays [count, ...] to arrays of as many rows, each of
        which depends on its own row alone.
      tree: arrays [batch, ...], the same on every device.
    """
    size = len(jax.tree.leaves(tree)[0])
    return self.gather(function(self.take(tree)), size)

  def add(self, tree: Any) -> Any:
    """Returns the sum of all devices' arrays."""
    return jax.lax.psum(tree, self.axes) if self.axes else tree

  def keep_on_first(self, tree: Any) -> Any:
    """Keeps arrays on the first device and returns 0 on the others."""
    if not self.axes:
      return tree
    is_first = jax.lax.axis_index(self.axes) == 0
    return jax.tree.map(lambda x: jnp.where(is_first, x, 0), tree)

  def map_ring(
    self, function: Callable[[Any], jax.Array], own: Any
  ) -> jax.Array:
    """Applies a function to the rows of each device, in turn.

    The devices form a ring and pass on the rows that they hold, so that no
    device holds the rows of two others at once.

    Args:
      function: from the rows that a device holds to an array [row, count].
      own: the device's own rows, a tree of arrays.

    Returns:
      [row, count * ways], columns in the order of the batch.
    """
    if not self.axes:
      return function(own)
    ways = self.ways
    ring = [(i, (i - 1) % ways) for i in range(ways)]

    def turn(held: Any, _: None) -> tuple[Any, jax.Array]:
      values = function(held)
      return jax.lax.ppermute(held, self.axes, ring), values

    # Blocks of the device itself, of the next device, and so on.
    _, blocks = jax.lax.scan(turn, own, length=ways)
    source = (jnp.arange(ways) - jax.lax.axis_index(self.axes)) % ways
    blocks = blocks[source]  # [device, row, count]
    count = blocks.shape[2]
    return jnp.moveaxis(blocks, 0, 2).reshape(blocks.shape[1], ways * count)


ONE_DEVICE = Share()
"""Share of a device that does all the work."""
