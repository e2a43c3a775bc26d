"""The audit of the private step: right claims pass, broken noise does not."""

import dataclasses

import jax
import numpy as np
import pytest
from scipy import stats

from synthq_jax import optim
from synthq_jax.audit import lower_bounds
from synthq_jax.privacy import accounting, sampling
from synthq_jax.training import dp_step, loop
from tests.benchmarks import private_step


def without_noise(*, noise_multiplier, **arguments):
  del noise_multiplier
  return optim.privatize(noise_multiplier=0.0, **arguments)


def with_half_the_sensitivity(*, l2_sensitivity, **arguments):
  return optim.privatize(l2_sensitivity=l2_sensitivity / 2, **arguments)


def bound_of(mechanism, seed):
  return private_step.audit(mechanism, seed)[0].epsilon_one_run_fdp


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
@pytest.mark.parametrize(
  ("make", "least"),
  [(private_step.in_one_sum, 0.2), (private_step.in_poisson_batches, 0.05)],
)
def test_the_correct_training_passes_and_still_gives_something_away(
  make, least, epsilon
):
  mechanism = make(epsilon, 2000)
  bounds = [bound_of(mechanism, seed) for seed in range(3)]
  assert max(bounds) <= epsilon
  if epsilon > 1:  # the audit is awake
    assert np.median(bounds) > least * epsilon


def test_the_sums_are_the_coins_and_the_noise_that_was_claimed():
  mechanism = private_step.in_one_sum(4.0, 4000)
  _, inserted, sums = private_step.audit(mechanism, 5)
  noise = (sums[0] - inserted) / mechanism.noise_multiplier
  assert stats.kstest(noise, "norm").pvalue > 1e-4
  assert stats.kstest(noise / 1.1, "norm").pvalue < 0.05
  assert abs(inserted.mean() - 0.5) < 0.05


@pytest.mark.parametrize(
  ("privatize", "canaries"),  # at least twice what 9 of 10 seeds need
  [(without_noise, 400), (with_half_the_sensitivity, 3200)],
)
def test_the_audit_catches_noise_that_is_too_little(privatize, canaries):
  right = private_step.in_one_sum(4.0, canaries)
  wrong = dataclasses.replace(right, privatize=privatize)
  for seed in range(3):
    assert bound_of(right, seed) < 4.0 < bound_of(wrong, seed)


def test_the_gaussian_that_the_bound_assumes_covers_poisson_batches():
  mechanism = private_step.in_poisson_batches(4.0, 2000)
  one_step = sampling.FixedOrder(num_examples=1000, batch_size=1000)
  gaussian = accounting.noise_multiplier(
    epsilon=4.0, delta=1e-5, sampler=one_step, steps=1,
    relation="REPLACE_SPECIAL",
  )  # fmt: skip
  for delta in (1e-4, 4e-4):
    ours = accounting.epsilon(
      noise_multiplier=mechanism.noise_multiplier,
      sampler=mechanism.sampler,
      steps=mechanism.steps,
      delta=delta,
    )
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
  mechanism = private_step.in_one_sum(4.0, 400)
  records, inserted = private_step.make_records(400, 3)
  params = dp_step.train(
    dp_step.Training(
      grad_fn=optim.clipped_grad(private_step.loss_fn, l2_clip_norm=1.0),
      params={"first": np.zeros(400, np.float32)},
      records=records,
    ),
    dp_step.Mechanism(
      sampler=mechanism.sampler,
      noise_multiplier=mechanism.noise_multiplier,
      optimizer=dp_step.Optimizer(name="dp_adam", learning_rate=1.0, steps=1),
      batch_seed=(3,),
      noise_key=jax.random.key(3),
    ),
    loop.Files.below(tmp_path, "audit"),
    loop.Settings(),
  )
  scores = params["first"].astype(float)
  bound = lower_bounds.audit(
    scores[inserted], scores[~inserted], delta=1e-5, seed=0
  ).epsilon_one_run_fdp
  assert (bound > mechanism.epsilon) == bug
