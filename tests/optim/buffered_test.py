"""Noise with a few buffers, and batches of balls in bins."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import linalg

from synthq_jax import optim
from synthq_jax.optim import buffered, noise
from synthq_jax.privacy import claim, sampling

KEY = jax.random.key(4)
BINS = sampling.BallsInBins.with_margin(num_examples=600, cycle_length=7)
STEPS = 24  # in four cycles, the last of them cut


@pytest.fixture(name="made", scope="module")
def _made():
  return optim.blt(sampler=BINS, steps=STEPS, max_buffers=2)


def matrix(made):
  column = buffered.coefficients(STEPS, made.decays, made.scales)
  return linalg.toeplitz(column, np.zeros(STEPS))


def test_the_noise_is_that_of_the_inverse_matrix(made):
  tree = {"w": jnp.zeros((2, 3))}
  state, drawn, fresh = made.init(tree), [], []
  draw = jax.jit(made.draw)
  for step in range(STEPS):
    one, state = draw(KEY, step, tree, state)
    drawn.append(np.ravel(one["w"]))
    fresh.append(np.ravel(noise.iid().draw(KEY, step, tree)[0]["w"]))
  np.testing.assert_allclose(
    matrix(made) @ np.array(drawn), made.scale * np.array(fresh), atol=1e-4
  )
  assert np.isnan(draw(KEY, STEPS, tree, state)[0]["w"]).all()
  assert jax.tree.leaves(state)[0].shape == (made.buffers, 2, 3)


def test_no_record_moves_all_sums_further_than_the_claim_counts(made):
  """Formal guarantee: sqrt(k) at k batches, for every bin and every stop."""
  c, largest = matrix(made) / made.scale, 0.0
  for stop in range(1, STEPS + 1):
    for first in range(min(7, stop)):
      places = np.arange(first, stop, 7)
      signs = np.array(np.meshgrid(*[[1, -1]] * len(places))).reshape(
        len(places), -1
      )
      moved = np.linalg.norm(c[:stop, places] @ signs, axis=0).max()
      k = math.ceil(stop / 7)
      assert moved <= math.sqrt(k)
      largest = max(largest, moved / math.sqrt(k))
  assert largest > 0.998  # hardly less will do


def test_sums_have_less_noise_than_independent_noise_gives_them(made):
  inverse = made.scale * np.linalg.inv(matrix(made))
  error = np.linalg.norm(np.cumsum(inverse, axis=0)) / STEPS
  independent = np.linalg.norm(np.cumsum(np.eye(STEPS), axis=0)) / STEPS
  assert error < 0.8 * independent


def test_a_record_is_in_one_bin_and_in_each_of_its_batches():
  batches = [BINS.batch([5, 1], step) for step in range(21)]
  sets = [set(b.indices[~b.is_padding].tolist()) for b in batches]
  assert sets[:7] == sets[7:14] == sets[14:]
  assert sum(map(len, sets[:7])) == 600 == len(set().union(*sets[:7]))
  assert {set_.__len__() for set_ in sets} != {600 // 7}  # not of equal size
  again = BINS.batch([5, 1], 9)
  assert again.indices == batches[9].indices
  narrow = sampling.BallsInBins(
    num_examples=600, cycle_length=7, max_batch_size=85
  )
  cut, is_padding = narrow.batch([5, 1], 0)
  assert len(cut) == 85
  assert set(cut[~is_padding].tolist()) <= sets[0]
  assert narrow.overflow_delta(3) > 0.4 > 1e-11 > BINS.overflow_delta(3)


def test_a_pass_over_the_bins_costs_one_release():
  def promise(**fields):
    return claim.Claim(
      **{
        "sampler": BINS,
        "steps": STEPS,
        "noise_multiplier": 3.0,
        "l2_clip_norm": 1.0,
        **fields,
      }
    )

  whole = sampling.Poisson(
    num_examples=600, expected_batch_size=600, max_batch_size=601
  )
  assert promise().epsilon == pytest.approx(
    promise(sampler=whole, steps=4).epsilon, rel=1e-3
  )
  made = promise(noise_buffers=2).statement("a")
  assert made.ledger[0].sampler() == BINS
  poisson = sampling.Poisson.with_margin(
    num_examples=600, expected_batch_size=85
  )
  with pytest.raises(ValueError, match="BallsInBins"):
    promise(sampler=poisson, noise_buffers=2)


def test_other_samplers_and_numbers_are_refused():
  poisson = sampling.CyclicPoisson.with_margin(
    num_examples=600, expected_batch_size=20, cycle_length=7
  )
  with pytest.raises(TypeError, match="got CyclicPoisson"):
    optim.blt(sampler=poisson, steps=STEPS)
  for wrong in ({"steps": 0}, {"max_buffers": 11}):
    with pytest.raises(ValueError, match=next(iter(wrong))):
      optim.blt(**{"sampler": BINS, "steps": STEPS, **wrong})
  with pytest.raises(ValueError, match="never grows"):
    buffered.participation_norms(np.array([1.0, 0.2, 0.3]), 2)


def test_without_buffers_the_noise_is_independent():
  made = optim.blt(sampler=BINS, steps=STEPS, max_buffers=0)
  assert made.buffers == 0
  assert made.scale == pytest.approx(1.0, abs=1e-4)
  tx = optim.privatize(
    l2_sensitivity=1.0,
    noise_multiplier=1.0,
    denominator=1.0,
    key=KEY,
    noise=made,
  )
  total = jnp.zeros(4)
  drawn, _ = tx.update(total, tx.init(total))
  fresh, _ = noise.iid().draw(KEY, jnp.int32(0), total)
  np.testing.assert_allclose(drawn, fresh, rtol=1e-4)
