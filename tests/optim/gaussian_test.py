"""Gaussians: their bits, their transform, their distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.extend import random as jax_random

from synthq_jax.optim import noise as noise_lib

KEY = jax.random.fold_in(jax.random.key(1), 5)
SHAPES = [(), (1,), (3, 5), (7, 1, 13), (10_001,), (0, 4)]
COUNT = 2_000_000


def counters(shape):
  low = np.arange(np.prod(shape, dtype=int), dtype=np.uint32)
  return jnp.concatenate([jnp.zeros_like(low), low])


@pytest.mark.parametrize(
  ("key", "shape"),
  [*((KEY, shape) for shape in SHAPES), (jax.random.PRNGKey(3), (3, 5))],
)
def test_the_bits_are_those_of_jax_for_each_position(key, shape):
  expected = jax_random.threefry_2x32(jax.random.key_data(key), counters(shape))
  first, second = noise_lib._draw_words(key, shape)
  assert first.shape == second.shape == shape
  found = np.concatenate([np.ravel(first), np.ravel(second)])
  np.testing.assert_array_equal(found, expected)


def transformed(first, second, shared):
  words = [jnp.asarray(word, jnp.uint32) for word in (first, second, shared)]
  return np.asarray(jax.jit(noise_lib._transform_words)(*words), np.float64)


def test_the_transform_is_box_and_mullers_up_to_float32():
  rng = np.random.default_rng(0)
  first = rng.integers(0, 2**32, 100_000, dtype=np.uint64)
  first[:6] = [0, 1, 2, 3, 2**32 - 1, 2**32 - 2]
  second = rng.integers(0, 2**32, 100_000, dtype=np.uint64)
  shared = 2**31 + 12345
  found = transformed(first, second, shared)
  uniform = ((first >> 1).astype(float) + 0.5) * 2.0**-31
  own = ((second ^ shared) >> 1).astype(float)
  uniform = np.where(first < 2, (own + 0.5) * 2.0**-62, uniform)
  turn = second.astype(np.uint32).view(np.int32).astype(float) * 2.0**-32
  radius = np.sqrt(-2 * np.log(uniform))
  expected = radius * np.cos(2 * np.pi * turn)
  # An error e of the radius' square is one of e / (2 radius) of the radius.
  allowed = 1e-6 * np.maximum(radius, 1.0) + 1e-6 / np.maximum(radius, 1e-3)
  assert np.all(np.abs(found - expected) <= allowed)
  assert np.mean(np.abs(found - expected)) < 5e-7


def test_the_extremes_of_the_bits_are_finite():
  first, second, apart = (
    np.ravel(words)
    for words in np.meshgrid(
      [0, 1, 2**31, 2**32 - 1],
      [0, 2**30, 2**31 - 1, 2**31, 2**32 - 1],
      [0, 2**31, 2**32 - 1],
    )
  )
  found = np.abs(transformed(first, second, second ^ apart))
  assert np.all(found < np.where(first < 2, 9.35, 6.5))
  # No turn, or half of one.
  is_far = (first < 2) & ((second == 0) | (second == 2**31))
  assert np.all(found[is_far] > np.where(apart[is_far] == 0, 9.3, 6.55))


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_the_distribution_is_gaussian(implementation):
  key = jax.random.key(0, impl=implementation)
  draw = jax.jit(noise_lib.draw_standard, static_argnums=1)
  values = np.asarray(draw(key, (COUNT,)), np.float64)
  assert values.dtype == np.float64 and np.isfinite(values).all()
  assert scipy.stats.kstest(values, "norm").pvalue > 1e-4
  assert scipy.stats.kstest(1.01 * values, "norm").pvalue < 1e-4
  for limit in (1.0, 3.0, 4.0):  # both tails
    for tail in (values > limit, values < -limit):
      expected = scipy.stats.norm.sf(limit) * COUNT
      assert abs(tail.sum() - expected) < 5 * np.sqrt(expected)
  low, high = scipy.stats.chi2.interval(1 - 1e-6, COUNT)
  assert low <= np.sum(values**2) <= high
  assert not low <= np.sum((1.005 * values) ** 2) <= high


def test_neighbours_rows_and_keys_are_independent():
  values = np.asarray(noise_lib.draw_standard(KEY, (1000, 1000)))
  other = np.asarray(noise_lib.draw_standard(jax.random.key(6), (1000, 1000)))
  pairs = {
    "neighbours": (values[:, :-1], values[:, 1:]),
    "rows": (values[:-1], values[1:]),
    "keys": (values, other),
  }
  for a, b in pairs.values():
    for power in (1, 2):
      a_power, b_power = a.reshape(-1) ** power, b.reshape(-1) ** power
      assert abs(np.corrcoef(a_power, b_power)[0, 1]) < 5e-3


def test_it_is_compiled_into_one_pass():
  def mean(key, total):
    return (total + noise_lib.draw_standard(key, total.shape)) / 3.0

  total = jnp.zeros((64, 1024))
  compiled = jax.jit(mean).lower(jax.random.key(0), total).compile()
  temporaries = compiled.memory_analysis().temp_size_in_bytes
  assert temporaries < total.nbytes / 8
