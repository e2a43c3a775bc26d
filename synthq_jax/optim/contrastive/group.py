"""Implements group clipping, which clips the gradient of each group of a batch."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from synthq_jax import checks, typing
from synthq_jax.optim import clipping
from synthq_jax.optim.contrastive import batches
from synthq_jax.privacy import sensitivity

__all__ = ["Group"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
  """Clips the gradient of each group to norm C, with negatives from the group.

  A record's group is a hash of its own key, the batch's field "example_id",
  modulo the number of groups. Groups that are filled by position would all
  change when one record comes or goes. Groups therefore have uneven sizes. A
  group with more than `size` records leaves the rest out, in an order that
  depends on the keys alone. A group with a single record teaches nothing.

  Formal guarantee:
    Unit: "pair" or "query", or whatever "example_id" belongs to. Assumed: a
    record keeps its key when others come and go, as a hash of its content does.
    Positions in the data do not: all records behind a removed one would change
    their groups. Adding or removing a record changes one group, and so the sum
    by at most 2C. Replacing a record may change a second group: 4C. These values
    hold at any temperature, up to float32 rounding. A group whose gradient is not
    finite counts as zero. The number of groups is public.

  Attributes:
    size: largest number of records in a group, at least 2.
    groups: number of groups; None: max_batch_size // size.

  References:
    DP-GCL's idea of groups, with groups that depend on keys instead of
    positions.
  """

  size: int
  groups: int | None = None

  def __post_init__(self):
    if self.size < 2:
      raise ValueError(
        f"expected size >= 2, got size={self.size}: a record alone has no "
        "negatives"
      )
    if self.groups is not None:
      checks.at_least(1, groups=self.groups)

  def check(self, fn: Any) -> None:
    """Refuses groups larger than the largest batch."""
    if self.groups is None and self.size > fn.max_batch_size:
      raise ValueError(
        f"expected size <= max_batch_size={fn.max_batch_size}, got size="
        f"{self.size}"
      )

  def sensitivity(self, fn: Any, relation: Any, unit: str) -> float:
    """Returns 2C or 4C."""
    del unit
    return sensitivity.group(l2_clip_norm=fn.l2_clip_norm, relation=relation)

  def clipped_sum(
    self, fn: Any, params: typing.Params, batch: Any, pairs: batches.Pairs
  ) -> typing.Clipped:
    """Returns the sum, and losses and norms of the groups [groups]."""
    if "example_id" not in batch:
      raise ValueError(
        f"expected a batch with example_id, got {sorted(batch)}: a record's "
        "group has to come from its own key"
      )
    count = self.groups or fn.max_batch_size // self.size
    positions, is_filled = assign(
      batches.read_ids(batch, "example_id"), pairs.is_padding, count, self.size
    )
    names = ("queries", "documents", "negatives", "document_ids",
             "negative_ids", "has_query")  # fmt: skip
    grouped = {
      name: jax.tree.map(lambda x: jnp.asarray(x)[positions], batch[name])
      for name in names
      if name in batch
    }
    grouped["is_real"] = is_filled
    undivided = dataclasses.replace(fn, axes=())  # a group is on one device

    def loss(params: typing.Params, group: typing.Batch) -> jax.Array:
      fields = jax.tree.map(lambda x: x[0], dict(group))
      return undivided.total_loss(params, fields, fields.pop("is_real"))[None]

    grouped, own = fn.share.take(grouped), fn.share.is_own(count)
    microbatch = fn.microbatch_size
    if microbatch is not None:
      microbatch = _find_divisor(len(own), microbatch // self.size)
    is_empty = ~grouped["is_real"].any(axis=1)
    total, aux = clipping.clipped_grad(
      loss, l2_clip_norm=fn.l2_clip_norm, microbatch_size=microbatch
    )(params, grouped, is_padding_example=is_empty | ~own)
    losses, norms = fn.share.gather((aux.losses, aux.norms), count)
    return total, losses, norms


def _find_divisor(count: int, most: int) -> int:
  """Returns the largest divisor of count that is at most `most`, or 1."""
  return max(
    d for d in range(1, count + 1) if count % d == 0 and d <= max(most, 1)
  )


def assign(
  ids: jax.Array, is_padding: jax.Array, count: int, size: int
) -> tuple[jax.Array, jax.Array]:
  """Puts records into groups that depend on their own keys.

  Args:
    ids: integers [batch].
    is_padding: bool [batch]; such records are in no group.
    count: number of groups.
    size: largest number of records in a group.

  Returns:
    Positions in the batch [count, size], and a mask of the filled ones, bool.
  """
  mixed = _mix_bits(ids.astype(jnp.uint32))
  group = jnp.where(is_padding, count, (mixed % count).astype(jnp.int32))
  order = jnp.lexsort((_mix_bits(mixed + jnp.uint32(0x9E3779B9)), group))
  sorted_group = group[order]
  first = jnp.searchsorted(sorted_group, sorted_group, side="left")
  rank = jnp.arange(len(ids)) - first
  fits = (rank < size) & (sorted_group < count)
  slot = jnp.where(fits, sorted_group * size + rank, count * size)
  positions = jnp.zeros(count * size, jnp.int32)
  positions = positions.at[slot].set(order.astype(jnp.int32), mode="drop")
  is_filled = jnp.zeros(count * size, bool).at[slot].set(True, mode="drop")
  return positions.reshape(count, size), is_filled.reshape(count, size)


def _mix_bits(x: jax.Array) -> jax.Array:
  """Mixes the bits of 32-bit integers, one-to-one."""
  for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
    x = (x ^ (x >> shift)) * jnp.uint32(factor)
  return x ^ (x >> 16)
