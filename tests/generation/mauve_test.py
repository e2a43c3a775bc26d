"""MAUVE against its formula, and what a measure of distributions must do."""

import importlib.util

import numpy as np
import pytest

from synthq_jax.generation import mauve

_OPTIONS = {"seed": 0, "featurizer": "made up"}


def _sample(seed, count=400, *, centre=0.0, dim=8):
  """Vectors of one distribution, or of one far from it."""
  noise = np.random.default_rng(seed).normal(size=(count, dim))
  return (noise + centre * np.eye(dim)[0]).astype(np.float32)


def _score(first, second, **changes):
  return mauve.from_vectors(first, second, **{**_OPTIONS, **changes}).score


def _divergence(p, q):
  seen = p > 0
  return float(np.sum(p[seen] * np.log(p[seen] / q[seen])))


def _trapezoids(x, y):
  order = np.argsort(x, kind="stable")
  x, y = np.asarray(x)[order], np.asarray(y)[order]
  return float(np.sum(np.diff(x) * (y[1:] + y[:-1]) / 2))


def _oracle(p, q, scaling=5.0):
  """The area under the divergence curve of two histograms."""
  x, y = [1.0], [0.0]
  for weight in np.linspace(1e-6, 1 - 1e-6, 25):
    mixed = weight * p + (1 - weight) * q
    x.append(np.exp(-scaling * _divergence(q, mixed)))
    y.append(np.exp(-scaling * _divergence(p, mixed)))
  x, y = [*x, 0.0], [*y, 1.0]
  return (_trapezoids(x, y) + _trapezoids(y, x)) / 2


def test_the_score_is_the_area_under_the_curve():
  """Four clusters that no clustering can miss, so that P and Q are known."""
  shares = {"p": (16, 12, 8, 4), "q": (4, 4, 16, 16)}
  rng = np.random.default_rng(0)
  centres = np.eye(4, dtype=np.float32) * 100
  vectors = [
    np.repeat(centres, counts, axis=0) + rng.normal(size=(40, 4)) * 1e-3
    for counts in shares.values()
  ]
  found = mauve.from_vectors(*vectors, seed=1, featurizer="")
  assert found.num_buckets == 4
  p, q = (np.array(counts) / 40 for counts in shares.values())
  assert found.score == pytest.approx(_oracle(p, q), abs=1e-12)
  assert found.score != pytest.approx(_oracle(p, q, 10.0), abs=1e-3)


def test_halves_of_one_distribution_are_near_1_and_disjoint_ones_near_0():
  assert _score(_sample(0), _sample(1)) > 0.93
  assert _score(_sample(0), _sample(1, centre=50)) < 0.01
  assert _score(_sample(0), _sample(0)) == 1


def test_a_seed_decides_the_score():
  first, second = _sample(0), _sample(1)
  found = [mauve.from_vectors(first, second, **_OPTIONS) for _ in range(2)]
  assert found[0] == found[1]
  assert _score(first, second, seed=1) != found[0].score


def test_nothing_is_printed_and_the_threads_stay_as_they_were(capfd):
  import faiss

  before = faiss.omp_get_max_threads()
  faiss.omp_set_num_threads(2)
  try:
    mauve.from_vectors(_sample(0), _sample(1), **_OPTIONS)
    assert faiss.omp_get_max_threads() == 2
  finally:
    faiss.omp_set_num_threads(before)
  assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("count", [1, 3])
def test_few_and_equal_texts_are_alike(count):
  """The package itself says 0.75 where all points of its curve are ties."""
  same = np.ones((count, 4), np.float32)
  for vectors in (same, 0 * same):  # 0: empty texts
    assert _score(vectors, vectors) == 1


def test_vectors_that_are_not_finite_are_refused():
  with pytest.raises(ValueError, match="1 vectors of second .* at 1"):
    mauve.from_vectors(np.ones((3, 2)), [[1, 2], [np.nan, 1]], **_OPTIONS)


def test_without_the_package_the_message_says_how_to_get_it(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ImportError, match=r"pip install 'synthq_jax\[mauve\]'"):
    mauve.from_vectors(_sample(0), _sample(1), **_OPTIONS)
