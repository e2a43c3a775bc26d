"""Claims about noise that changes from step to step."""

import dataclasses
import logging
import math

import numpy as np
import pytest
from jax_privacy import batch_selection
from scipy import optimize, stats

from synthq_jax.privacy import (
  accounting,
  claim,
  sampling,
  statement,
  terms,
  unit,
)

WHOLE = sampling.Poisson(
  num_examples=50, expected_batch_size=50, max_batch_size=51
)
SAMPLED = sampling.Poisson.with_margin(
  num_examples=2000, expected_batch_size=50
)

CYCLIC = sampling.CyclicPoisson.with_margin(
  num_examples=2000, expected_batch_size=50, cycle_length=4
)


def promise(schedule, sampler=SAMPLED, steps=60, **fields):
  return claim.Claim(
    sampler=sampler,
    steps=steps,
    noise_multiplier=schedule,
    l2_clip_norm=1.0,
    **fields,
  )


def gaussian_epsilon(noise, delta):
  """Balle and Wang (2018), theorem 8."""

  def excess(epsilon):
    a, b = 0.5 / noise, epsilon * noise
    return (
      stats.norm.cdf(a - b) - math.exp(epsilon) * stats.norm.cdf(-a - b) - delta
    )

  return optimize.brentq(excess, 0, 200)


@pytest.mark.parametrize("number", [3, 90])
def test_steps_of_whole_batches_add_up_with_their_own_noise(number):
  """Formal guarantee: no less than what all sums together really cost."""
  schedule = lambda step: 20.0 + 60.0 * (step / number) ** 2  # noqa: E731
  made = promise(schedule, WHOLE, steps=number)
  noise = sum(schedule(i) ** -2 for i in range(number)) ** -0.5
  true = gaussian_epsilon(noise, made.delta)
  assert true <= made.epsilon <= 1.08 * true + 1e-3
  assert len(made.statement("it").ledger) == min(number, 32)


def test_a_schedule_costs_between_its_least_and_its_most_noise():
  schedule = lambda step: 0.8 if step < 20 else 1.6  # noqa: E731
  epsilons = [promise(z).epsilon for z in (1.6, schedule, 0.8)]
  assert epsilons == sorted(set(epsilons))
  by_hand = accounting.composed_epsilon(
    [accounting.Run(SAMPLED, 0.8, 20), accounting.Run(SAMPLED, 1.6, 40)],
    delta=1 / 4000,
  )
  assert epsilons[1] == by_hand


def test_a_constant_schedule_is_the_constant():
  fixed, made = promise(1.1), promise(lambda step: 1.1)
  assert made.epsilon == fixed.epsilon
  assert made.statement("a") == fixed.statement("a")


@pytest.mark.parametrize(
  "sampler",
  [
    sampling.FixedOrder(num_examples=2000, batch_size=50),
    sampling.CyclicPoisson.with_margin(
      num_examples=2000, expected_batch_size=50, cycle_length=4
    ),
  ],
)
def test_where_a_record_may_be_in_any_step_the_least_noise_counts(sampler):
  """One loud step in a cycle is enough: it may be everybody's."""
  relation = "REPLACE_SPECIAL"
  made = promise(
    lambda step: 1.0 if step == 7 else 9.0, sampler, relation=relation
  )
  assert made.epsilon == promise(1.0, sampler, relation=relation).epsilon


def test_a_step_without_noise_claims_nothing():
  words = terms.EXAMPLES.but(without_noise="No noise.")
  made = promise(lambda step: float(step != 3), words=words)
  assert made.epsilon == math.inf
  assert made.statement("a").notes == ("No noise.",)


@pytest.mark.parametrize(
  "fields, hint",
  [
    ({"noise_bands": 8}, "CyclicPoisson"),
    ({"noise_bands": 0}, "CyclicPoisson"),
    ({"noise_bands": 5, "sampler": CYCLIC}, "CyclicPoisson"),
  ],
  ids=str,
)
def test_correlated_noise_without_a_claim_has_no_epsilon(fields, hint):
  """It had the one of independent noise, and only a statement was refused."""
  fields = {"sampler": SAMPLED, "steps": 60, "l2_clip_norm": 1.0, **fields}
  with pytest.raises(ValueError, match=hint):
    claim.Claim(noise_multiplier=1.0, **fields)
  with pytest.raises(ValueError, match=hint):
    claim.calibrated(epsilon=8.0, **fields)


@pytest.mark.parametrize(
  "foreign",
  [
    batch_selection.BMinSepSampling(
      sampling_prob=0.1, min_sep=4, iterations=60
    ),
    batch_selection.BallsInBinsSampling(iterations=60, cycle_length=4),
    sampling.Poisson,
  ],
  ids=lambda x: type(x).__name__,
)
def test_nothing_is_claimed_for_samplers_of_others(foreign):
  fields = {"sampler": foreign, "steps": 60}
  for call in (
    lambda: claim.Claim(noise_multiplier=1.0, l2_clip_norm=1.0, **fields),
    lambda: claim.calibrated(epsilon=8.0, l2_clip_norm=1.0, **fields),
    lambda: accounting.epsilon(noise_multiplier=1.0, delta=1e-5, **fields),
    lambda: accounting.noise_multiplier(epsilon=8.0, delta=1e-5, **fields),
  ):
    with pytest.raises(TypeError, match="no epsilon is known for its batches"):
      call()


