"""Shares and their differences: against oracles, and over many draws."""

import math

import numpy as np
import pytest
from scipy import stats

from synthq_jax import intervals
from synthq_jax.leakage import calibration, shares


def test_wilsons_interval_is_that_of_scipy():
  for found, total in ((0, 7), (3, 11), (50, 50), (40, 4000)):
    ours = intervals.wilson(found, total, confidence=0.9)
    theirs = stats.binomtest(found, total).proportion_ci(0.9, method="wilson")
    assert ours.mean == found / total
    assert ours.low == pytest.approx(theirs.low, abs=1e-12)
    assert ours.high == pytest.approx(theirs.high, abs=1e-12)


@pytest.mark.parametrize(("found", "total"), [(3, 2), (-1, 5), (0, 0)])
def test_impossible_counts_are_refused(found, total):
  with pytest.raises(ValueError, match=f"hits={found}, total={total}"):
    intervals.wilson(found, total)


@pytest.mark.parametrize(
  ("counts", "low", "high"),
  # Examples of Newcombe 1998 for his method 10.
  [
    ((56, 70, 48, 80), 0.0524, 0.3339),
    ((9, 10, 3, 10), 0.1705, 0.8090),
    ((10, 10, 0, 10), 0.6075, 1.0),
  ],
)
def test_the_interval_of_a_difference_is_newcombes(counts, low, high):
  found, total, other, others = counts
  gap = shares.difference(
    intervals.wilson(found, total), intervals.wilson(other, others)
  )
  assert gap.mean == found / total - other / others
  assert gap.low == pytest.approx(low, abs=5e-5)
  assert gap.high == pytest.approx(high, abs=5e-5)


def test_groups_that_chance_made_are_rarely_told_apart():
  rng = np.random.default_rng(0)
  covered, repeats = 0, 2000
  hit = np.arange(1000) < 60  # whatever makes queries come out
  for _ in range(repeats):
    trained = rng.permutation(1000) < 800
    ours, theirs = int(hit[trained].sum()), int(hit[~trained].sum())
    gap = shares.difference(
      intervals.wilson(ours, 800), intervals.wilson(theirs, 200)
    )
    covered += gap.low <= 0 <= gap.high
  assert covered / repeats >= 0.94


def test_a_real_difference_is_covered():
  rng = np.random.default_rng(1)
  draws = zip(
    rng.binomial(800, 0.08, 2000), rng.binomial(200, 0.03, 2000), strict=True
  )
  gaps = [
    shares.difference(intervals.wilson(a, 800), intervals.wilson(b, 200))
    for a, b in draws
  ]
  assert 0.94 <= np.mean([one.low <= 0.05 <= one.high for one in gaps]) <= 0.98


def test_a_text_is_alone_whichever_group_its_double_is_in():
  lonely = shares.alone([(0, 3), (1, 1), (4, 2)], 6)
  assert lonely.tolist() == [False, True, False, False, False, True]


def share_of(found, units):
  return calibration.grouped_interval(found, np.ones(len(found)), units)


def drawn_documents(rng, documents=120, each=6):
  """Queries that come out more easily for some documents; a side by document."""
  units = np.repeat(np.arange(documents), each)
  ease = np.where(rng.random(documents) < 0.3, 0.8, 0.05)
  return (
    rng.random(len(units)) < ease[units],
    (rng.random(documents) < 0.7)[units],
    units,
  )


def test_units_are_the_draws_where_a_split_drew_them(monkeypatch):
  monkeypatch.setattr(shares, "_PERMUTATIONS", 199)
  rng, repeats = np.random.default_rng(3), 150
  alarms, naive, missed = 0, 0, 0
  for _ in range(repeats):
    found, first, units = drawn_documents(rng)
    alarms += 0.05 >= shares.permutation_p_value(found, first, units)
    table = [
      [(hit & side).sum() for hit in (found, ~found)]
      for side in (first, ~first)
    ]
    naive += stats.fisher_exact(table).pvalue <= 0.05
    gap = shares.difference(
      *(share_of(found[side], units[side]) for side in (first, ~first))
    )
    missed += not gap.low <= 0 <= gap.high
  most = 0.05 * repeats + 3 * math.sqrt(0.05 * 0.95 * repeats)
  assert alarms <= most and missed <= most < naive


def test_a_difference_of_units_is_found():
  rng = np.random.default_rng(4)
  found, first, units = drawn_documents(rng)
  found |= first & (rng.random(len(found)) < 0.5)
  assert shares.permutation_p_value(found, first, units) < 0.001
  gap = shares.difference(
    *(share_of(found[side], units[side]) for side in (first, ~first))
  )
  assert gap.low > 0


@pytest.mark.parametrize("side", [True, False])
def test_a_test_of_one_group_is_refused(side):
  marked, units = np.array([True, False, True, False]), np.arange(4)
  with pytest.raises(ValueError, match="in both groups, got . of 4"):
    shares.permutation_p_value(marked, np.full(4, side), units)


def test_a_unit_of_both_groups_is_refused():
  """Its texts counted where the first of them stood."""
  marked, first = np.array([1, 0, 1, 0], bool), np.array([1, 1, 0, 0], bool)
  assert 0 < shares.permutation_p_value(marked, first, np.array([0, 0, 1, 2]))
  with pytest.raises(ValueError, match="a unit with texts in both"):
    shares.permutation_p_value(marked, first, np.array([0, 1, 1, 2]))
