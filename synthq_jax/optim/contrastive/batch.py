"""Implements batch clipping, which clips the gradient of a whole coupled batch."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from synthq_jax import checks, typing
from synthq_jax.optim import clipping, loss_calls
from synthq_jax.optim import keys as keys_lib
from synthq_jax.optim.bookkeeping import devices
from synthq_jax.optim.contrastive import batches, shares
from synthq_jax.privacy import sensitivity

__all__ = ["Batch", "BatchAux", "BatchClippedGrad", "batch_clipped_grad"]


class BatchAux(NamedTuple):
  """Loss and gradient norm of a whole batch, as private as the data.

  Attributes:
    loss: float32 [].
    norm: float32 [], the gradient's norm before clipping.
  """

  loss: jax.Array
  norm: jax.Array
  is_beside_sum = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchClippedGrad:
  """Clips a whole batch's gradient when it is called; see `batch_clipped_grad`.

  Attributes: the arguments of `batch_clipped_grad`, with their meaning there.
  """

  loss_fn: Callable[..., jax.Array]
  l2_clip_norm: float
  axes: tuple[str, ...] = ()
  """Mesh axes along which devices compute parts of the loss, which are summed."""

  def __call__(
    self,
    params: typing.Params,
    batch: typing.Batch,
    *,
    key: jax.Array | None = None,
    is_padding_example: jax.Array | None = None,
  ) -> tuple[typing.Params, BatchAux]:
    """Returns the clipped gradient of the whole batch's loss.

    Args:
      params: pytree of floating-point arrays.
      batch: arrays with a common leading axis [batch].
      key: passed to the loss as its last argument; None for a loss without a
        key.
      is_padding_example: bool [batch]; the loss gets its negation and has to
        leave padding out itself.

    Returns:
      The gradient, float32 in the structure of `params`, of norm at most the
      clip norm; zero if the loss or the gradient is not finite. A `BatchAux`.

    Raises:
      ValueError: if it is called inside of `jax.shard_map`.
    """
    devices.refuse_batches(type(self).__name__, among=self.axes)
    batch, is_padding_example = clipping.split_padding(
      batch, is_padding_example
    )
    size = jnp.shape(jax.tree.leaves(batch)[0])[0]
    if is_padding_example is None:
      is_padding_example = jnp.zeros(size, bool)
    loss_calls.check_arguments(self.loss_fn, 3, key is not None)
    if key is not None:
      keys_lib.check("key", key)
    rest = () if key is None else (key,)
    loss, gradient = jax.value_and_grad(self.loss_fn)(
      params, batch, ~is_padding_example, *rest
    )
    gradient = jax.tree.map(lambda x: x.astype(jnp.float32), gradient)
    share = shares.Share(self.axes)
    loss, gradient = share.add((loss, gradient))
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    scale = jnp.minimum(1.0, self.l2_clip_norm / norm)
    clipped = jax.tree.map(lambda x: jnp.where(finite, scale * x, 0), gradient)
    # One device returns it: parts that cancel would round beyond the clip norm.
    return share.keep_on_first(clipped), BatchAux(
      loss.astype(jnp.float32), norm
    )

  def sensitivity(self, relation: Any) -> float:
    """Returns the L2 sensitivity: twice the clip norm, whatever the relation.

    Args:
      relation: a `dp_accounting.NeighboringRelation` or its name.

    Returns:
      2 x l2_clip_norm.

    Raises:
      ValueError: if it is not a neighbouring relation.
    """
    return sensitivity.batch(l2_clip_norm=self.l2_clip_norm, relation=relation)


def batch_clipped_grad(
  loss_fn: Callable[..., jax.Array], *, l2_clip_norm: float
) -> BatchClippedGrad:
  """Builds a function that clips the gradient of a whole coupled batch.

  This is the naive method of the Logit-DP paper, a baseline. In-batch negatives
  couple the examples, so the batch's gradient is clipped as one. The noise has
  to cover the whole gradient and does not shrink with the batch.

  Formal guarantee:
    Unit: any change of the batch, of one example or of all of them. For any two
    batches the two gradients lie in the ball of radius `l2_clip_norm`, so they
    are at most `2 * l2_clip_norm` apart. This holds under every neighbouring
    relation, for every loss, and up to float32 rounding. A loss or gradient
    that is not finite gives zero. The values in `BatchAux` are not protected.
    The public divisor is 1 for each step.

  >>> import jax.numpy as jnp
  >>> def loss_fn(params, batch, is_real):
  ...   return jnp.sum(jnp.where(is_real, params * batch["x"], 0.0))
  >>> grad_fn = batch_clipped_grad(loss_fn, l2_clip_norm=1.0)
  >>> gradient, aux = grad_fn(jnp.array(0.0), {"x": jnp.array([3.0, 4.0])})
  >>> print(gradient, aux.norm)
  1.0 7.0

  Args:
    loss_fn: `(params, batch, is_real)` to one scalar, where is_real is bool
      [batch] and False for padding; `(params, batch, is_real, key)` if a key
      is given in the call.
    l2_clip_norm: the clip norm, finite and at least 1e-12.

  Returns:
    A function `(params, batch, *, key=None, is_padding_example=None)` to
    `(gradient, BatchAux)`, with a method `sensitivity(relation)`.

  Raises:
    ValueError: if the clip norm is out of range.

  References:
    Kong, Munoz Medina and Ribero (2023), arXiv:2310.03104, section 5
    ("Naive-DP").
  """
  checks.clip_norm(l2_clip_norm)
  return BatchClippedGrad(loss_fn=loss_fn, l2_clip_norm=float(l2_clip_norm))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
  """Clips the gradient of the whole batch to norm C: Logit-DP's naive method.

  Formal guarantee:
    That of `batch_clipped_grad`: 2C for any unit and relation. The public
    divisor is 1 for each step.
  """

  def check(self, fn: Any) -> None:
    """Refuses nothing: the method clips every loss."""

  def sensitivity(self, fn: Any, relation: Any, unit: str) -> float:
    """Returns 2C."""
    del unit
    return sensitivity.batch(l2_clip_norm=fn.l2_clip_norm, relation=relation)

  def clipped_sum(
    self, fn: Any, params: typing.Params, batch: Any, pairs: batches.Pairs
  ) -> typing.Clipped:
    """Returns the gradient, its loss and norm [1]."""
    clipped = batch_clipped_grad(fn.total_loss, l2_clip_norm=fn.l2_clip_norm)
    gradient, aux = dataclasses.replace(clipped, axes=fn.axes)(
      params, batch, is_padding_example=pairs.is_padding
    )
    return gradient, aux.loss[None], aux.norm[None]
