"""Nearest neighbours among labelled vectors, and how well their labels agree."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from synthq_jax import checks

__all__ = ["Scores", "confusion", "nearest", "score", "scores_of"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
  """How well predictions agree with classes.

  Precision, recall and F1 are 0 where they would be 0 / 0. Macro means count
  every class once, however large it is; the accuracy counts every prediction
  once.

  Attributes:
    accuracy: the share of predictions that are right.
    precision: for each class, the right ones among predictions of it.
    recall: for each class, the right ones among predictions about it.
    f1: their harmonic mean, for each class.
    macro_precision: the mean over classes.
    macro_recall: the mean over classes.
    macro_f1: the mean over classes.
    confusion: counts, [class][prediction].
  """

  accuracy: float
  precision: tuple[float, ...]
  recall: tuple[float, ...]
  f1: tuple[float, ...]
  macro_precision: float
  macro_recall: float
  macro_f1: float
  confusion: tuple[tuple[int, ...], ...]


def nearest(
  vectors: Float[np.ndarray, "image dim"], k: int
) -> Int[np.ndarray, "image k"]:
  """Returns the k rows with the largest dot products, without the row itself.

  >>> nearest(np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), 1)[:, 0].tolist()
  [1, 0, 1]

  Args:
    vectors: of length 1, for cosines.
    k: at least 1 and below the number of rows.

  Returns:
    Rows, the nearest first; of equal ones the earlier.

  Raises:
    ValueError: if k is out of range, or a vector is not finite.
  """
  checks.within(f"[1, {len(vectors)})", k=k)
  if not np.isfinite(vectors).all():
    raise ValueError(
      "expected finite vectors, got some that are not: the training diverged,"
      " take a smaller learning rate"
    )
  vectors = np.asarray(vectors)
  # In float16 the cosines of neighbours are equal.
  vectors = vectors.astype(np.promote_types(vectors.dtype, np.float32))
  products = vectors @ vectors.T
  np.fill_diagonal(products, -np.inf)
  return np.argsort(-products, axis=1, kind="stable")[:, :k]


def confusion(
  labels: Int[np.ndarray, " image"],
  predictions: Int[np.ndarray, " image"],
  num_classes: int,
) -> Int[np.ndarray, "label prediction"]:
  """Counts predictions of each class about each class.

  >>> confusion(np.array([0, 1, 1]), np.array([0, 0, 1]), 2).tolist()
  [[1, 0], [1, 1]]

  Args:
    labels: true classes in [0, num_classes).
    predictions: predicted classes in the same range.
    num_classes: how many there are.
  """
  counts = np.zeros((num_classes, num_classes), np.int64)
  np.add.at(counts, (labels, predictions), 1)
  return counts


def scores_of(counts: Int[np.ndarray, "label prediction"]) -> Scores:
  """Returns the scores of a confusion matrix.

  >>> scores_of(np.array([[1, 0], [1, 1]])).precision
  (0.5, 1.0)

  Args:
    counts: from `confusion`.
  """
  counts = np.asarray(counts)
  right = np.diagonal(counts).astype(np.float64)
  precision = _share(right, counts.sum(0))
  recall = _share(right, counts.sum(1))
  f1 = _share(2 * right, counts.sum(0) + counts.sum(1))
  return Scores(
    accuracy=float(_share(right.sum(), counts.sum())),
    precision=_floats(precision),
    recall=_floats(recall),
    f1=_floats(f1),
    macro_precision=float(precision.mean()),
    macro_recall=float(recall.mean()),
    macro_f1=float(f1.mean()),
    confusion=tuple(tuple(map(int, row)) for row in counts),
  )


def score(
  vectors: Float[np.ndarray, "image dim"],
  labels: Int[np.ndarray, " image"],
  *,
  k: int,
  num_classes: int,
) -> Scores:
  """Scores vectors by the labels of their nearest neighbours among themselves.

  Each of the k neighbours of a vector counts as one prediction: there is no
  vote, so k neighbours of which two are right count as two thirds. It measures
  whether classes are apart, and leaves out whether they are where those of the
  training images were.

  Args:
    vectors: of length 1.
    labels: their classes, in [0, num_classes).
    k: neighbours of each.
    num_classes: how many classes there are.

  Raises:
    ValueError: as `nearest`.

  References:
    Kong, Munoz Medina and Ribero (2023), arXiv:2310.03104, section 5.
  """
  found = nearest(vectors, k)
  counts = confusion(
    np.repeat(labels, k), labels[found].reshape(-1), num_classes
  )
  return scores_of(counts)


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
  return np.where(whole > 0, part / np.maximum(whole, 1), 0.0)


def _floats(values: Sequence[float]) -> tuple[float, ...]:
  return tuple(map(float, values))
