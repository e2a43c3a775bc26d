"""Splits rows into batches of few fixed shapes, by length, with padding trimmed.

A row's width depends on its own length alone, never on its neighbours, so that
a model's output for it does not depend on the rest of the collection.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from synthq_jax import checks

__all__ = ["LengthBatch", "bucket", "lengths", "split"]


class LengthBatch(NamedTuple):
  """Rows of one width; rows past `len(rows)` are padding."""

  rows: np.ndarray  # [count], positions in the original array
  tokens: np.ndarray  # [batch_size, width]


def bucket(length: int) -> int:
  """Rounds a length up to one of two widths per octave, 16 apart below 64.

  >>> [bucket(length) for length in (0, 16, 17, 65, 130, 300)]
  [16, 16, 32, 96, 192, 384]
  """
  octave = 1 << max(length - 1, 0).bit_length()
  step = max(16, octave // 4)
  return max(-(-length // step), 1) * step


def split(
  tokens: Int[np.ndarray, "row length"],
  batch_size: int | Callable[[int], int],
) -> Iterator[LengthBatch]:
  """Splits rows of tokens into batches, the longest rows first.

  A batch that does not fit in memory thus fails at once.

  Args:
    tokens: rows of tokens, 0 = padding at the end of a row.
    batch_size: number of rows of every batch, or a function from a width to it;
      the last batch of each width is padded with rows of zeros.

  Yields:
    Batches that together hold each row once.

  Raises:
    ValueError: if `tokens` is not a matrix or `batch_size` is below 1.
  """
  tokens = np.asarray(tokens)
  if tokens.ndim != 2:
    raise ValueError(
      f"tokens must have shape [row, length], got shape {tokens.shape}"
    )
  if not callable(batch_size):
    checks.at_least(1, batch_size=batch_size)
  full = tokens.shape[1]
  widths = np.array([bucket(length) for length in range(full + 1)])
  widths = np.minimum(widths, max(full, 1))[lengths(tokens)]  # [row]
  for width in sorted(set(widths.tolist()), reverse=True):
    members = np.flatnonzero(widths == width)
    size = batch_size(width) if callable(batch_size) else batch_size
    for start in range(0, len(members), size):
      rows = members[start : start + size]
      batch = np.zeros((size, width), np.int32)
      batch[: len(rows), :full] = tokens[rows, :width]
      yield LengthBatch(rows, batch)


def lengths(
  tokens: Int[np.ndarray, "row length"],
) -> Int[np.ndarray, " row"]:
  """Returns the length of each row without the padding at its end.

  >>> lengths(np.array([[5, 0, 7, 0], [0, 0, 0, 0]])).tolist()
  [3, 0]

  Args:
    tokens: rows of tokens, 0 = padding at the end of a row.
  """
  is_token = tokens != 0
  if not is_token.size:
    return np.zeros(len(tokens), int)
  from_end = np.argmax(is_token[:, ::-1], axis=1)
  return np.where(is_token.any(axis=1), tokens.shape[1] - from_end, 0)
