"""The test of uniform ranks: its size, its power, its exact values."""

import itertools

import numpy as np
import pytest
from scipy import stats

from synthq_jax.audit import control


def p_values(draw, candidates, repeats=300):
  rng = np.random.default_rng(0)
  return np.array(
    [
      control.uniform_ranks_p_value(draw(rng), candidates)
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
    assert control.uniform_ranks_p_value(
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


def test_ranks_that_are_a_tenth_too_low_are_noticed():
  def shifted(rng):
    return np.maximum(rng.integers(1, 101, 60) - 10, 1)

  assert np.mean(p_values(shifted, 100) < 0.05) > 0.9


def test_ranks_that_are_too_high_are_no_sign_of_contamination():
  assert control.uniform_ranks_p_value(np.full(50, 90), 100) > 0.999


def test_ties_in_the_middle_are_no_sign_either():
  assert control.uniform_ranks_p_value(np.full(50, 51), 100) > 0.5


def test_many_canaries_and_candidates_are_no_trouble():
  rng = np.random.default_rng(3)
  ranks = rng.integers(1, 10_001, 5000)
  assert 1e-3 < control.uniform_ranks_p_value(ranks, 10_000) <= 1
  assert control.uniform_ranks_p_value(np.ones(5000, int), 10_000) == 1e-12


@pytest.mark.parametrize("ranks", [[], [0], [101]])
def test_ranks_out_of_range_are_refused(ranks):
  with pytest.raises(ValueError, match="expected ranks"):
    control.uniform_ranks_p_value(np.array(ranks, int), 100)
