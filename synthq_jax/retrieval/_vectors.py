"""What the kinds of search share: checks of vectors, scores in float64."""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float, Int

__all__ = ["Rows", "blocks", "check_search", "finite", "rescore"]

_BLOCK = 1 << 22  # numbers of one block of candidate vectors: 32 MiB in float64


class Rows(Protocol):
  """Vectors that may be larger than memory: arrays, memory maps, `Vectors`."""

  shape: tuple[int, ...]
  dtype: Any

  def __len__(self) -> int:
    """Returns the number of vectors."""

  def __getitem__(self, rows: Any) -> np.ndarray:
    """Returns the vectors of a slice, or at an array of positions."""


def finite(
  name: str, vectors: Float[np.ndarray, "row dim"]
) -> Float[np.ndarray, "row dim"]:
  """Returns finite float32 vectors, or says what is wrong."""
  array = np.ascontiguousarray(vectors, np.float32)
  if array.ndim != 2 or not np.isfinite(array).all():
    raise ValueError(
      f"expected finite {name} of two axes, got shape {array.shape}; look at "
      "the encoder"
    )
  return array


def blocks(vectors: Rows, size: int) -> Iterator[np.ndarray]:
  """Yields checked float32 vectors in order, `size` at a time."""
  for start in range(0, len(vectors), size):
    yield finite("vectors", vectors[start : start + size])


def check_search(queries: np.ndarray, k: int, dim: int) -> None:
  """Refuses a search for nothing, or with vectors of another encoder."""
  if k < 1 or queries.shape[1] != dim:
    raise ValueError(
      f"expected k >= 1 and queries of dim={dim}, got "
      f"k={k} and dim={queries.shape[1]}; use the encoder of the index"
    )


def rescore(
  queries: Float[np.ndarray, "query dim"],
  vectors: Rows,
  at: Int[np.ndarray, "query k"],
) -> Float[np.ndarray, "query k"]:
  """Returns the inner products with the documents at `at`, in float64."""
  rows = max(1, _BLOCK // max(1, at.shape[1] * queries.shape[1]))
  scores = np.zeros(at.shape)
  for start in range(0, len(queries), rows):
    part = slice(start, start + rows)
    scores[part] = np.einsum(
      "qd,qkd->qk",
      queries[part].astype(np.float64),
      vectors[at[part]].astype(np.float64),
    )
  return scores
