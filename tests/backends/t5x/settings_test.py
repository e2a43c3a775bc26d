"""What is promised, from public numbers alone: no T5X is needed."""

import dataclasses
import math

import pytest

from synthq_jax.backends.t5x import settings

SMALL = settings.Settings(
  num_examples=1000,
  expected_batch_size=50,
  max_batch_size=96,
  steps=20,
  epsilon=4.0,
  l2_clip_norm=0.1,
)


def test_the_statement_says_what_is_done():
  one = SMALL.claim.statement("t5x/name")
  assert one.epsilon <= 4.0 and one.delta == 1 / 2000
  [release] = one.ledger
  assert (release.steps, release.l2_clip_norm) == (20, 0.1)
  assert release.sampling == "poisson"
  assert release.noise_multiplier == SMALL.claim.noise_multiplier
  assert release.identifier == "t5x/name"
  assert (release.expected_batch_size, release.max_batch_size) == (50, 96)


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
