"""Rows of features cut to the width they need."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from synthq_jax.leakage.rerankers import interface
from synthq_jax.models import length_batches

__all__ = ["cut", "count", "widths"]


def count(features: interface.Features) -> int:
  """Returns the number of rows."""
  return len(next(iter(features.values())))


def widths(
  features: interface.Features, padded: Sequence[str]
) -> Int[np.ndarray, " row"]:
  """Returns the columns that each row needs, one of a few widths.

  >>> tokens = np.array([[5, 6, 0] + [0] * 37, [5] * 40])
  >>> widths({"tokens": tokens}, ("tokens",))
  array([16, 40])

  Args:
    features: of some rows; those that are padded have the same columns.
    padded: their names; where there are none all widths are 0.
  """
  needed = np.zeros(count(features), int)
  for name in padded:
    stands = features[name] != 0
    columns = stands.shape[1]
    last = columns - np.argmax(stands[:, ::-1], axis=1)
    lengths = np.where(stands.any(axis=1), last, 0)
    rounded = [length_batches.bucket(n) for n in range(columns + 1)]
    needed = np.maximum(needed, np.minimum(rounded, columns)[lengths])
  return needed


def cut(
  features: interface.Features,
  padded: Sequence[str],
  rows: Int[np.ndarray, " kept"],
  width: int,
  *,
  size: int | None = None,
) -> interface.Features:
  """Takes rows, drops columns of padding, and fills up with rows of zeros.

  Args:
    features: of all rows.
    padded: the features whose columns are cut.
    rows: those taken, in order.
    width: the columns that are kept.
    size: the number of rows that come back; those taken where not given.
  """
  missing = 0 if size is None else size - len(rows)

  def take(name: str, array: np.ndarray) -> np.ndarray:
    taken = array[rows, :width] if name in padded else array[rows]
    margins = [(0, missing)] + [(0, 0)] * (array.ndim - 1)
    return np.pad(taken, margins)

  return {name: take(name, array) for name, array in features.items()}
