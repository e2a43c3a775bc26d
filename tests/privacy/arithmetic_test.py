"""Doubles are paid for: against a composition that keeps small probabilities."""

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution

from synthq_jax.privacy import (
  accounting,
  arithmetic,
  calculator,
  claim,
  reasons,
  sampling,
  statement,
)

NOISE, SHARE, STEPS, INTERVAL = 1.0, 0.005, 8192, 1e-2
ROOMY = sampling.Poisson(
  num_examples=20_000, expected_batch_size=100, max_batch_size=20_002
)


def power(values, low, count):
  """Convolves a distribution with itself: sums of positive terms, no transform."""
  result, start = np.array([1.0]), 0
  while count:
    if count & 1:
      result, start = kept(np.convolve(result, values), start + low)
    count >>= 1
    if count:
      values, low = kept(np.convolve(values, values), 2 * low)
  return result, start


def kept(values, low):
  there = np.nonzero(values > 1e-40)[0]
  return values[there[0] : there[-1] + 1], low + there[0]


@pytest.fixture(scope="module")
def composed():
  """Losses of both neighbours, their probabilities, and that of infinity."""
  one = privacy_loss_distribution.from_gaussian_mechanism(
    NOISE, sampling_prob=SHARE, value_discretization_interval=INTERVAL
  )
  sides = []
  for side in (one._pmf_remove, one._pmf_add):
    dense = side.to_dense_pmf()
    probabilities, low = power(np.array(dense._probs), dense._lower_loss, STEPS)
    losses = INTERVAL * (low + np.arange(len(probabilities)))
    sides.append((losses, probabilities, STEPS * dense._infinity_mass))
  return one, sides


def true_delta(epsilon, sides):
  deltas = []
  for losses, probabilities, infinite in sides:
    above = losses > epsilon
    gains = -np.expm1(epsilon - losses[above])
    deltas.append(infinite + gains @ probabilities[above])
  return max(deltas)


@pytest.mark.parametrize("delta", [1e-9, 1e-11, 3e-12])
def test_an_epsilon_holds_at_a_delta_near_rounding_errors(
  delta, composed, monkeypatch
):
  monkeypatch.setattr(accounting, "_bound_end_delta", lambda run, relation: 0.0)
  one, sides = composed
  run = accounting.Run(ROOMY, NOISE, STEPS)
  epsilon = accounting._compute_pld_epsilon(
    (run,), delta, "ADD_OR_REMOVE_ONE", INTERVAL
  )
  assert 0.3 * delta < true_delta(epsilon, sides) <= delta
  unpaid = one.self_compose(STEPS).get_epsilon_for_delta(delta)
  lost = true_delta(unpaid, sides) - delta
  assert 1e-14 < lost < arithmetic.RATE * STEPS  # less, the newer SciPy is


def test_a_usual_delta_pays_nothing():
  run = accounting.Run(ROOMY, NOISE, STEPS)
  assert arithmetic.subtract_rounding([run], 1e-5) == 1e-5
  assert arithmetic.subtract_rounding([run], 1e-15) == 0


def test_noise_for_a_delta_below_rounding_is_refused():
  """It was 8,143,028 times the sensitivity, since all else was infinite."""
  known = dict(epsilon=8.0, sampler=ROOMY, steps=161)
  with pytest.raises(ValueError, match="expected delta above 7.5e-14 for 161"):
    accounting.noise_multiplier(delta=1e-15, **known)
  assert 0.3 < accounting.noise_multiplier(delta=1e-12, **known) < 1


FULL = sampling.Poisson(
  num_examples=6000, expected_batch_size=256, max_batch_size=257
)
CYCLIC = sampling.CyclicPoisson(
  num_examples=6000, expected_batch_size=60, max_batch_size=80, cycle_length=10
)
INFINITE = {
  "no noise": (accounting.Run(ROOMY, 0.0, 10), 1e-6, "there is no noise"),
  "ends": (accounting.Run(ROOMY, 0.3, 161), 1e-12, "past the end of drawn"),
  "rounding": (accounting.Run(ROOMY, 20.0, 161), 1e-14, "in double precision"),
  "overflow": (accounting.Run(CYCLIC, 2.0, 100), 1e-9, "a batch overflows"),
}


@pytest.mark.parametrize("name", INFINITE)
def test_an_infinite_epsilon_has_its_reason(name):
  run, delta, reason = INFINITE[name]
  assert accounting.composed_epsilon([run], delta=delta) == math.inf
  assert reason in reasons.explain_infinite([run], delta=delta)


def test_a_finite_epsilon_has_no_reason():
  run = accounting.Run(ROOMY, 1.0, 161)
  assert not reasons.explain_infinite([run], delta=1e-12)


def test_the_calculator_says_why_epsilon_is_infinite():
  said = calculator.describe(
    num_examples=6000,
    batch_size=256,
    epochs=7,
    noise_multiplier=0.3,
    delta=1e-12,
  )
  assert said.count("epsilon inf: a record moves a sum past the end") == 2
  said = calculator.describe(
    num_examples=6000, batch_size=256, epochs=7, noise_multiplier=0.0
  )
  assert said.count("epsilon inf: there is no noise") == 2
  for line in said.splitlines():
    assert "\n" not in line


def test_a_statement_says_why_epsilon_is_infinite_although_there_is_noise():
  promise = claim.Claim(
    sampler=ROOMY,
    steps=161,
    noise_multiplier=0.3,
    l2_clip_norm=1.0,
    delta=1e-12,
  )
  text = statement.in_words(promise.statement("training"))
  assert "The reason: a record moves a sum past the end of drawn noise" in text


@pytest.mark.parametrize("epochs", [0.0, -1.0, float("nan"), float("inf")])
def test_the_calculator_refuses_epochs_that_are_no_number_of_passes(epochs):
  with pytest.raises(ValueError, match="expected epochs in"):
    calculator.describe(
      num_examples=2000, batch_size=64, epsilon=8.0, epochs=epochs
    )
