"""Ranks and exposure: exact values, ties, and an interval that holds."""

import math

import numpy as np
import pytest
from scipy import stats

from synthq_jax.audit import exposure


def test_a_rank_counts_the_candidates_that_are_more_likely():
  values = np.array(
    [[-1.0, -2.0, -3.0, -4.0], [-2.5, -2.0, -3.0, -4.0], [-5.0, -2, -3, -4]]
  )
  np.testing.assert_array_equal(exposure.ranks(values), [1, 2, 4])


@pytest.mark.parametrize(
  ("row", "rank"),
  [
    ([0.0] * 100, 51),  # 1 + 99 / 2, rounded up
    ([0.0] * 99, 50),
    ([0.0, 0.0], 2),
    ([0.0, 0.0, 1.0, -1.0], 3),
  ],
)
def test_ties_count_half_rounded_up(row, rank):
  assert exposure.ranks(np.array([row])) == [rank]


def test_ranks_agree_with_sorting():
  values = np.random.default_rng(0).normal(size=(200, 17))
  order = np.argsort(-values, axis=1)
  expected = np.argmax(order == 0, axis=1) + 1
  np.testing.assert_array_equal(exposure.ranks(values), expected)


def test_exposure_is_the_bits_that_the_rank_saves():
  bits = exposure.exposure(np.array([1, 2, 25, 100]), 100)
  np.testing.assert_allclose(bits, [math.log2(100), math.log2(50), 2, 0])


def test_the_interval_is_students():
  ranks = np.array([30, 40, 60, 70, 75])
  found = exposure.mean_rank(ranks, 100)
  expected = stats.ttest_1samp(ranks, 0).confidence_interval(0.95)
  np.testing.assert_allclose(found, (55, expected.low, expected.high))


def test_the_interval_stays_among_the_ranks():
  assert exposure.mean_rank(np.array([1, 1]), 10) == (1, 1, 1)
  found = exposure.mean_rank(np.array([1, 10]), 10)
  assert (found.low, found.high) == (1, 10)
  assert exposure.mean_rank(np.array([3]), 10) == (3, 1, 10)


def test_the_interval_holds_chance_and_rejects_another_mean():
  rng = np.random.default_rng(0)
  holds, wrong = 0, 0
  for _ in range(400):
    found = exposure.mean_rank(rng.integers(1, 101, 30), 100)
    holds += found.low <= 50.5 <= found.high
    wrong += found.low <= 30 <= found.high
  # 95 of 100, give or take three deviations: neither too narrow nor too wide.
  assert 367 <= holds <= 393
  assert wrong <= 40


def test_a_mean_rank_converts_to_the_papers_epsilon():
  assert exposure.epsilon_of_mean_rank(43, 100, 10) == pytest.approx(
    0.0151, abs=0.0011
  )
  # Randomized response over R secrets: the true one comes first with e^epsilon
  # times the odds of any other place, so that epsilon is exact.
  epsilon, num = 0.7, 50
  odds = np.array([math.exp(epsilon), *np.ones(num - 1)])
  mean = np.sum(odds / odds.sum() * np.arange(1, num + 1))
  assert 0 < exposure.epsilon_of_mean_rank(mean, num) <= epsilon
  assert exposure.epsilon_of_mean_rank(80, 100) == 0


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: exposure.ranks(np.zeros((3, 1))), "at least 2"),
    (lambda: exposure.ranks(np.array([[0.0, math.nan]])), "nan for 1"),
    (lambda: exposure.exposure(np.array([0]), 4), "0 to 0"),
    (lambda: exposure.exposure(np.array([5]), 4), "5 to 5"),
    (lambda: exposure.mean_rank(np.array([], int), 4), "at least one"),
    (lambda: exposure.mean_rank(np.array([1]), 4, level=1.0), "level=1.0"),
    (lambda: exposure.epsilon_of_mean_rank(0.5, 4), "mean_rank=0.5"),
    (lambda: exposure.epsilon_of_mean_rank(2, 4, 0), "repetitions=0"),
  ],
)
def test_what_is_no_rank_is_refused(call, message):
  with pytest.raises(ValueError, match=message):
    call()