def test_correlated_noise_with_batches_that_fit_has_an_epsilon():
  made = promise(2.0, CYCLIC, noise_bands=4)
  assert 0 < made.epsilon == promise(2.0, CYCLIC).epsilon < math.inf
  assert made.statement("it").epsilon == made.epsilon


def test_a_delta_that_publishes_a_record_is_refused():
  with pytest.raises(ValueError, match="delta"):
    _ = promise(lambda step: 1.0 + step, delta=1e-3).epsilon


def test_the_ledger_composes_the_levels_again():
  made = promise(lambda step: 1.0 + (step // 20)).statement("training/1")
  assert len({one.identifier for one in made.ledger}) == len(made.ledger)
  assert sum(one.steps for one in made.ledger) == 60
  other = promise(1.0).statement("training/2")
  both = statement.compose([made, other])
  assert both.epsilon > max(made.epsilon, other.epsilon)
  assert len(both.ledger) == len(made.ledger) + 1


def test_a_classifier_s_promise_speaks_of_no_documents():
  """Without words of its own, too: it was "one query" and "the documents"."""
  explicit = promise(1.0, words=terms.EXAMPLES)
  calibrated = claim.calibrated(
    epsilon=8.0, sampler=SAMPLED, steps=60, l2_clip_norm=1.0
  )
  for made in (explicit, promise(1.0), calibrated):
    text = statement.in_words(made.statement("a"))
    for word in ("document", "query", "queries", "vocabulary"):
      assert word not in text
    assert "one example" in text
  assert promise(1.0).statement("a") == explicit.statement("a")
  own = terms.Terms(mechanism="clipped")
  assert "one example" in statement.in_words(
    promise(1.0, words=own).statement("a")
  )


@pytest.mark.parametrize("noise", [1.0, lambda step: 1.0])
@pytest.mark.parametrize("steps", [0, 3 * 2000 / 64, 5.0])
def test_a_claim_about_no_number_of_steps_is_refused(noise, steps):
  """93.75 steps were claimed as 93; a loop takes 94."""
  sampler = sampling.Poisson.with_margin(
    num_examples=4000, expected_batch_size=64
  )
  made = claim.Claim(
    sampler=sampler, steps=steps, noise_multiplier=noise, l2_clip_norm=1.0
  )
  with pytest.raises(ValueError, match="an integer steps"):
    made.epsilon  # noqa: B018
  with pytest.raises(ValueError, match="an integer steps"):
    made.statement("it")


def test_models_on_the_same_batches_cost_more_than_they_add_up_to():
  """A record is in the batches of all of them, or of none."""
  sampler = sampling.Poisson.with_margin(
    num_examples=4000, expected_batch_size=256
  )

  def make(noise_multiplier):
    return claim.Claim(
      sampler=sampler,
      steps=60,
      noise_multiplier=noise_multiplier,
      l2_clip_norm=1.0,
    )

  each = [make(1.0).statement(f"model/{i}") for i in range(3)]
  together = make(1.0 / math.sqrt(3)).epsilon  # sums of norm sqrt(3)
  found = statement.compose(each).epsilon, together
  assert [f"{x:.1f}" for x in found] == ["4.9", "10.2"]


def test_a_unit_of_more_records_than_a_group_is_refused():
  """The words said "up to 8 queries", the numbers were those of four."""
  grouped = dataclasses.replace(SAMPLED, group_size=4)
  words = terms.QUERIES.but(unit=unit.user(8))
  with pytest.raises(ValueError, match="give the sampler group_size=8"):
    promise(1.0, grouped, words=words)
  for sampler in (SAMPLED, dataclasses.replace(SAMPLED, group_size=8)):
    promise(1.0, sampler, words=words)  # SAMPLED: a record is a user
  with pytest.raises(TypeError, match="expected words of privacy.terms"):
    promise(1.0, words=unit.QUERY)


def test_epochs_that_draw_the_same_batches_cost_more_and_are_logged(
  caplog, monkeypatch
):
  """Four epochs of 15: a record of the first is in each of them."""
  monkeypatch.setattr(sampling, "_first_taken", {})
  sampler = sampling.Poisson.with_margin(
    num_examples=4000, expected_batch_size=256
  )
  claimed = claim.calibrated(
    epsilon=3.0, sampler=sampler, steps=60, l2_clip_norm=1.0
  )
  true = promise(claimed.noise_multiplier / 2, sampler, steps=15)
  assert claimed.epsilon <= 3.0
  assert 8.9 < true.epsilon < 8.95

  records = {"x": np.zeros((4000, 1))}

  def take(step):
    sampler.take(records, sampler.batch([5, 1], step))

  with caplog.at_level(logging.WARNING):
    take(0)  # to look at shapes
    for step in range(15):
      take(step)
    for step in range(10, 20):  # resumed
      take(step)
    assert not caplog.records
    take(0)
  [record] = caplog.records
  assert "number steps over all epochs" in record.message


def test_batches_that_may_be_equal_by_chance_are_not_logged(caplog):
  sampler = sampling.Poisson(
    num_examples=3, expected_batch_size=1, max_batch_size=3
  )
  with caplog.at_level(logging.WARNING):
    for step in range(200):
      sampler.take({"x": np.zeros(3)}, sampler.batch(7, step))
  assert not caplog.records
