"""Rows of tokens that are equal."""

import numpy as np
from jaxtyping import Int

__all__ = ["first_equal"]


def first_equal(
  sentences: Int[np.ndarray, "sentence length"],
) -> Int[np.ndarray, " sentence"]:
  """Returns for each sentence the position of the first one equal to it.

  >>> first_equal(np.array([[5, 1], [7, 1], [5, 1]], np.int32)).tolist()
  [0, 1, 0]

  Args:
    sentences: tokens, 0 = padding at the end of a row.

  Returns:
    Positions.
  """
  firsts: dict[bytes, int] = {}
  rows = np.ascontiguousarray(sentences)
  return np.array(
    [firsts.setdefault(row.tobytes(), at) for at, row in enumerate(rows)],
    np.int32,
  )
