"""Claims for users: numbers against closed forms, words, ledger, joint claims."""

import dataclasses
import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats

from synthq_jax.privacy import (
  accounting,
  calculator,
  claim,
  ledger,
  sampling,
  statement,
  terms,
)
from synthq_jax.privacy import unit as unit_lib

N, BATCH, STEPS = 2_000, 64, 60


def queries_of(most, num=N, batch=BATCH, units=None):
  return sampling.Poisson.with_margin(
    num_examples=num,
    expected_batch_size=batch,
    group_size=most,
    num_units=units or -(-num // most),
  )


def promise(sampler, *, most=4, **changes):
  settings = {"steps": STEPS, "l2_clip_norm": 0.1, "noise_multiplier": 2.0}
  words = terms.QUERIES.but(unit=unit_lib.user(most))
  return claim.Claim(sampler=sampler, words=words, **(settings | changes))


def gaussian_noise(epsilon, delta):
  """The least noise of a Gaussian mechanism, in closed form.

  Balle and Wang (2018), arXiv:1805.06530, theorem 8.
  """
  cdf = scipy.stats.norm.cdf

  def excess(noise):
    half, shift = 1 / (2 * noise), epsilon * noise
    return cdf(half - shift) - np.exp(epsilon) * cdf(-half - shift) - delta

  return scipy.optimize.brentq(excess, 0.05, 50.0)


@pytest.mark.parametrize("most", [2, 4, 16])
def test_with_everybody_in_every_step_noise_grows_with_the_queries_of_a_user(
  most,
):
  exact = most * gaussian_noise(3.0, 1e-3)
  enough, less = (
    accounting.epsilon(
      noise_multiplier=share * exact,
      delta=1e-3,
      sampler=queries_of(most, num=160, batch=160),
      steps=1,
    )
    for share in (1.01, 0.999)
  )
  assert enough <= 3.0 < less


def test_users_with_one_query_have_the_claim_of_queries():
  known = {"steps": STEPS, "l2_clip_norm": 0.1, "epsilon": 8.0}
  plain = sampling.Poisson.with_margin(
    num_examples=N, expected_batch_size=BATCH
  )
  expected = claim.calibrated(sampler=plain, **known)
  words = terms.QUERIES.but(unit=unit_lib.user(1))
  for sampler in (
    plain,
    queries_of(1),
    calculator.make_user_samplers(
      num_examples=N, batch_size=BATCH, queries_per_user=1
    )["users"],
  ):
    found = claim.calibrated(sampler=sampler, words=words, **known)
    assert found.noise_multiplier == expected.noise_multiplier
    assert (found.epsilon, found.delta) == (expected.epsilon, expected.delta)


def test_a_claim_for_users_is_that_of_a_group_of_their_records():
  found = promise(queries_of(4), delta=1e-4).epsilon
  plain = sampling.Poisson(
    num_examples=N,
    expected_batch_size=BATCH,
    max_batch_size=queries_of(4).max_batch_size,
  )
  run = accounting.Run(plain, 2.0, STEPS)
  group = accounting.group_epsilon(
    [run], delta=1e-4, relation="ADD_OR_REMOVE_ONE", size=4
  )
  assert found == pytest.approx(group, rel=1e-9)
  single = accounting.epsilon(
    noise_multiplier=2.0, delta=1e-4, sampler=plain, steps=STEPS
  )
  assert found > 2 * single


def test_delta_follows_the_number_of_users():
  sampler = queries_of(4, units=900)
  assert promise(sampler).delta == 1 / 1_800
  with pytest.raises(ValueError, match="1/num_units = 0.00111"):
    _ = promise(sampler, delta=1 / 900).epsilon
  assert promise(sampler, delta=1 / 901).epsilon < math.inf  # above 1 / n


def test_two_users_are_a_group_of_twice_the_records():
  run = accounting.Run(queries_of(2), 3.0, STEPS)
  found = accounting.group_epsilon(
    [run], delta=1e-4, relation="ADD_OR_REMOVE_ONE", size=2
  )
  roomy = dataclasses.replace(queries_of(4), max_batch_size=200, num_units=None)
  four = accounting.epsilon(
    noise_multiplier=3.0, delta=1e-4, sampler=roomy, steps=STEPS
  )
  assert found == pytest.approx(four, rel=0.01)


def test_truncation_is_paid_for_by_the_whole_group():
  tight = sampling.Poisson(
    num_examples=N, expected_batch_size=BATCH, max_batch_size=100, group_size=16
  )
  tail = scipy.stats.binom.sf(100 - 16, N, BATCH / N)
  exact = STEPS * 16 * (BATCH / N) * tail
  assert tight.overflow_delta(STEPS) == pytest.approx(exact, rel=1e-6)
  assert promise(tight, delta=2e-4).epsilon == math.inf
  narrow = dataclasses.replace(tight, max_batch_size=64, group_size=90)
  assert narrow.overflow_delta(1) == pytest.approx(90 * BATCH / N)


def test_everybody_and_one_user_more_have_room():
  drawn = queries_of(4, num=40, batch=40)
  assert drawn.max_batch_size == 44
  assert drawn.overflow_delta(100) == 0


def test_the_ledger_keeps_what_a_user_is(tmp_path):
  path = tmp_path / ledger.NAME
  made = promise(queries_of(4)).enter(path, "finetune_dp/1")
  (read,) = ledger.read(path).values()
  assert read == made
  assert read.ledger[0].sampler() == queries_of(4)
  assert "for one user with up to 4 queries" in ledger.describe(path)
  said = statement.in_words(made)
  assert "The unit of protection is one user with up to 4 queries." in said
  assert "one user with up to 4 queries is added or removed" in said
  assert "at most 4 records, each drawn by itself" in said
  assert "How many users and private queries there are." in said
  assert "of which at most 4 are read, chosen by a keyed hash" in said


def test_claims_of_queries_say_nothing_of_groups(tmp_path):
  """So what was written before there were groups stays what it is, to a byte."""
  plain = sampling.Poisson.with_margin(
    num_examples=N, expected_batch_size=BATCH
  )
  made = claim.Claim(
    sampler=plain,
    steps=STEPS,
    noise_multiplier=0.5,
    l2_clip_norm=0.1,
    words=terms.QUERIES,
  )
  line = ledger.line("a", made.statement("a"))
  assert "group_size" not in line and "num_units" not in line
  assert "mixture" not in statement.in_words(made.statement("a"))


REFUSED = {
  "no record": (lambda: queries_of(0, units=5), r"group_size in \[1"),
  "more users than queries": (
    lambda: queries_of(4, units=N + 1),
    r"num_units in \[500, 2000\], got num_units=2001",
  ),
  "users with more queries than are read": (
    lambda: queries_of(4, units=499),
    "num_units=499",
  ),
  "replaced by another": (
    lambda: promise(queries_of(4), relation="REPLACE_ONE").epsilon,
    "ADD_OR_REMOVE_ONE for groups",
  ),
  "Renyi": (
    lambda: accounting.epsilon(
      noise_multiplier=2.0,
      delta=1e-4,
      sampler=queries_of(4),
      steps=STEPS,
      accountant="rdp",
    ),
    "for which it has no bound",
  ),
  "an event that knows truncation": (
    lambda: queries_of(4).event(1.0, 3),
    "untruncated_event",
  ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_nothing_is_known_of_is_refused_in_a_line(name):
  make, message = REFUSED[name]
  with pytest.raises(ValueError, match=message) as error:
    make()
  assert "\n" not in str(error.value)


def test_the_calculator_says_what_users_cost_for_both_ways_to_sample():
  said = calculator.describe(
    num_examples=N,
    batch_size=BATCH,
    steps=STEPS,
    epsilon=8.0,
    unit="user",
    queries_per_user=4,
  ).splitlines()
  assert said[0] == (
    "2000 queries of 500 users, up to 4 each, 60 steps, delta 0.001"
  )
  assert said[1].startswith("16 users a step (ADD_OR_REMOVE_ONE): epsilon 8")
  assert said[2].startswith("64 queries a step (ADD_OR_REMOVE_ONE): epsilon 8")
  assert said[3].startswith("Generators draw users")


@pytest.mark.parametrize(
  "changes",
  [
    {"unit": "user"},
    {"unit": "user", "queries_per_user": 0},
    {"queries_per_user": 4},
    {"unit": "person", "queries_per_user": 4},
  ],
)
def test_the_calculator_refuses_half_a_user(changes):
  with pytest.raises(ValueError, match="unit="):
    calculator.describe(
      num_examples=N, batch_size=BATCH, steps=STEPS, epsilon=8.0, **changes
    )
