"""MAUVE against its formula, and what a measure of distributions must do."""

import importlib.util

import numpy as np
import pytest

from synthq_jax.generation import mauve
from synthq_jax.retrieval import text_encoders

_CONFIG = mauve.Config(seed=0)
_OPTIONS = {"config": _CONFIG, "featurizer": "made up"}


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


@pytest.mark.parametrize("scaling", [1.0, 5.0])
def test_the_score_is_the_area_under_the_curve(scaling):
  """Four clusters that no clustering can miss, so that P and Q are known."""
  shares = {"p": (40, 30, 20, 10), "q": (10, 10, 40, 40)}
  rng = np.random.default_rng(0)
  centres = np.eye(4, dtype=np.float32) * 100
  vectors = [
    np.repeat(centres, counts, axis=0) + rng.normal(size=(100, 4)) * 1e-3
    for counts in shares.values()
  ]
  config = mauve.Config(
    seed=1, num_buckets=4, scaling=scaling, explained_variance=0.999
  )
  found = mauve.from_vectors(*vectors, config=config, featurizer="")
  p, q = (np.array(counts) / 100 for counts in shares.values())
  assert sorted(zip(*found.histograms, strict=True)) == sorted(
    zip(p, q, strict=True)
  )
  assert found.score == pytest.approx(_oracle(p, q, scaling), abs=1e-12)
  assert found.score != pytest.approx(_oracle(p, q, 2 * scaling), abs=1e-3)
  smoothed = [(100 * one + 0.5) / 102 for one in (p, q)]
  assert found.smoothed == pytest.approx(_oracle(*smoothed, scaling), abs=1e-12)


def test_the_score_of_any_clustering_follows_from_its_histograms():
  found = mauve.from_vectors(_sample(0), _sample(1, centre=1.5), **_OPTIONS)
  expected = _oracle(*map(np.array, found.histograms))
  assert found.score == pytest.approx(expected, abs=1e-9)
  assert 0.1 < found.score < 0.9


def test_halves_of_one_distribution_are_near_1_and_disjoint_ones_near_0():
  assert _score(_sample(0), _sample(1)) > 0.93
  assert _score(_sample(0), _sample(1, centre=50)) < 0.01
  assert _score(_sample(0), _sample(0)) == 1


def test_the_score_falls_as_more_of_a_sample_is_replaced():
  rest, far = _sample(1), _sample(2, centre=6)
  scores = [
    _score(_sample(0), np.concatenate([far[:number], rest[number:]]))
    for number in (0, 50, 100, 200, 300, 400)
  ]
  assert scores == sorted(scores, reverse=True)
  assert min(-np.diff(scores)) > 0.02


def test_swapping_the_sets_changes_little():
  first, second = _sample(0), _sample(1, centre=1.5)
  assert _score(first, second) == pytest.approx(_score(second, first), abs=0.05)


def test_a_seed_decides_the_score():
  first, second = _sample(0), _sample(1)
  found = [mauve.from_vectors(first, second, **_OPTIONS) for _ in range(2)]
  assert found[0] == found[1]
  other = mauve.Config(seed=1)
  assert _score(first, second, config=other) != found[0].score


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


def test_the_result_says_what_it_depends_on():
  found = mauve.from_vectors(_sample(0, 90), _sample(1, 61), **_OPTIONS)
  assert (found.num_texts, found.num_buckets) == ((90, 61), 6)
  assert found.featurizer == "made up"
  assert [len(one) for one in found.histograms] == [6, 6]


@pytest.mark.parametrize("count", [1, 3])
def test_few_and_equal_texts_are_alike(count):
  """The package itself says 0.75 where all points of its curve are ties."""
  same = np.ones((count, 4), np.float32)
  for vectors in (same, 0 * same):  # 0: empty texts
    found = mauve.from_vectors(vectors, vectors, **_OPTIONS)
    assert (found.score, found.smoothed) == (1, 1)


def test_real_text_is_nearer_to_its_own_kind():
  """With the shipped encoder."""
  verbs = "return compute draw add sort merge".split()
  nouns = "array graph matrix queue token server".split()
  pairs = [f"{v} the {n} of a {m}" for v in verbs for n in nouns for m in nouns]
  order = np.random.default_rng(0).permutation(len(pairs))
  first, second = ([pairs[i] for i in order[s::2]] for s in (0, 1))
  other = [f"who was the king in {1000 + 3 * i}?" for i in range(len(first))]
  vectors = map(text_encoders.OwnEncoder().encode, (first, second, other))
  real, same_kind, another = vectors
  assert _score(real, same_kind) > 0.8
  assert _score(real, another) < 0.05


@pytest.mark.parametrize(
  "first, second, words",
  [
    (np.zeros((0, 2)), np.ones((3, 2)), "0 and 3"),
    (np.ones((3, 2)), np.ones((3, 4)), r"\(3, 2\) and \(3, 4\)"),
    (np.ones(3), np.ones((3, 4)), r"shapes \(3,\)"),
    (np.ones((3, 2)), [[1, 2], [np.nan, 1]], "1 vectors of second .* at 1"),
  ],
)
def test_vectors_that_cannot_be_compared_are_refused(first, second, words):
  with pytest.raises(ValueError, match=words):
    mauve.from_vectors(first, second, **_OPTIONS)


def test_more_clusters_than_vectors_are_refused():
  config = mauve.Config(seed=0, num_buckets=30)
  with pytest.raises(ValueError, match="num_buckets=30 vectors, got 10 and 12"):
    _score(_sample(0, 10), _sample(1, 12), config=config)


@pytest.mark.parametrize(
  "changes",
  [
    {"seed": -1},
    {"num_buckets": 1},
    {"scaling": 0.0},
    {"explained_variance": 1.0},
    {"restarts": 0},
    {"max_iterations": 0},
  ],
)
def test_settings_that_make_no_sense_are_refused(changes):
  (name, value), *_ = changes.items()
  with pytest.raises(ValueError, match=f"{name}={value}"):
    mauve.Config(**{"seed": 0, **changes})


def test_without_the_package_the_message_says_how_to_get_it(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ImportError, match=r"pip install 'synthq_jax\[mauve\]'"):
    mauve.from_vectors(_sample(0), _sample(1), **_OPTIONS)
