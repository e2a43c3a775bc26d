"""Clips short sequences as short ones, not padded to the longest of all.

Each sequence is cut to the first of a few public lengths that holds it, and clipped
beside others of that length. So a batch takes time for its tokens, and little for
its padding.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from synthq_jax import typing
from synthq_jax.optim import clipping

__all__ = ["ByLength"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByLength:
  """A sum of clipped gradients of sequences, each cut to a length of its own.

  Formal guarantee:
    Unit, relations and sensitivity are those of `whole`. Every example is in the
    one sum of its length, which follows from that example alone, and is padding,
    which contributes zero, in the others: it contributes once, a clip norm at
    most. Public: the lengths. Assumed, for the sum to be that of `whole` and not
    for the guarantee: a loss does not see 0 at the end of its sequence.

  >>> from synthq_jax import optim
  >>> loss = lambda w, batch: w * batch["x"].sum(axis=1)
  >>> whole = optim.clipped_grad(loss, l2_clip_norm=20.0, microbatch_size=1)
  >>> grad_fn = ByLength(whole=whole, field="x", lengths=(2, 4))
  >>> total, aux = grad_fn(1.0, {"x": jnp.array([[9, 9, 9, 0], [5, 0, 0, 0]])})
  >>> print(total, aux.norms)
  25.0 [27.  5.]
  """

  whole: Any
  """An `optim.ClippedGrad`, or another that clips examples one by one. It saves
  time where it works in microbatches: a microbatch takes that of its longest."""
  field: str
  """The batch's integers [batch, length] that are cut; 0 is padding."""
  lengths: tuple[int, ...]
  """Public, rising; the last one is that of all sequences."""
  beside: tuple[str, ...] = ()
  """Fields [batch, length, ...] that are cut with it, where the batch has them."""
  is_per_example = True

  def __post_init__(self):
    """Refuses lengths that leave a sequence out, and gradients of batches."""
    if not getattr(self.whole, "is_per_example", False):
      raise ValueError(
        "expected a gradient that clips examples one by one, got"
        f" {type(self.whole).__name__}: which examples it sees together must not"
        " depend on their lengths"
      )
    if getattr(self.whole, "has_aux", False):
      raise ValueError(
        "expected a loss without values besides, got has_aux=True: theirs would be"
        " of several lengths"
      )
    rising = sorted({n for n in self.lengths if n > 0})
    if not rising or list(self.lengths) != rising:
      raise ValueError(
        f"expected rising lengths >= 1, got lengths={self.lengths}"
      )

  @property
  def l2_clip_norm(self) -> float:
    """Returns the largest norm that one example contributes."""
    return self.whole.l2_clip_norm

  def loss_fn(self, params: typing.Params, *args: Any) -> jax.Array:
    """Returns the losses [batch] of sequences that are not cut."""
    return self.whole.loss_fn(params, *args)

  def __call__(
    self,
    params: typing.Params,
    batch: Mapping[str, jax.Array],
    *,
    is_padding_example: jax.Array | None = None,
  ) -> tuple[typing.Params, clipping.Aux]:
    """Returns the clipped sum, and an `Aux` in the order of the batch.

    Args:
      params: as for `whole`.
      batch: arrays [batch, ...], among them the field.
      is_padding_example: bool [batch]; such examples contribute zero.

    Raises:
      ValueError: if sequences, or fields beside them, are not as long as the last
        length, or fields and flags have other numbers of rows.
    """
    # Rows are taken by place below, and JAX takes the last for one behind it.
    batch, is_padding, _ = clipping.split_rows(batch, is_padding_example)
    sequences = jnp.asarray(batch[self.field])
    if sequences.shape[1:] != self.lengths[-1:]:
      raise ValueError(
        f"expected {self.field} of shape [batch, {self.lengths[-1]}], the last of"
        f" lengths={self.lengths}, got {sequences.shape}"
      )
    beside = [name for name in self.beside if name in batch]
    for name in beside:
      if batch[name].shape[1:2] != self.lengths[-1:]:
        raise ValueError(
          f"expected {name} as long as {self.field}, {self.lengths[-1]}, got shape"
          f" {batch[name].shape}"
        )
    cut = (self.field, *beside)
    places = jnp.arange(1, self.lengths[-1] + 1)
    ends = jnp.max(jnp.where(sequences != 0, places, 0), axis=1)
    kind = jnp.searchsorted(jnp.array(self.lengths), ends)
    if is_padding is not None:
      kind = jnp.where(is_padding, len(self.lengths), kind)
    order = jnp.argsort(kind)
    batch, kind = jax.tree.map(lambda x: jnp.asarray(x)[order], (batch, kind))
    sums = [
      self.whole(
        params,
        {**batch, **{name: batch[name][:, :length] for name in cut}},
        is_padding_example=kind != number,
      )
      for number, length in enumerate(self.lengths)
    ]
    total, aux = jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *sums)
    back = jnp.argsort(order)
    return total, jax.tree.map(lambda x: x[back], aux)

  def sensitivity(self, relation: Any) -> float:
    """Returns the L2 sensitivity of the sum, that of `whole`."""
    return self.whole.sensitivity(relation)
