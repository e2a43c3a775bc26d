"""Thresholds and intervals beside ten-line versions of them."""

import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from synthq_jax import intervals
from synthq_jax.leakage import calibration

PAIRS = st.lists(
  st.tuples(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), st.booleans()),
  min_size=1,
  max_size=20,
)


def columns(pairs):
  return np.array([s for s, _ in pairs]), np.array([y for _, y in pairs])


@hypothesis.given(PAIRS, st.sampled_from([0.3, 0.5, 0.9, 1.0]))
def test_no_lower_threshold_has_the_wanted_precision(pairs, precision):
  scores, labels = columns(pairs)
  good = [
    t for t in set(scores) - {0.0} if labels[scores >= t].mean() >= precision
  ]
  if good:
    chosen = calibration.threshold(scores, labels, precision=precision)
    assert chosen == min(good)
  else:
    with pytest.raises(ValueError, match="got at most"):
      calibration.threshold(scores, labels, precision=precision)


def test_a_share_of_nothing_is_no_number():
  empty = calibration.grouped_interval([0.0], [0.0], ["a"])
  assert math.isnan(empty.mean)


def coverage(groups: int, each: int, repeats: int, joined: bool) -> float:
  """How often an interval holds .8; pairs of a group are all alike."""
  rng, held = np.random.default_rng(7), 0
  for _ in range(repeats):
    hits = np.repeat(rng.random(groups) < 0.8, each)
    names = np.repeat(np.arange(groups), each) if joined else range(len(hits))
    interval = calibration.grouped_interval(
      hits, np.ones(len(hits)), list(names)
    )
    held += interval.low <= 0.8 <= interval.high
  return held / repeats


def test_an_interval_of_groups_holds_the_truth_where_one_of_pairs_does_not():
  assert coverage(60, 8, 200, joined=True) > 0.88
  assert coverage(60, 8, 200, joined=False) < 0.7


@pytest.mark.parametrize("groups", [4, 10])
def test_an_interval_of_few_groups_holds_the_truth(groups):
  rng, held, repeats = np.random.default_rng(5), 0, 600
  for _ in range(repeats):
    sizes = rng.geometric(0.1, groups)
    # Pairs of a group are alike by .2: true share .3.
    shares = rng.beta(0.3 * 4, 0.7 * 4, groups)
    hits = np.concatenate(
      [rng.random(n) < p for n, p in zip(sizes, shares, strict=True)]
    )
    names = np.repeat(np.arange(groups), sizes).tolist()
    found = calibration.grouped_interval(hits, np.ones(len(hits)), names)
    held += found.low <= 0.3 <= found.high
  assert held / repeats > 0.92  # .84 and .87 with the normal quantile


def test_few_groups_that_all_agree_prove_little():
  found = calibration.grouped_interval([1] * 50, [1] * 50, list("abcde") * 10)
  assert (found.mean, found.high) == (1, 1)
  assert found.low == intervals.wilson(5, 5).low < 0.6


def test_one_group_proves_no_more_than_one_pair():
  found = calibration.grouped_interval([1, 0, 1], [1, 1, 1], list("aaa"))
  one = intervals.wilson(2 / 3, 1)
  np.testing.assert_allclose((found.low, found.high), (one.low, one.high))


SCORES, TRUE = np.array([0.5]), np.array([True])


def choose(scores, labels, precision=0.5):
  return calibration.threshold(scores, labels, precision=precision)


@pytest.mark.parametrize(
  ("call", "said"),
  [
    (lambda: choose(SCORES, np.array([1])), "boolean label"),
    (lambda: choose(np.array([np.nan]), TRUE), "finite scores"),
    (lambda: choose(SCORES[:0], TRUE[:0]), "finite scores"),
    (lambda: choose(SCORES, TRUE, precision=0), "precision=0"),
    (
      lambda: calibration.grouped_interval([1], [1], []),
      "0 groups",
    ),
  ],
)
def test_what_makes_no_sense_is_refused(call, said):
  with pytest.raises(ValueError, match=said):
    call()
