"""A check that the loss of one example does not depend on the others."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from synthq_jax import typing

__all__ = ["check_independence"]

_TOLERANCE = 1e-4


def check_independence(
  loss_fn: Callable[..., jax.Array],
  params: typing.Params,
  batch: typing.Batch,
) -> None:
  """Refuses a loss in which one example moves another example's loss.

  Per-example clipping bounds what one example does to the sum of gradients
  only if no example reaches into another's loss (batch norm, in-batch
  negatives, division by the batch's number of tokens). This replaces one
  example by another and compares the losses of the rest; and it compares each
  loss with the loss of the same example alone.

  It is a test at one point: passing is evidence, not proof. Use float32 (or
  wider) computations and a loss without dropout.

  >>> import jax.numpy as jnp
  >>> check_independence(
  ...     lambda params, batch: params * batch["x"],
  ...     jnp.array(2.0), {"x": jnp.array([1.0, 2.0])})

  Args:
    loss_fn: `(params, batch)` to losses [batch].
    params: the parameters.
    batch: arrays with a leading axis [batch], at least 2 different examples.

  Raises:
    ValueError: if another example's loss moves, or the batch cannot show it.
  """
  leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]
  size = leaves[0].shape[0]
  donor = _different_example(leaves, size)
  losses = _losses(loss_fn, params, batch)
  replaced = jax.tree.map(lambda x: jnp.asarray(x).at[0].set(x[donor]), batch)
  _compare(losses[1:], _losses(loss_fn, params, replaced)[1:], "replaced")
  for index in {0, donor, size - 1}:
    alone = jax.tree.map(lambda x, i=index: x[i : i + 1], batch)
    single = _losses(loss_fn, params, alone)
    _compare(losses[index : index + 1], single, "removed")


def _different_example(leaves: list[np.ndarray], size: int) -> int:
  """Returns the position of an example that differs from the first."""
  for index in range(1, size):
    if any((leaf[index] != leaf[0]).any() for leaf in leaves):
      return index
  raise ValueError(
    "expected a batch with 2 different examples, got none among batch="
    f"{size}: pass examples that differ from each other"
  )


def _losses(
  loss_fn: Callable[..., jax.Array],
  params: typing.Params,
  batch: typing.Batch,
) -> np.ndarray:
  size = jax.tree.leaves(batch)[0].shape[0]
  losses = np.asarray(loss_fn(params, batch), np.float64)
  if losses.shape != (size,):
    raise ValueError(
      f"expected losses of shape ({size},), got shape={losses.shape}: "
      "return one loss for each example"
    )
  return losses


def _compare(before: np.ndarray, after: np.ndarray, change: str) -> None:
  scale = np.maximum(np.abs(before), np.abs(after))
  moved = float(np.max(np.abs(after - before) / np.maximum(scale, 1e-6)))
  if not moved <= _TOLERANCE:
    raise ValueError(
      "expected independent losses, got a loss that moved by a relative "
      f"{moved:.1e} when other examples were {change}: clip this loss as a "
      "whole (batch_clipped_grad) or remove what couples its examples"
    )
