"""Sums over parts of a batch: one noise, one step, one sensitivity."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from synthq_jax import optim
from synthq_jax.privacy import sampling

KEY = jax.random.key(2)
SAMPLER = sampling.Poisson.with_margin(
  num_examples=40, expected_batch_size=12, multiple_of=4
)
X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32) * 5


def linear(w, batch):
  return batch["x"] @ w


GRAD = optim.clipped_grad(linear, l2_clip_norm=1.0)
JITTED = jax.jit(GRAD)
W = jnp.zeros(3)


def private(noise_multiplier):
  return optim.privatize(
    l2_sensitivity=1.0,
    noise_multiplier=noise_multiplier,
    denominator=12.0,
    key=KEY,
  )


def updates(tx, x, number=3, w=W):
  """All updates of the parts of some draws, one after the other."""
  state, update, found = tx.init(w), jax.jit(tx.update), []
  for step in range(number):
    drawn = SAMPLER.batch(9, step)
    for part in sampling.split(drawn, 4):
      total, _ = JITTED(W, SAMPLER.take({"x": x}, part))
      made, state = update(total, state, w)
      found.append(np.asarray(made))
  return np.array(found)


def test_parts_make_the_step_that_the_whole_batch_makes():
  found = updates(optim.accumulate(private(2.0), parts=4), X)
  tx = private(2.0)
  state = tx.init(W)
  for step in range(3):
    total, _ = JITTED(W, SAMPLER.take({"x": X}, SAMPLER.batch(9, step)))
    whole, state = tx.update(total, state)
    np.testing.assert_allclose(found[4 * step + 3], whole, rtol=1e-5)
    assert not found[4 * step : 4 * step + 3].any()


def test_a_record_moves_the_whole_as_far_as_one_part():
  """Formal guarantee: the sum of all parts has the sensitivity of one."""
  tx = optim.accumulate(private(0.0), parts=4)
  record = SAMPLER.batch(9, 0).to_arrays(padding_index=-1)[0][0]
  assert record >= 0
  far, away = X.copy(), X.copy()
  far[record], away[record] = [1e5, 0, 0], [-1e5, 0, 0]
  moved = 12 * (updates(tx, far, 1)[-1] - updates(tx, away, 1)[-1])
  assert np.linalg.norm(moved) == pytest.approx(
    GRAD.sensitivity("REPLACE_ONE"), rel=1e-5
  )


def test_a_step_leaves_nothing_to_the_next():
  """What adding rounded away is of one batch, and had its noise."""
  tx = optim.accumulate(private(0.0), parts=2)
  state, made = tx.init(jnp.zeros(1)), []
  for part in (1.0, 2.0**-30, 0.0, 0.0):
    mean, state = tx.update(jnp.array([part]), state)
    made.append(12 * float(mean[0]))
    if len(made) == 1:
      assert state.total[0] == 1.0
  assert made[1] == pytest.approx(1.0) and made[3] == 0.0
  left = (state.part, state.total, state.lost)
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(left))


def test_a_mean_of_parts_would_change_the_claim_and_multisteps_can_be_told():
  sums = optax.MultiSteps(private(2.0), 4, use_grad_mean=False)
  means = optax.MultiSteps(private(2.0), 4)
  ours = updates(optim.accumulate(private(2.0), parts=4), X)
  np.testing.assert_allclose(updates(sums, X), ours, rtol=1e-4, atol=1e-6)
  assert np.abs(updates(means, X) - ours).max() > 0.1


def test_losses_masks_and_odd_numbers_of_parts_are_refused():
  tx = optim.accumulate(private(1.0), parts=2)
  with pytest.raises(ValueError, match="the clipped sum alone"):
    tx.update(GRAD(W, {"x": jnp.ones((2, 3))}), tx.init(W))
  with pytest.raises(ValueError, match="masked"):
    tx.init({"w": optax.MaskedNode()})
  for parts in (0, 1.5):
    with pytest.raises(ValueError, match="parts"):
      optim.accumulate(private(1.0), parts=parts)
  for parts in (0, 7, 400):
    with pytest.raises(ValueError, match=f"parts={parts}"):
      sampling.split(SAMPLER.batch(1, 0), parts)


def test_its_first_state_can_be_donated():
  tx = optim.accumulate(private(0.0), parts=2)
  _, state = jax.jit(tx.update, donate_argnums=1)(W + 1, tx.init(W))
  np.testing.assert_array_equal(state.total, W + 1)
