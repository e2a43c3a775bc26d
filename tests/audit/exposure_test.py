"""Ranks and exposure: exact values, ties, an interval and a test that hold."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from synthq_jax.audit import exposure


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


@pytest.mark.parametrize(("number", "learned"), [(10, 0.9), (100, 0.98)])
def test_the_interval_holds_where_almost_all_are_learned(number, learned):
  """Student's interval is a point there, and misses in a third of the cases."""
  rng = np.random.default_rng(1)
  truth, holds = learned + (1 - learned) * 50.5, 0
  for _ in range(200):
    others = rng.integers(1, 101, number)
    ranks = np.where(rng.random(number) < learned, 1, others)
    found = exposure.mean_rank(ranks, 100)
    holds += found.low <= truth <= found.high
    assert 1 <= found.low <= found.mean <= found.high <= 100
  assert holds >= 190


def test_the_interval_holds_chance_and_rejects_another_mean():
  rng = np.random.default_rng(0)
  holds, wrong = 0, 0
  for _ in range(400):
    found = exposure.mean_rank(rng.integers(1, 101, 30), 100)
    holds += found.low <= 50.5 <= found.high
    wrong += found.low <= 25 <= found.high
  assert holds >= 367  # 95 of 100, less three deviations
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


def p_values(draw, candidates, repeats=300):
  rng = np.random.default_rng(0)
  return np.array(
    [
      exposure.uniform_ranks_p_value(draw(rng), candidates)
      for _ in range(repeats)
    ]
  )


def test_it_is_the_share_of_all_outcomes_that_are_as_extreme():
  candidates, number = 5, 3
  score = np.floor(64 * np.log2(candidates / np.arange(1, candidates + 1)))
  totals = np.array(
    [sum(score[list(o)]) for o in itertools.product(range(5), repeat=number)]
  )
  for ranks in ([1, 1, 1], [1, 2, 5], [3, 3, 4], [5, 5, 5]):
    observed = sum(score[r - 1] for r in ranks)
    assert exposure.uniform_ranks_p_value(
      np.array(ranks), candidates
    ) == pytest.approx(np.mean(totals >= observed), abs=1e-12)


@pytest.mark.parametrize("candidates", [100, 10_000])
def test_uniform_ranks_are_accepted(candidates):
  values = p_values(lambda rng: rng.integers(1, candidates + 1, 40), candidates)
  assert stats.kstest(values, "uniform").pvalue > 1e-3
  low, high = stats.binom.ppf([1e-3, 1 - 1e-3], len(values), 0.05)
  assert low <= np.sum(values < 0.05) <= high


def known(rng, number, share):
  ranks = rng.integers(1, 101, number)
  ranks[rng.random(number) < share] = 1
  return ranks


@pytest.mark.parametrize(("number", "share"), [(30, 0.2), (100, 0.1)])
def test_a_few_known_secrets_are_noticed(number, share):
  values = p_values(lambda rng: known(rng, number, share), 100)
  assert np.mean(values < 0.05) > 0.87


def test_many_canaries_and_candidates_are_no_trouble():
  rng = np.random.default_rng(3)
  ranks = rng.integers(1, 10_001, 5000)
  assert 1e-3 < exposure.uniform_ranks_p_value(ranks, 10_000) <= 1
  assert exposure.uniform_ranks_p_value(np.ones(5000, int), 10_000) == 1e-12


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: exposure.ranks(np.zeros((3, 1))), "at least 2"),
    (lambda: exposure.ranks(np.zeros((3, 2, 2))), r"shape \(3, 2, 2\)"),
    (lambda: exposure.ranks(np.array([[0.0, math.nan]])), "nan for 1"),
    (lambda: exposure.exposure(np.array([0]), 4), "0 to 0"),
    (lambda: exposure.exposure(np.array([5]), 4), "5 to 5"),
    (lambda: exposure.mean_rank(np.array([], int), 4), "at least one"),
    (lambda: exposure.uniform_ranks_p_value(np.array([101]), 100), "101 to"),
    (lambda: exposure.epsilon_of_mean_rank(0.5, 4), "mean_rank=0.5"),
    (lambda: exposure.epsilon_of_mean_rank(2, 4, 0), "repetitions=0"),
  ],
)
def test_what_is_no_rank_is_refused(call, message):
  with pytest.raises(ValueError, match=message):
    call()
