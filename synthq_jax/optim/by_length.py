"""Clips sequences in buckets by length, so that padding takes little time.

Each sequence is cut to the shortest of a few public lengths that holds it. It
is then clipped together with the other sequences of that length.
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
  """Sums clipped gradients of sequences, each cut to the length of its bucket.

  Formal guarantee:
    Unit, relations and sensitivity are those of `gradient`. An example's length
    follows from that example alone. The example counts in the sum of its length
    and is padding, which contributes zero, in all other sums. So it contributes
    once, at most a clip norm. Public: the lengths. The sum equals that of
    `gradient` if the loss ignores zeros at the end of a sequence; the guarantee
    does not need this.

  >>> from synthq_jax import optim
  >>> loss = lambda w, batch: w * batch["x"].sum(axis=1)
  >>> gradient = optim.clipped_grad(loss, l2_clip_norm=20.0, microbatch_size=1)
  >>> grad_fn = ByLength(gradient=gradient, field="x", lengths=(2, 4))
  >>> total, aux = grad_fn(1.0, {"x": jnp.array([[9, 9, 9, 0], [5, 0, 0, 0]])})
  >>> print(total, aux.norms)
  25.0 [27.  5.]
  """

  gradient: Any
  """An `optim.ClippedGrad`, or another gradient that clips examples one by one.
  Buckets save time only with microbatches: for each length, those without a
  sequence of that length are skipped."""
  field: str
  """Name of the batch's integers [batch, length] that are cut; 0 is padding."""
  lengths: tuple[int, ...]
  """Public lengths in tokens, rising; the last is that of the batch's arrays."""
  aligned_fields: tuple[str, ...] = ()
  """Names of fields [batch, length, ...] that are cut alike, if the batch has
  them."""
  is_per_example = True

  def __post_init__(self):
    """Refuses lengths that do not rise, and gradients of batches or with aux."""
    if not getattr(self.gradient, "is_per_example", False):
      raise ValueError(
        "expected a gradient that clips examples one by one, got"
        f" {type(self.gradient).__name__}: which examples it sees together must"
        " not depend on their lengths"
      )
    if getattr(self.gradient, "has_aux", False):
      raise ValueError(
        "expected a loss without aux, got has_aux=True: the aux values would have"
        " several lengths"
      )
    rising = sorted({n for n in self.lengths if n > 0})
    if not rising or list(self.lengths) != rising:
      raise ValueError(
        f"expected rising lengths >= 1, got lengths={self.lengths}"
      )

  @property
  def l2_clip_norm(self) -> float:
    """Clip norm of `gradient`."""
    return self.gradient.l2_clip_norm

  def loss_fn(self, params: typing.Params, *args: Any) -> jax.Array:
    """Returns the losses [batch] of the uncut sequences."""
    return self.gradient.loss_fn(params, *args)

  def __call__(
    self,
    params: typing.Params,
    batch: Mapping[str, jax.Array],
    *,
    is_padding_example: jax.Array | None = None,
  ) -> tuple[typing.Params, clipping.Aux]:
    """Returns the clipped sum, and an `Aux` in the order of the batch.

    Args:
      params: as for `gradient`.
      batch: arrays [batch, ...], among them `field`.
      is_padding_example: bool [batch]; True makes an example contribute zero.

    Raises:
      ValueError: if the sequences or the `aligned_fields` are not as long as the
        last length, or fields and flags differ in their number of rows.
    """
    # Rows are taken by index below, and JAX clamps an index beyond the end.
    batch, is_padding, _ = clipping.split_rows(batch, is_padding_example)
    sequences = jnp.asarray(batch[self.field])
    if sequences.shape[1:] != self.lengths[-1:]:
      raise ValueError(
        f"expected {self.field} of shape [batch, {self.lengths[-1]}], the last of"
        f" lengths={self.lengths}, got {sequences.shape}"
      )
    names = [name for name in self.aligned_fields if name in batch]
    for name in names:
      if batch[name].shape[1:2] != self.lengths[-1:]:
        raise ValueError(
          f"expected {name} as long as {self.field}, {self.lengths[-1]}, got shape"
          f" {batch[name].shape}"
        )
    cut = (self.field, *names)
    positions = jnp.arange(1, self.lengths[-1] + 1)
    ends = jnp.max(jnp.where(sequences != 0, positions, 0), axis=1)
    kind = jnp.searchsorted(jnp.array(self.lengths), ends)
    if is_padding is not None:
      kind = jnp.where(is_padding, len(self.lengths), kind)
    order = jnp.argsort(kind)
    batch, kind = jax.tree.map(lambda x: jnp.asarray(x)[order], (batch, kind))
    sums = [
      self.gradient(
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
    """Returns the L2 sensitivity of `gradient`, which is that of the sum."""
    return self.gradient.sensitivity(relation)
