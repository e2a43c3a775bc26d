"""Scores labelled vectors by the labels of their nearest neighbours."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from synthq_jax import checks

__all__ = ["Scores", "confusion", "nearest", "score", "scores_of"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
  """Accuracy, precision, recall and F1 of predictions.

  Precision, recall and F1 are 0 if they would be 0 / 0. Macro means count every
  class once, however large it is. The accuracy counts every prediction once.

  Attributes:
    accuracy: the share of correct predictions.
    precision: for each class, the share of correct ones among predictions of it.
    recall: for each class, the share of correct ones among predictions for its
      members.
    f1: the harmonic mean of precision and recall, for each class.
    macro_precision: the mean precision over classes.
    macro_recall: the mean recall over classes.
    macro_f1: the mean F1 over classes.
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
  """Finds for each row the k other rows with the largest dot products.

  >>> nearest(np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), 1)[:, 0].tolist()
  [1, 0, 1]

  Args:
    vectors: the vectors, of norm 1 for cosines.
    k: the number of neighbours, at least 1 and below the number of rows.

  Returns:
    Row numbers, the nearest first; equally near rows keep their order.

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
  # In float16 the cosines of several neighbours round to the same number.
  vectors = vectors.astype(np.promote_types(vectors.dtype, np.float32))
  products = vectors @ vectors.T
  np.fill_diagonal(products, -np.inf)
  return np.argsort(-products, axis=1, kind="stable")[:, :k]


def confusion(
  labels: Int[np.ndarray, " image"],
  predictions: Int[np.ndarray, " image"],
  num_classes: int,
) -> Int[np.ndarray, "label prediction"]:
  """Counts the predictions of each class for members of each class.

  >>> confusion(np.array([0, 1, 1]), np.array([0, 0, 1]), 2).tolist()
  [[1, 0], [1, 1]]

  Args:
    labels: true classes in [0, num_classes).
    predictions: predicted classes in the same range.
    num_classes: the number of classes.
  """
  counts = np.zeros((num_classes, num_classes), np.int64)
  np.add.at(counts, (labels, predictions), 1)
  return counts


def scores_of(counts: Int[np.ndarray, "label prediction"]) -> Scores:
  """Computes the scores of a confusion matrix.

  >>> scores_of(np.array([[1, 0], [1, 1]])).precision
  (0.5, 1.0)

  Args:
    counts: a matrix of `confusion`.
  """
  counts = np.asarray(counts)
  right = np.diagonal(counts).astype(np.float64)
  precision = _divide(right, counts.sum(0))
  recall = _divide(right, counts.sum(1))
  f1 = _divide(2 * right, counts.sum(0) + counts.sum(1))
  return Scores(
    accuracy=float(_divide(right.sum(), counts.sum())),
    precision=_to_floats(precision),
    recall=_to_floats(recall),
    f1=_to_floats(f1),
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

  Each of the k neighbours of a vector counts as one prediction. There is no vote,
  so three neighbours of which two are correct count as two thirds. The scores
  measure whether classes are separated. They do not measure whether the classes lie
  where those of the training images lie.

  Args:
    vectors: the vectors, of norm 1.
    labels: their classes, in [0, num_classes).
    k: the number of neighbours of each vector.
    num_classes: the number of classes.

  Raises:
    ValueError: as `nearest`.

  References:
    Kong, Munoz Medina and Ribero (2023), arXiv:2310.03104, section 5.1 (nearest
    neighbours; without a vote in the published code).
  """
  neighbours = nearest(vectors, k)
  counts = confusion(
    np.repeat(labels, k), labels[neighbours].reshape(-1), num_classes
  )
  return scores_of(counts)


def _divide(part: np.ndarray, total: np.ndarray) -> np.ndarray:
  return np.where(total > 0, part / np.maximum(total, 1), 0.0)


def _to_floats(values: Sequence[float]) -> tuple[float, ...]:
  return tuple(map(float, values))
