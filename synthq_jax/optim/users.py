"""Groups the records of a user into one example, whose gradient is clipped once."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from synthq_jax import checks, typing
from synthq_jax.privacy import sampling

__all__ = ["WEIGHTS", "grouped", "mean_loss"]

WEIGHTS = "record_weights"
"""Name of the batch field that holds the weights of a user's records."""


def grouped(
  records: Mapping[str, Any], owners: np.ndarray, most: int
) -> dict[str, Any]:
  """Puts the records of each user into one row.

  The records are those of all users, or of the users whom a step draws. Grouping
  what a sampler of records drew is another mechanism: with batches of 256 of
  4,000 records, a user with 8 of them is in 41% of the steps, not in 6.4%. For a
  user with fewer than `most` records the last one is repeated, with weight zero.

  >>> batch = grouped({"x": np.array([5, 6, 7])}, np.array([1, 0, 1]), most=2)
  >>> print(batch["x"].tolist(), batch[WEIGHTS].tolist())
  [[6, 6], [5, 7]] [[1.0, 0.0], [0.5, 0.5]]

  Args:
    records: arrays, or trees of arrays, [record, ...].
    owners: the number or the id of each record's user, [record].
    most: K, the largest number of records of a user; public.

  Returns:
    The fields as [user, most, ...], users in the order of their numbers; and
    `WEIGHTS`, float32 [user, most]: 1 / (the user's number of records), and 0
    for repeated records.

  Raises:
    ValueError: if a user has more than `most` records, a record has no owner
      (such as nan, "NULL" or -1), ids differ in zeros, case or spaces alone, owners
      and fields differ in their number of records, or the records are a drawn batch.
  """
  if sampling.IS_PADDING in records:
    raise ValueError(
      "expected all records of each user, got a drawn batch with"
      f" {sampling.IS_PADDING}: group the records first, and draw users"
    )
  owners = np.asarray(owners)
  _check_owners(owners)
  records = jax.tree.map(
    np.asarray, dict(records), is_leaf=lambda x: not isinstance(x, Mapping)
  )
  for path, values in jax.tree_util.tree_flatten_with_path(records)[0]:
    if values.shape[:1] != owners.shape:
      raise ValueError(
        "expected an owner for each record, got owners of shape"
        f" {owners.shape} and records{jax.tree_util.keystr(path)} of shape"
        f" {values.shape}: filter both alike"
      )
  _, first, counts = np.unique(
    np.sort(owners), return_index=True, return_counts=True
  )
  if counts.max(initial=0) > most:
    raise ValueError(
      f"expected at most {most} records of a user, got more: select {most} by a"
      " rule that looks at one user alone"
    )
  order = np.argsort(owners, kind="stable")
  slots = np.arange(most)
  rows = order[first[:, None] + np.minimum(slots, counts[:, None] - 1)]
  weights = (slots < counts[:, None]) / counts[:, None].astype(np.float32)
  fields = jax.tree.map(lambda values: values[rows], records)
  return {**fields, WEIGHTS: weights.astype(np.float32)}


def _check_owners(owners: np.ndarray) -> None:
  """Refuses missing owners, who would count as one user, and mixed ids."""
  is_missing, kinds, texts = owners != owners, set(), set()  # nan
  if owners.dtype.kind in "if":
    is_missing |= owners == -1  # as pandas.factorize numbers them
  elif owners.dtype.kind in "OSUT":  # bytes: h5py, tensorflow_datasets
    listed = owners.tolist()
    if all(isinstance(x, bytes) for x in listed):
      listed = [x.decode(errors="replace") for x in listed]
    is_missing = np.array([_is_no_owner(owner) for owner in listed], bool)
    kinds = {"text" if isinstance(x, str) else "numbers" for x in listed}
    texts = {x for x in listed if isinstance(x, str)}
  if is_missing.any():
    raise ValueError(
      "expected an owner for each record, got records without one, who would be"
      " one user together: leave them out"
    )
  if len(kinds) > 1:
    raise ValueError(
      f"expected owners of one type, got {', '.join(sorted(kinds))}: 7 and '7'"
      " may be one person, so convert all of them alike"
    )
  if len({x.strip().casefold().lstrip("0") for x in texts}) < len(texts):
    raise ValueError(
      "expected one id for each user, got some that differ in zeros, letter case or"
      " spaces alone: write them alike, or pass numbers if these are other people"
    )


def _is_no_owner(owner: Any) -> bool:
  """Tests for what tables hold where there is no owner: None, nan, "NULL"."""
  if isinstance(owner, str):
    return owner.strip().lower() in {"", *checks.NO_ID}
  if owner is None or isinstance(owner, int) and owner == -1:
    return True
  try:
    return bool(owner != owner)
  except TypeError:  # pandas.NA is neither equal nor unequal
    return True


def mean_loss(loss_fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
  """Builds the loss of users: the mean loss of each user's records.

  Formal guarantee:
    Unit: one user with all its records. `optim.clipped_grad` of this loss clips
    the gradient of a user's mean loss once. Adding or removing a user therefore
    moves the sum by at most the clip norm, whatever the user's records are, in
    every strategy. Assumed: a row of `grouped` holds the records of one user
    and of no other, and no user has two rows.

  >>> loss_fn = mean_loss(lambda params, batch: params * batch["x"])
  >>> batch = grouped({"x": np.array([2.0, 4, 9])}, np.array([0, 0, 1]), most=2)
  >>> print(loss_fn(1.0, batch))
  [3. 9.]

  Args:
    loss_fn: `(params, batch)` or `(params, batch, key)` to losses [record],
      each of which depends on one record alone.

  Returns:
    The same function for batches of `grouped`, to losses [user]. All records of
    a user share one key.

  References:
    Charles et al. (2024), arXiv:2407.07737, algorithm 2 (DP-SGD-ULS).
  """

  def loss_of_users(
    params: typing.Params, batch: typing.Batch, *key: jax.Array
  ) -> jax.Array:
    if WEIGHTS not in batch:
      raise ValueError(
        f"expected a batch of users.grouped, with {WEIGHTS}, got"
        f" {sorted(batch)}: group the records by their owners first"
      )
    weights = batch[WEIGHTS]  # [user, most]
    records = {
      name: jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), values)
      for name, values in batch.items()
      if name not in (WEIGHTS, "example_id")
    }
    losses = loss_fn(params, records, *key)
    if getattr(losses, "shape", None) != (weights.size,):
      raise ValueError(
        "expected a loss_fn that returns losses [record], got"
        f" {getattr(losses, 'shape', type(losses).__name__)} for {weights.size}"
        " records: no mean over the batch, and no second value"
      )
    return jnp.sum(weights * losses.reshape(weights.shape), axis=1)

  return loss_of_users
