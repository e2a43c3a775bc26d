"""The noise of a sum that is released once: its key, its law."""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from synthq_jax import optim
from synthq_jax.privacy import gaussian

KEY = jax.random.key(5)
SIZE = 4000


def training_noise(key, steps=2):
  transform = optim.privatize(
    l2_sensitivity=1.0, noise_multiplier=1.0, denominator=1.0, key=key
  )
  zeros = jnp.zeros(SIZE)
  state, rows = transform.init(zeros), []
  for _ in range(steps):
    mean, state = transform.update(zeros, state)
    rows.append(np.asarray(mean))
  return rows


def test_bits_of_a_key_are_words_of_its_children():
  """Why a sum may not draw from the key that it was given."""
  words = jax.random.key_data(jax.random.split(KEY, 8))
  bits = jax.random.bits(KEY, (8,), np.uint32)
  np.testing.assert_array_equal(bits, words[:, 0] ^ words[:, 1])


def test_the_noise_of_a_sum_is_no_function_of_a_childs_words():
  words = np.asarray(jax.random.key_data(jax.random.split(KEY, 2 * SIZE)))
  high, low = (words[:, 0] ^ words[:, 1]).astype(np.uint64).reshape(2, SIZE)
  uniform = (((high << np.uint64(32)) | low) + 0.5) / 2.0**64
  told = scipy.stats.norm.isf(uniform)
  noise = gaussian.normal_numbers(KEY, SIZE)
  assert abs(np.corrcoef(told, noise)[0, 1]) < 5 / np.sqrt(SIZE)


def test_sums_and_trainings_of_a_key_and_its_children_are_independent():
  keys = [KEY, *jax.random.split(KEY, 3), jax.random.fold_in(KEY, 7)]
  rows = [gaussian.normal_numbers(key, SIZE) for key in keys]
  rows += [row for key in keys for row in training_noise(key)]
  apart = np.corrcoef(rows) - np.eye(len(rows))
  assert np.abs(apart).max() < 5 / np.sqrt(SIZE)


def test_the_noise_is_standard_normal():
  noise = gaussian.normal_numbers(KEY, 100_000)
  assert scipy.stats.kstest(noise, "norm").pvalue > 1e-3
