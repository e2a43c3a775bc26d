"""Several records of one user as one example, whose gradient is clipped once."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from synthq_jax import typing

__all__ = ["WEIGHTS", "grouped", "mean_loss"]

WEIGHTS = "record_weights"
"""The field of a batch that says how much a user's records count."""


def grouped(
  records: Mapping[str, np.ndarray], owners: np.ndarray, most: int
) -> dict[str, np.ndarray]:
  """Puts the records of each user into one row.

  A user with fewer than `most` has one of its own again, with weight zero.

  >>> found = grouped({"x": np.array([5, 6, 7])}, np.array([1, 0, 1]), most=2)
  >>> print(found["x"].tolist(), found[WEIGHTS].tolist())
  [[6, 6], [5, 7]] [[1.0, 0.0], [0.5, 0.5]]

  Args:
    records: arrays [record, ...].
    owners: a number for each record's user, [record].
    most: K, public: the most records of a user.

  Returns:
    The fields as [user, most, ...], users in the order of their numbers, and
    `WEIGHTS`, float32 [user, most]: 1 / (the user's records), or 0.

  Raises:
    ValueError: if a user has more.
  """
  _, first, counts = np.unique(
    np.sort(owners), return_index=True, return_counts=True
  )
  if counts.max() > most:
    raise ValueError(
      f"expected at most {most} records of a user, got more: keep so many by a"
      " rule that looks at one user alone"
    )
  order = np.argsort(owners, kind="stable")
  slots = np.arange(most)
  rows = order[first[:, None] + np.minimum(slots, counts[:, None] - 1)]
  weights = (slots < counts[:, None]) / counts[:, None].astype(np.float32)
  fields = {name: values[rows] for name, values in records.items()}
  return {**fields, WEIGHTS: weights.astype(np.float32)}


def mean_loss(loss_fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
  """Returns the loss of users, the mean over the records of each.

  Formal guarantee:
    Unit: one user with all its records. `optim.clipped_grad` of this loss takes
    the gradient of a user's mean and clips it once, so that a user more or less
    moves the sum by the clip norm at most, whatever its records, in every
    strategy. Assumed: a row of `grouped` holds the records of one user and of no
    other, and no user has two rows.

  >>> loss_fn = mean_loss(lambda params, batch: params * batch["x"])
  >>> batch = grouped({"x": np.array([2.0, 4, 9])}, np.array([0, 0, 1]), most=2)
  >>> print(loss_fn(1.0, batch))
  [3. 9.]

  Args:
    loss_fn: `(params, batch)` or `(params, batch, key)` to losses [record], each
      of one record alone.

  Returns:
    The same for batches of `grouped`, to losses [user]. A user has one key, for
    the whole of its records.

  References:
    Charles et al. (2024), arXiv:2407.07737, algorithm 2 (DP-SGD-ULS).
  """

  def loss_of_users(
    params: typing.Params, batch: typing.Batch, *key: jax.Array
  ) -> jax.Array:
    weights = batch[WEIGHTS]  # [user, most]
    records = {
      name: jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), values)
      for name, values in batch.items()
      if name not in (WEIGHTS, "example_id")
    }
    losses = loss_fn(params, records, *key)
    return jnp.sum(weights * losses.reshape(weights.shape), axis=1)

  return loss_of_users
