"""Ranks and exposure: exact values, ties, and an interval that holds."""

import math

import numpy as np
import pytest

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


def test_the_interval_is_hoeffdings():
  found = exposure.mean_rank(np.full(200, 50), 100)
  half = 99 * math.sqrt(math.log(40) / 400)
  np.testing.assert_allclose(found, (50, 50 - half, 50 + half))


def test_the_interval_stays_among_the_ranks_and_is_not_a_point():
  found = exposure.mean_rank(np.array([1, 1]), 10)
  assert found.mean == found.low == 1
  assert found.high > 9  # two canaries prove little
  many = exposure.mean_rank(np.ones(10_000, int), 10)
  assert many.high < 1.2


def test_the_interval_holds_chance_and_rejects_another_mean():
  rng = np.random.default_rng(0)
  holds, wrong = 0, 0
  for _ in range(200):
    found = exposure.mean_rank(rng.integers(1, 101, 400), 100)
    holds += found.low <= 50.5 <= found.high
    wrong += found.low <= 35 <= found.high
  assert holds >= 190
  assert wrong == 0


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: exposure.ranks(np.zeros((3, 1))), "at least 2"),
    (lambda: exposure.ranks(np.array([[0.0, math.nan]])), "nan for 1"),
    (lambda: exposure.exposure(np.array([0]), 4), "0 to 0"),
    (lambda: exposure.exposure(np.array([5]), 4), "5 to 5"),
    (lambda: exposure.mean_rank(np.array([], int), 4), "at least one"),
    (lambda: exposure.mean_rank(np.array([1]), 4, level=1.0), "level=1.0"),
  ],
)
def test_what_is_no_rank_is_refused(call, message):
  with pytest.raises(ValueError, match=message):
    call()
