"""Sums of noisy gradients, and what is taken out of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from synthq_jax import optim
from synthq_jax.optim import denoising

RNG = np.random.default_rng(0)


def low_rank(size, strength):
  u, v = RNG.normal(size=(2, size))
  return strength * np.outer(u, v) / np.linalg.norm(u) / np.linalg.norm(v)


def test_noise_alone_becomes_nothing_and_a_direction_above_it_stays():
  size, std = 200, 0.7
  noise = std * RNG.normal(size=(size, size))
  left = denoising.denoise(noise, 1.05 * std)
  assert np.linalg.norm(left) == 0.0
  signal = low_rank(size, 6 * std * size**0.5)
  estimate = np.asarray(denoising.denoise(signal + noise, std))
  error = np.linalg.norm(estimate - signal) / np.linalg.norm(signal)
  # In large matrices: 2 / s^2 - 1 / s^4 of the signal's square, s = 6.
  assert error**2 == pytest.approx(2 / 6**2 - 1 / 6**4, rel=0.3)
  cut = signal + noise
  np.testing.assert_allclose(denoising.denoise(cut, 0.0), cut, rtol=1e-5)
  tall = np.asarray(denoising.denoise(cut[:, :50], std))
  wide = np.asarray(denoising.denoise(cut[:, :50].T, std))
  np.testing.assert_allclose(tall, wide.T, atol=1e-4)


def test_dual_averaging_denoises_the_sum_and_not_a_step():
  size, std, steps = 60, 1.0, 25
  signal = low_rank(size, 1.0 * std * size**0.5)  # below the edge, 2 of these
  transform = denoising._dual_averaging(0.5, std)
  params = {"map": jnp.zeros((size, size))}
  state = transform.init(params)
  total, first = np.zeros((size, size)), None
  for step in range(steps):
    mean = signal + std * RNG.normal(size=(size, size))
    total += mean
    updates, state = transform.update(
      {"map": jnp.asarray(mean, jnp.float32)}, state, params
    )
    params = optax.apply_updates(params, updates)
    first = params["map"] if step == 0 else first
  expected = -0.5 * np.asarray(denoising.denoise(total, std * steps**0.5))
  np.testing.assert_allclose(params["map"], expected, atol=1e-3)
  goal = -0.5 * steps * signal
  error = np.linalg.norm(params["map"] - goal) / np.linalg.norm(goal)
  assert error < 0.45  # 5 times the noise's scale: about sqrt(2) / 5
  assert np.linalg.norm(first) < 0.1 * np.linalg.norm(goal)


def test_a_schedule_and_a_traced_number_are_refused_by_name():
  def build(**changed):
    numbers = dict(l2_sensitivity=1.0, noise_multiplier=1.0, denominator=4.0)
    numbers |= {"learning_rate": 1.0, "key": jax.random.key(0), **changed}
    return optim.dp_dual_averaging(**numbers).init(jnp.zeros(2))

  with pytest.raises(TypeError, match="number for noise_multiplier"):
    build(noise_multiplier=lambda step: 1.0)
  with pytest.raises(TypeError, match="number for learning_rate"):
    jax.jit(lambda rate: build(learning_rate=rate))(0.5)
