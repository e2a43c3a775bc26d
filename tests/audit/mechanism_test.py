"""The audit of the private step: right claims pass, broken noise does not."""

import dataclasses

import jax
import numpy as np
import pytest
from scipy import stats

from synthq_jax import optim
from synthq_jax.audit import lower_bounds, mechanism
from synthq_jax.privacy import accounting, sampling
from synthq_jax.training import dp_step, loop

DELTA = 1e-5


def one_shot(epsilon, records):
  """One noisy sum of all records."""
  everything = sampling.FixedOrder(num_examples=records, batch_size=records)
  return mechanism.Mechanism(epsilon=epsilon, delta=DELTA, sampler=everything)


def poisson(epsilon, records):
  """An epoch of Poisson batches."""
  sampler = sampling.Poisson.with_margin(
    num_examples=records, expected_batch_size=records // 50
  )
  return mechanism.Mechanism(
    epsilon=epsilon, delta=DELTA, sampler=sampler, steps=50
  )


def without_noise(*, noise_multiplier, **arguments):
  del noise_multiplier
  return optim.privatize(noise_multiplier=0.0, **arguments)


def with_half_the_sensitivity(*, l2_sensitivity, **arguments):
  return optim.privatize(l2_sensitivity=l2_sensitivity / 2, **arguments)


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
@pytest.mark.parametrize("training", [one_shot, poisson])
def test_the_correct_training_passes_and_still_gives_something_away(
  training, epsilon
):
  made = training(epsilon, 2000)
  found = [mechanism.audit(made, num_canaries=2000, seed=s) for s in range(3)]
  assert not any(one.violates for one in found)
  least = 0.2 if training is one_shot else 0.05
  if epsilon > 1:  # the audit is awake
    assert np.median([f.bounds.epsilon_one_run_fdp for f in found]) > (
      least * epsilon
    )


def test_the_releases_are_the_coins_and_the_noise_that_was_claimed():
  made = one_shot(4.0, 4000)
  found = mechanism.audit(made, num_canaries=3000, seed=5)
  noise = (found.releases[0] - found.inserted) / made.noise_multiplier
  assert stats.kstest(noise, "norm").pvalue > 1e-4
  assert stats.kstest(noise / 1.1, "norm").pvalue < 0.05
  assert abs(found.inserted.mean() - 0.5) < 0.05


def test_the_clip_norm_is_a_unit_and_changes_nothing_else():
  made = one_shot(4.0, 100)
  small = dataclasses.replace(made, l2_clip_norm=0.01)
  one, other = (
    mechanism.audit(m, num_canaries=100, seed=1).releases for m in (made, small)
  )
  np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
  ("privatize", "canaries"),  # at least twice what 9 of 10 seeds need
  [(without_noise, 400), (with_half_the_sensitivity, 3200)],
)
def test_the_audit_catches_noise_that_is_too_little(privatize, canaries):
  right = one_shot(4.0, canaries)
  wrong = dataclasses.replace(right, privatize=privatize)
  for seed in range(3):
    bounds = [
      mechanism.audit(made, num_canaries=canaries, seed=seed).bounds
      for made in (right, wrong)
    ]
    low, high = (bound.epsilon_one_run_fdp for bound in bounds)
    assert low < 4.0 < high


def test_the_gaussian_that_the_bound_assumes_covers_poisson_batches():
  made = poisson(4.0, 2000)
  at = {"sampler": made.sampler, "steps": made.steps, "delta": None}
  one_step = sampling.FixedOrder(num_examples=1000, batch_size=1000)
  gaussian = accounting.noise_multiplier(
    epsilon=4.0,
    delta=made.delta,
    sampler=one_step,
    steps=1,
    relation="REPLACE_SPECIAL",
  )
  for delta in (1e-4, 4e-4):
    at["delta"] = delta
    ours = accounting.epsilon(noise_multiplier=made.noise_multiplier, **at)
    assumed = accounting.epsilon(
      noise_multiplier=gaussian,
      delta=delta,
      sampler=one_step,
      steps=1,
      relation="REPLACE_SPECIAL",
    )
    assert ours <= assumed + 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True])
def test_a_whole_training_is_audited_as_its_pieces_are(
  tmp_path, monkeypatch, bug
):
  privatize = without_noise if bug else optim.privatize

  def sums(learning_rate, **arguments):
    del learning_rate
    return privatize(**arguments)

  monkeypatch.setattr(optim, "dp_adam", sums)
  number = 400
  made = one_shot(4.0, number)
  records, inserted = mechanism.make_records(number, number, 3)
  params = dp_step.train(
    dp_step.Training(
      grad_fn=optim.clipped_grad(mechanism.loss_fn, l2_clip_norm=1.0),
      params={"first": np.zeros(number + 1, np.float32)},
      records=records,
    ),
    dp_step.Mechanism(
      sampler=made.sampler,
      noise_multiplier=made.noise_multiplier,
      optimizer=dp_step.Optimizer(name="dp_adam", learning_rate=1.0, steps=1),
      batch_seed=(3,),
      noise_key=jax.random.key(3),
    ),
    loop.Files.below(tmp_path, "audit"),
    loop.Settings(progress=False),
  )
  scores = params["first"][:number].astype(float)
  bound = lower_bounds.audit(
    scores[inserted], scores[~inserted], delta=made.delta, seed=0
  ).epsilon_one_run_fdp
  assert (bound > made.epsilon) == bug
