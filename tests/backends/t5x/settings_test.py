"""What is promised, from public numbers alone: no T5X is needed."""

import dataclasses
import math

import pytest

from synthq_jax.backends.t5x import settings
from synthq_jax.privacy import accounting

SMALL = settings.Settings(
  num_examples=1000,
  expected_batch_size=50,
  max_batch_size=96,
  steps=20,
  epsilon=4.0,
  l2_clip_norm=0.1,
)


def test_the_noise_reaches_the_target_and_hardly_more():
  sigma = SMALL.claim.noise_multiplier

  def epsilon(noise):
    return accounting.epsilon(
      noise_multiplier=noise, delta=SMALL.delta, sampler=SMALL.sampler, steps=20
    )

  assert 3.9 < epsilon(sigma) <= 4.0
  assert epsilon(0.99 * sigma) > 4.0


def test_the_statement_says_what_is_done():
  one = SMALL.claim.statement("t5x/name")
  assert one.epsilon <= 4.0 and one.delta == 1 / 2000
  [release] = one.ledger
  assert (release.steps, release.l2_clip_norm) == (20, 0.1)
  assert release.sampling == "poisson"
  assert release.noise_multiplier == SMALL.claim.noise_multiplier
  assert release.identifier == "t5x/name"
  assert (release.expected_batch_size, release.max_batch_size) == (50, 96)


def test_without_noise_nothing_is_claimed():
  plain = dataclasses.replace(SMALL, epsilon=math.inf)
  assert plain.claim.noise_multiplier == 0.0
  assert plain.claim.statement("t5x/name").epsilon == math.inf


@pytest.mark.parametrize(
  "change",
  [
    {"expected_batch_size": 2000},
    {"max_batch_size": 49},
    {"steps": 0},
    {"l2_clip_norm": 0.0},
    {"l2_clip_norm": math.inf},
  ],
  ids=str,
)
def test_numbers_that_contradict_each_other_are_refused(change):
  with pytest.raises(ValueError, match="expected"):
    dataclasses.replace(SMALL, **change)


def test_a_delta_that_lets_an_example_be_published_is_refused():
  loose = dataclasses.replace(SMALL, delta=0.1)
  with pytest.raises(ValueError, match="delta"):
    _ = loose.claim
