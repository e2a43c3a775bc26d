"""Noised vectors: sensitivity attained, noise of the right size, true claims."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.stats

from synthq_jax import optim
from synthq_jax.federated import noised_vectors
from synthq_jax.privacy import statement

KEY = jax.random.key(5)
CENTRES = np.eye(4, 6, dtype=np.float32)
PUBLIC = statement.none()


def some(count, dim=6, seed=0):
  rng = np.random.default_rng(seed)
  return noised_vectors.unit(rng.normal(size=(count, dim)))


def exact_rows(vectors, capacity=12, key=KEY):
  return noised_vectors.rows(
    vectors, capacity=capacity, noise_multiplier=0.0, key=key
  )


def exact_cells(vectors, units):
  return noised_vectors.cells(
    vectors, units, CENTRES, noise_multiplier=0.0, key=KEY
  )


# Sensitivity.


@pytest.mark.parametrize("length", [1.0, 1e6])
def test_one_vector_more_moves_the_rows_by_one_however_long_it_is(length):
  others, one = some(7), length * some(1, seed=1)
  before = exact_rows(others).vectors
  after = exact_rows(np.concatenate([others, one])).vectors
  assert np.linalg.norm(after - before) == pytest.approx(1.0, rel=1e-6)


def test_a_replaced_vector_moves_the_rows_by_two_at_most():
  others, one = some(7), some(1, seed=1)
  first = exact_rows(np.concatenate([others, one])).vectors
  second = exact_rows(np.concatenate([others, -5 * one])).vectors
  assert np.linalg.norm(first - second) == pytest.approx(2.0, rel=1e-6)


def check_places():
  """Removing the first vector leaves no trace in where the others stand."""
  capacity, draws = 6, 1200
  keys = jax.random.split(KEY, draws)
  vectors = some(4)
  for kept in (vectors, vectors[1:]):  # the last one, with and without a first
    places = [exact_rows(kept, capacity, key).places[-1] for key in keys]
    counts = np.bincount(places, minlength=capacity)
    assert scipy.stats.chisquare(counts).pvalue > 1e-6


def test_a_vector_stands_anywhere_with_equal_probability():
  check_places()


def test_rows_in_the_order_of_the_questions_are_caught(monkeypatch):
  def in_order(key, count):
    del key
    return np.arange(count)

  monkeypatch.setattr(jax.random, "permutation", in_order)
  with pytest.raises(AssertionError):
    check_places()


def test_more_vectors_than_rows_are_refused_without_saying_how_many():
  with pytest.raises(ValueError, match="capacity=4 vectors, got more"):
    exact_rows(some(5), capacity=4)


def units_of_one(count):
  return np.concatenate([np.zeros(count, int), [1, 1]])


@pytest.mark.parametrize("count", [1, 50])
@pytest.mark.parametrize("same_cell", [True, False])
def test_one_unit_more_moves_the_cells_by_one_at_most(count, same_cell):
  vectors = np.resize(CENTRES[:1] if same_cell else CENTRES, (count, 6))
  others = some(2, seed=3)
  both = np.concatenate([100 * vectors, others])
  after = exact_cells(both, units_of_one(count))
  moved = np.linalg.norm(after - exact_cells(others, np.ones(2, int)))
  assert moved == pytest.approx(1.0, rel=1e-6)


def test_clipping_vectors_instead_of_units_is_caught():
  cells = noised_vectors.cells

  def planted(vectors, units, *rest, **options):
    return cells(vectors, np.arange(len(units)), *rest, **options)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(noised_vectors, "cells", planted)
    with pytest.raises(AssertionError):
      test_one_unit_more_moves_the_cells_by_one_at_most(50, same_cell=True)


SIZES = (1, 2, 3, 7, 8, 9, 31, 257)


def between_centres(count, dim, seed=0):
  """Units that are as near to one centre as to another, but for rounding."""
  rng = np.random.default_rng(seed)
  centres = noised_vectors.unit(rng.normal(size=(40, dim)))
  pairs = 2 * rng.integers(20, size=count)
  return noised_vectors.unit(centres[pairs] + centres[pairs + 1]), centres


def check_units_between_centres(count, dim):
  """Whether the others' cells stay when one comes, goes, or all are moved."""
  vectors, centres = between_centres(count, dim)
  units = np.arange(count)
  chosen = noised_vectors.nearest(vectors, centres)

  def sums(rows):
    return noised_vectors.cells(
      vectors[rows], units[rows], centres, noise_multiplier=0.0, key=KEY
    )

  for removed in sorted({0, count // 2, count - 1}):
    rest = np.delete(units, removed)
    assert np.linalg.norm(sums(units) - sums(rest)) <= 1.00001
    np.testing.assert_array_equal(
      noised_vectors.nearest(vectors[rest], centres), chosen[rest]
    )
  turned = np.random.default_rng(1).permutation(count)
  np.testing.assert_array_equal(
    noised_vectors.nearest(vectors[turned], centres), chosen[turned]
  )


@pytest.mark.parametrize("dim", [6, 96, 97])
@pytest.mark.parametrize("count", SIZES)
def test_a_unit_moves_no_other_between_cells_that_are_equally_near(count, dim):
  check_units_between_centres(count, dim)


def test_products_that_round_with_the_number_of_units_are_caught(monkeypatch):
  def planted(vectors, centres):
    order = slice(None, None, -1 if len(vectors) % 2 else 1)  # of the sum
    products = (vectors[:, None] * centres).astype(np.float32)[..., order]
    return np.argmax(np.cumsum(products, axis=2)[..., -1], axis=1)

  monkeypatch.setattr(noised_vectors, "nearest", planted)
  with pytest.raises(AssertionError):
    check_units_between_centres(31, 96)


def test_the_nearest_centre_has_the_largest_product():
  vectors, centres = 3 * some(500, dim=96), some(40, dim=96, seed=1)
  found = noised_vectors.nearest(vectors, centres)
  np.testing.assert_array_equal(found, np.argmax(vectors @ centres.T, axis=1))
  for scale in (1e-30, 1e30):
    np.testing.assert_array_equal(
      noised_vectors.nearest(scale * vectors, scale * centres), found
    )


def test_sums_are_rounded_after_the_noise_and_not_before():
  """A sum of thousands has 1,000 times the rounding error of one vector."""
  many, one = np.repeat(some(1), 60_000, axis=0), some(1, seed=1)
  seen = []
  for vectors in (many, np.concatenate([many, one])):
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(noised_vectors, "_noised", lambda table, *_: table)
      units = np.arange(len(vectors))
      seen.append(
        noised_vectors.cells(
          vectors, units, CENTRES[:1], noise_multiplier=1.0, key=KEY
        )
      )
  assert np.linalg.norm(seen[1] - seen[0]) == pytest.approx(1.0, abs=1e-9)


def test_cells_are_the_sums_of_what_is_nearest_to_each_centre():
  vectors = some(30)
  expected = np.zeros((4, 6))
  for vector in vectors:
    expected[np.argmax(CENTRES @ vector)] += vector
  np.testing.assert_allclose(
    exact_cells(vectors, np.arange(30)), expected, atol=1e-6
  )


def test_short_units_are_not_made_longer():
  half = 0.5 * CENTRES[:1]
  np.testing.assert_allclose(exact_cells(half, [0])[0], half[0])


# Noise.


def has_std(values, std):
  """Whether a chi-squared test of the variance accepts the value `std`."""
  statistic = np.sum((np.asarray(values, np.float64) / std) ** 2)
  low, high = scipy.stats.chi2.interval(1 - 1e-6, np.size(values))
  return low <= statistic <= high


def noise_of(release, key=KEY):
  """The noise alone: of 200 rows of which one is taken, or of empty cells."""
  if release == "rows":
    vectors = np.ones((1, 100), np.float32)
    noised = noised_vectors.rows(
      vectors, capacity=200, noise_multiplier=3.0, key=key
    )
    return np.delete(noised.vectors, noised.places, axis=0)
  nothing = np.zeros((0, 100), np.float32)
  centres = np.ones((200, 100), np.float32)
  return noised_vectors.cells(
    nothing, np.zeros(0, int), centres, noise_multiplier=3.0, key=key
  )


def check_noise(release):
  noise = noise_of(release)
  assert has_std(noise, 3.0)
  assert not has_std(noise, 2.7)
  assert not has_std(noise, 3.3)
  sample = noise.reshape(-1) / 3.0
  assert scipy.stats.kstest(sample, "norm").pvalue > 1e-5


@pytest.mark.parametrize("release", ["rows", "cells"])
def test_the_noise_is_gaussian_and_its_std_right_to_a_tenth(release):
  check_noise(release)


@pytest.mark.parametrize("release", ["rows", "cells"])
def test_noise_for_half_of_the_sensitivity_is_caught(monkeypatch, release):
  def halved(*, l2_sensitivity, **options):
    return privatize(l2_sensitivity=l2_sensitivity / 2, **options)

  privatize = optim.privatize
  monkeypatch.setattr(optim, "privatize", halved)
  with pytest.raises(AssertionError):
    check_noise(release)


def test_the_vector_is_in_its_row_under_the_noise():
  rng = np.random.default_rng(0)
  vectors = noised_vectors.unit(rng.normal(size=(20, 50)))
  noised = noised_vectors.rows(
    vectors, capacity=40, noise_multiplier=0.01, key=KEY
  )
  rest = noised.vectors[noised.places] - vectors
  assert has_std(rest, 0.01)
  assert len(set(noised.places.tolist())) == 20


@pytest.mark.parametrize("release", ["rows", "cells"])
def test_another_key_draws_independent_noise(release):
  first, second = noise_of(release), noise_of(release, jax.random.key(6))
  first, second = first[:199].reshape(-1), second[:199].reshape(-1)
  bound = 5 / math.sqrt(first.size)
  assert abs(np.corrcoef(first, second)[0, 1]) < bound


# Claims.


def gaussian_epsilon(mu, delta):
  """Closed form of one Gaussian: N(0, 1) against N(mu, 1)."""
  cdf = scipy.stats.norm.cdf

  def excess(epsilon):
    left = cdf(mu / 2 - epsilon / mu)
    return left - math.exp(epsilon) * cdf(-mu / 2 - epsilon / mu) - delta

  return scipy.optimize.brentq(excess, 0, 300)


def promise(**changes):
  options = dict(
    identifier="run/a/round 0",
    unit="query",
    mechanism="vectors with noise",
    capacity=100,
    noise_multiplier=1.5,
    delta=1e-4,
    relation="ADD_OR_REMOVE_ONE",
    encoder=PUBLIC,
  )
  return noised_vectors.promise(**(options | changes))


@pytest.mark.parametrize(
  ("relation", "moved"), [("ADD_OR_REMOVE_ONE", 1), ("REPLACE_ONE", 2)]
)
@pytest.mark.parametrize("noise", [0.4, 1.5])
def test_epsilon_is_that_of_one_gaussian(relation, moved, noise):
  made = promise(relation=relation, noise_multiplier=noise)
  exact = gaussian_epsilon(moved / noise, 1e-4)
  assert exact <= made.epsilon <= 1.001 * exact + 1e-3
  assert (made.unit, made.relation) == ("query", relation)


def test_rounds_compose_to_one_larger_gaussian():
  rounds = [promise(identifier=f"run/a/round {i}") for i in range(4)]
  whole = statement.compose(rounds)
  exact = gaussian_epsilon(math.sqrt(4) / 1.5, 1e-4)
  assert exact <= whole.epsilon <= 1.001 * exact + 2e-3
  assert whole.epsilon == pytest.approx(promise(releases=4).epsilon, rel=1e-6)


def test_an_encoder_trained_without_privacy_leaves_no_claim():
  assert promise(encoder=statement.non_private()).epsilon == math.inf


def test_the_releases_of_a_private_encoder_are_added():
  encoder = promise(identifier="encoder", mechanism="training")
  whole = promise(encoder=encoder)
  exact = gaussian_epsilon(math.sqrt(2) / 1.5, 1e-4)
  assert exact <= whole.epsilon <= 1.001 * exact + 2e-3
  assert len(whole.ledger) == 2


def test_an_encoder_that_reads_the_questions_moves_every_row():
  """Why a promise asks what is promised about the encoder."""

  def centred(vectors):  # stands for any training on all of them
    return noised_vectors.unit(vectors - vectors.mean(axis=0))

  alike = CENTRES[:1] + 0.1 * some(7)
  vectors = np.concatenate([alike, -CENTRES[:1]])
  before = exact_rows(centred(vectors[:7])).vectors
  after = exact_rows(centred(vectors)).vectors
  assert np.linalg.norm(after - before) > 2


@pytest.mark.parametrize("noise", [0.0, 1e-9, 0.049])
def test_next_to_no_noise_claims_nothing(noise):
  made = promise(noise_multiplier=noise)
  assert made.epsilon == math.inf
  assert made.unit == "query"
  limit = promise(noise_multiplier=noised_vectors.LEAST_NOISE)
  assert 200 < limit.epsilon < 300


def test_delta_is_below_one_over_the_bound_by_default():
  assert promise(delta=None).delta == 1 / 200


# Centres.


def test_centres_find_planted_directions():
  rng = np.random.default_rng(0)
  planted = np.eye(3, 8)
  vectors = planted[rng.integers(3, size=300)]
  vectors = noised_vectors.unit(vectors + 0.05 * rng.normal(size=(300, 8)))
  cosines = [
    np.max(noised_vectors.centres(vectors, 12, seed=s) @ planted.T, axis=0)
    for s in range(2)
  ]
  assert np.min(cosines) > 0.98


def test_centres_are_a_function_of_vectors_and_seed():
  make = functools.partial(noised_vectors.centres, some(50), 5)
  np.testing.assert_array_equal(make(seed=1), make(seed=1))
  assert not np.array_equal(make(seed=1), make(seed=2))
  with pytest.raises(ValueError, match="at most 50"):
    noised_vectors.centres(some(50), 51, seed=0)


def test_vectors_that_are_not_finite_are_refused():
  bad = jnp.full((1, 6), jnp.nan)
  with pytest.raises(ValueError, match="look at the encoder"):
    exact_rows(bad)
  with pytest.raises(ValueError, match="look at the encoder"):
    exact_cells(bad, [0])
