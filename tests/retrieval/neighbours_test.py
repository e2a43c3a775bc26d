"""Neighbours and their scores, against scikit-learn's functions."""

import numpy as np
import pytest

from synthq_jax.retrieval import neighbours

sklearn_metrics = pytest.importorskip(
  "sklearn.metrics", reason="scikit-learn is the oracle"
)


@pytest.mark.parametrize("classes", [2, 5])
def test_scores_are_those_of_scikit_learn(classes):
  rng = np.random.default_rng(classes)
  labels = rng.integers(0, classes, 200)
  predicted = np.where(
    rng.random(200) < 0.6, labels, rng.integers(0, classes, 200)
  )
  predicted[predicted == 1] = 0  # a class that is never predicted
  counts = neighbours.confusion(labels, predicted, classes)
  names = list(range(classes))
  want = sklearn_metrics.confusion_matrix(labels, predicted, labels=names)
  np.testing.assert_array_equal(counts, want)
  got = neighbours.scores_of(counts)
  for average, found in (
    (None, (got.precision, got.recall, got.f1)),
    ("macro", (got.macro_precision, got.macro_recall, got.macro_f1)),
  ):
    *want, _ = sklearn_metrics.precision_recall_fscore_support(
      labels, predicted, labels=names, average=average, zero_division=0
    )
    np.testing.assert_allclose(found, want, rtol=1e-12)
  accuracy = sklearn_metrics.accuracy_score(labels, predicted)
  assert got.accuracy == pytest.approx(accuracy, rel=1e-12)


def test_neighbours_are_those_of_scikit_learn_without_the_row_itself():
  from sklearn import neighbors

  vectors = np.random.default_rng(0).normal(size=(60, 8))
  vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
  oracle = neighbors.NearestNeighbors(n_neighbors=4).fit(vectors)
  want = oracle.kneighbors(vectors, return_distance=False)[:, 1:]
  np.testing.assert_array_equal(neighbours.nearest(vectors, 3), want)


def test_each_neighbour_is_a_prediction_of_its_own():
  # The first has its class's two others beside it, the stray only strangers.
  angles = np.array([0.0, 0.1, 0.2, 0.3])
  vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1)
  labels = np.array([0, 0, 1, 0])
  got = neighbours.score(vectors, labels, k=2, num_classes=2)
  # 0: {1, 2}, 1: {0, 2}, 2: {1, 3}, 3: {2, 1}
  assert got.confusion == ((3, 3), (2, 0))
  assert got.accuracy == 3 / 8


def near(kind):
  """Vectors with cosines near 1."""
  noise = np.random.default_rng(0).normal(size=(200, 64))
  vectors = noise[0] + 0.02 * noise
  return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(kind)


def test_vectors_in_float16_have_the_neighbours_of_their_values():
  """Their products in float16 were two numbers: 1% of neighbours were right."""
  vectors = near(np.float16)
  expected = neighbours.nearest(vectors.astype(np.float64), 5)
  assert (neighbours.nearest(vectors, 5) == expected).mean() > 0.99


@pytest.mark.parametrize(
  "vectors, k, words",
  [
    (np.ones((3, 2)), 3, "k in .1, 3., got k=3"),
    (np.ones((3, 2)), 0, "got k=0"),
    (np.full((3, 2), np.nan), 1, "diverged"),
  ],
)
def test_what_has_no_neighbours_is_refused(vectors, k, words):
  with pytest.raises(ValueError, match=words):
    neighbours.nearest(vectors, k)
