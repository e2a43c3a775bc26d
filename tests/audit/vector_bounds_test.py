"""Bounds for noised vectors: attained, held, and useless without noise."""

import math

import numpy as np
import pytest
from scipy import stats

from synthq_jax.audit import vector_bounds


def nearest_is_right(vectors, deviation, draws, rng):
  """Monte Carlo success of the best attacker on equally likely candidates."""
  secret = rng.integers(len(vectors), size=draws)
  sent = vectors[secret] + deviation * rng.normal(size=(draws, len(vectors[0])))
  distances = np.sum((sent[:, None] - vectors[None]) ** 2, axis=-1)
  return np.mean(np.argmin(distances, axis=1) == secret)


def test_two_opposite_candidates_attain_the_bound():
  rng = np.random.default_rng(0)
  vectors = np.array([[1.0, 0.0], [-1.0, 0.0]])
  for deviation in (0.5, 1.0, 3.0):
    bound = vector_bounds.success(
      num_candidates=2, radius=1, standard_deviation=deviation
    )
    assert bound == pytest.approx(stats.norm.cdf(1 / deviation))
    found = nearest_is_right(vectors, deviation, 40_000, rng)
    assert abs(found - bound) < 0.01


@pytest.mark.parametrize("deviation", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("spread", [1.0, 0.2])
def test_the_best_attacker_stays_below_the_bound(deviation, spread):
  rng = np.random.default_rng(1)
  vectors = rng.normal(size=(20, 8))
  vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
  vectors = vectors[:1] + spread * vectors  # close together, far from zero
  radius = float(vector_bounds.enclosing_radius(vectors))
  bound = vector_bounds.success(
    num_candidates=20, radius=radius, standard_deviation=deviation
  )
  found = nearest_is_right(vectors, deviation, 20_000, rng)
  assert found < bound + 0.01
  if deviation > 0.5 * radius:  # and the bound says something
    assert bound < 0.7
  if deviation < 0.5 * radius:
    assert found > 0.1


def test_repeated_releases_count_as_less_noise():
  once = vector_bounds.success(
    num_candidates=50, radius=1, standard_deviation=0.5
  )
  often = vector_bounds.success(
    num_candidates=50, radius=1, standard_deviation=1, releases=4
  )
  assert once == often
  assert vector_bounds.information_bits(
    dim=3, radius=1, standard_deviation=1, releases=4
  ) == vector_bounds.information_bits(dim=3, radius=1, standard_deviation=0.5)


def test_without_noise_nothing_is_bounded_and_without_spread_all_is():
  silent = dict(radius=1.0, standard_deviation=0.0)
  assert vector_bounds.success(num_candidates=9, **silent) == 1
  assert vector_bounds.information_bits(dim=9, **silent) == math.inf
  still = dict(radius=0.0, standard_deviation=0.0)
  assert vector_bounds.success(num_candidates=9, **still) == pytest.approx(
    1 / 9
  )
  assert vector_bounds.information_bits(dim=9, **still) == 0


def test_the_bits_of_a_gaussian_source_attain_the_bound():
  """Its mutual information is known: log det of (noise + signal) over noise."""
  dim, deviation = 6, 0.4
  signal = np.eye(dim) / dim  # mean square 1 in all
  noise = deviation**2 * np.eye(dim)
  exact = 0.5 * (
    np.linalg.slogdet(signal + noise)[1] - np.linalg.slogdet(noise)[1]
  )
  found = vector_bounds.information_bits(
    dim=dim, radius=1, standard_deviation=deviation
  )
  assert found == pytest.approx(exact / math.log(2))


def test_radii_are_of_each_set():
  sets = np.array([[[0.0, 0.0], [2.0, 0.0]], [[5.0, 5.0], [5.0, 5.0]]])
  np.testing.assert_array_equal(vector_bounds.enclosing_radius(sets), [1, 0])


@pytest.mark.parametrize(
  "wrong",
  [
    {"num_candidates": 1},
    {"radius": -1.0},
    {"standard_deviation": float("nan")},
    {"releases": 0},
  ],
)
def test_what_makes_no_sense_is_refused(wrong):
  right = dict(num_candidates=2, radius=1.0, standard_deviation=1.0)
  with pytest.raises(ValueError, match=next(iter(wrong))):
    vector_bounds.success(**right | wrong)
  with pytest.raises(ValueError, match="dim"):
    vector_bounds.information_bits(dim=0, radius=1, standard_deviation=1)
