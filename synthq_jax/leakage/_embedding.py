"""Cosines of texts' vectors, the nearest found exactly with faiss."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from synthq_jax.retrieval import index as index_lib

__all__ = ["Embedding", "Encode"]

Encode = Callable[[Sequence[str]], Float[np.ndarray, "text dim"]]
"""From texts to one float32 vector each, of length 1; 0 for an empty text."""

_BLOCK = 1024  # queries searched at a time
_LENGTH_ERROR = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Embedding:
  """Texts whose vectors point the same way: the cosine.

  Attributes:
    encode: from texts to vectors of length 1, see `retrieval.text_encoders`.
    threshold: the least cosine of a match, in (-1, 1]. Cosines of different
      encoders mean different things: calibrate it.
    top_k: the nearest targets of a query that are looked at, >= 1.
    name: for tables and files.
  """

  encode: Encode
  threshold: float = 0.9
  top_k: int = 100
  name: str = "embedding"

  def __post_init__(self):
    """Checks the fields."""
    if not -1 < self.threshold <= 1 or self.top_k < 1:
      raise ValueError(
        "expected threshold in (-1, 1] and top_k >= 1, got "
        f"threshold={self.threshold}, top_k={self.top_k}; change them"
      )

  def index(self, targets: Sequence[str]) -> "Index":
    """Encodes and indexes the smaller side.

    Args:
      targets: their texts.
    """
    return Index(self, targets)

  def scores(
    self, left: Sequence[str], right: Sequence[str]
  ) -> Float[np.ndarray, " pair"]:
    """Returns the cosines of the i-th texts.

    Args:
      left: texts.
      right: as many texts.
    """
    if not len(left):
      return np.zeros(0)
    sides = [self.unit(texts).astype(np.float64) for texts in (left, right)]
    return np.einsum("pd,pd->p", *sides)

  def unit(self, texts: Sequence[str]) -> Float[np.ndarray, "text dim"]:
    """Encodes texts and checks the vectors.

    Args:
      texts: at least one.

    Raises:
      ValueError: if a vector is neither of length 1 nor 0, or one is missing.
    """
    vectors = np.asarray(self.encode(texts), np.float32)
    lengths = np.linalg.norm(vectors, axis=-1)
    sound = (abs(lengths - 1) < _LENGTH_ERROR) | (lengths == 0)
    if (
      vectors.shape[:1] != (len(texts),) or vectors.ndim != 2 or not sound.all()
    ):
      raise ValueError(
        f"expected {len(texts)} vectors of length 1 from encode, got shape"
        f" {vectors.shape} and lengths up to {lengths.max(initial=0):.3g};"
        " normalise them"
      )
    return vectors


class Index:
  """Vectors of the targets."""

  def __init__(self, detector: Embedding, targets: Sequence[str]):
    self._detector = detector
    self._exact = (
      index_lib.exact(detector.unit(targets)) if len(targets) else None
    )

  def match(self, queries: Sequence[str]) -> tuple[np.ndarray, ...]:
    """Finds the nearest targets that are near enough.

    Args:
      queries: their texts.

    Returns:
      Positions of queries and of targets, and cosines.
    """
    parts = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))]
    if self._exact is not None and len(queries):
      vectors = self._detector.unit(queries)
      for start in range(0, len(queries), _BLOCK):
        parts.append(self._search(vectors[start : start + _BLOCK], start))
    return tuple(map(np.concatenate, zip(*parts, strict=True)))

  def _search(self, vectors: np.ndarray, start: int) -> tuple[np.ndarray, ...]:
    scores, places = self._exact.search(vectors, self._detector.top_k)
    rows, columns = np.nonzero(scores >= self._detector.threshold)
    right, scores = places[rows, columns], scores[rows, columns]
    order = np.lexsort((right, rows))
    return rows[order] + start, right[order], scores[order]
