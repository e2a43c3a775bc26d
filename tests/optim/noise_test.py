"""Correlated noise: its matrix, its distribution, and what it asks for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from synthq_jax import optim
from synthq_jax.optim import noise as noise_lib
from synthq_jax.privacy import accounting, gaussian, sampling

STEPS, BANDS = 7, 3
PARAMS = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(4)}


def banded(steps, bands):
  sampler = sampling.CyclicPoisson.with_margin(
    num_examples=100, expected_batch_size=1, cycle_length=STEPS
  )
  return optim.banded(sampler=sampler, steps=steps, bands=bands)


def strategy(noise):
  """C: banded Toeplitz, every column divided by its norm."""
  c = np.zeros((noise.steps, noise.steps))
  for band, value in enumerate(noise.coefficients):
    c += value * np.eye(noise.steps, k=-band)
  return c / np.linalg.norm(c, axis=0)


def draw(noise, key, steps, tree=PARAMS):
  """The noise of all steps, [step, coordinate]."""
  state, rows = noise.init(tree), []
  for step in range(steps):
    drawn, state = noise.draw(key, jnp.array(step), tree, state)
    rows.append(np.concatenate([np.ravel(x) for x in jax.tree.leaves(drawn)]))
  return np.stack(rows)


@pytest.mark.parametrize("bands", [1, BANDS, STEPS])
def test_the_strategy_times_the_noise_is_independent_noise(bands):
  noise = banded(steps=STEPS, bands=bands)
  key = jax.random.key(3)
  fresh = draw(optim.iid(), key, STEPS)
  correlated = draw(noise, key, STEPS)
  np.testing.assert_allclose(
    strategy(noise) @ correlated, fresh, rtol=1e-4, atol=1e-5
  )
  if bands == 1:
    np.testing.assert_array_equal(correlated, fresh)


def test_records_that_keep_their_distance_have_sensitivity_one_each_time():
  """And closer ones have more: the distance is needed."""
  c = strategy(banded(steps=STEPS, bands=BANDS))
  np.testing.assert_allclose(np.linalg.norm(c, axis=0), 1.0)
  for gap in range(1, STEPS):
    both = np.linalg.norm(c[:, 0] + c[:, gap])
    if gap >= BANDS:
      np.testing.assert_allclose(both, np.sqrt(2.0))
      assert not np.any(c[:, 0] * c[:, gap])
    else:
      assert both > 1.1 * np.sqrt(2.0)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 1, 3, 4), (5, 7, 2, 1)])
def test_entries_of_every_axis_have_noise_of_their_own(impl, shape):
  """Attention kernels have three axes, convolutions four."""
  drawn = noise_lib.draw_standard(jax.random.key(2, impl=impl), shape)
  assert len(np.unique(drawn)) == drawn.size


def test_noise_beyond_the_last_step_is_refused_with_nan():
  noise = banded(steps=STEPS, bands=BANDS)
  drawn = draw(noise, jax.random.key(0), STEPS + 1)
  assert np.isfinite(drawn[:STEPS]).all() and np.isnan(drawn[STEPS]).all()


@pytest.mark.parametrize("longer", [2 * STEPS, STEPS + 1])
def test_a_training_that_is_made_longer_has_no_noise_to_go_on_with(longer):
  """Columns of the strategy that both trainings share would be too long."""
  first, second = (
    banded(steps=steps, bands=BANDS) for steps in (STEPS, longer)
  )
  rows = np.vstack(
    [strategy(first) @ np.eye(STEPS, longer), strategy(second)[STEPS:]]
  )
  assert np.linalg.norm(rows, axis=0).max() > 1.05
  key, state = jax.random.key(0), first.init(PARAMS)
  for step in range(STEPS):
    _, state = first.draw(key, step, PARAMS, state)
  drawn, _ = jax.jit(second.draw)(key, STEPS, PARAMS, state)
  assert all(np.isnan(x).all() for x in jax.tree.leaves(drawn))


@pytest.mark.parametrize("steps, bands", [(3, 0), (3, 4), (0, 1)])
def test_bands_out_of_range_are_refused(steps, bands):
  with pytest.raises(ValueError, match=f"bands={bands}, steps={steps}"):
    banded(steps=steps, bands=bands)


@pytest.mark.parametrize(
  "sampler",
  [
    sampling.Poisson.with_margin(num_examples=100, expected_batch_size=5),
    sampling.FixedOrder(num_examples=100, batch_size=5),
    sampling.CyclicPoisson.with_margin(
      num_examples=100, expected_batch_size=5, cycle_length=BANDS - 1
    ),
  ],
  ids=lambda sampler: type(sampler).__name__,
)
def test_a_sampler_whose_records_come_back_too_soon_is_refused(sampler):
  with pytest.raises(ValueError, match=r"draw batches with .*CyclicPoisson"):
    optim.banded(sampler=sampler, steps=STEPS, bands=BANDS)
  optim.banded(sampler=sampler, steps=STEPS, bands=1)
  with pytest.raises(TypeError, match="no epsilon is known"):
    optim.banded(sampler=(0, 1), steps=STEPS, bands=BANDS)


def test_noise_is_gaussian_far_out_and_ends_beyond_what_is_paid_for():
  """The last cell of sizes, which one of 2^31 numbers is in, has cells of its own."""
  rng, size = np.random.default_rng(0), 1 << 22
  own, shared = rng.integers(2**32, size=(2, size), dtype=np.uint32)
  drawn = noise_lib._transform_words(np.zeros(size, np.uint32), own, shared)
  for value in (6.6, 7.0, 7.5):
    found = np.sum(np.abs(drawn) > value)
    expected = size * 2 * stats.norm.sf(value) * 2**31
    assert abs(found - expected) < 4 * np.sqrt(expected)
  nothing = np.zeros(1, np.uint32)
  [largest] = noise_lib._transform_words(nothing, nothing, nothing)
  assert accounting._END < largest < 9.4


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_the_word_that_entries_share_is_none_of_theirs(impl):
  key = jax.random.key(5, impl=impl)
  words = jnp.concatenate(noise_lib._draw_words(key, (64,)))
  assert (
    len(np.unique(words)) == 128
  )  # an entry's two tell nothing of each other
  assert noise_lib._draw_shared_word(key) not in words
  other = noise_lib._draw_shared_word(jax.random.key(6, impl=impl))
  assert noise_lib._draw_shared_word(key) != other


def test_numbers_of_released_sums_end_beyond_what_is_paid_for(monkeypatch):
  bits = np.array([[0, 2**32 - 1, 2**31, 2**31 - 1]] * 2, np.uint32)
  monkeypatch.setattr(jax.random, "bits", lambda *_: bits)
  low, high, above, below = gaussian.normal_numbers(jax.random.key(0), 4)
  assert accounting._END < high == -low < 9.3
  assert below < 0 < above < 1e-9
