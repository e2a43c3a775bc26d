"""Shares and their differences: against oracles, and over many draws."""

import itertools
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
  with pytest.raises(ValueError, match=f"found={found}, total={total}"):
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


def test_the_same_texts_are_compared_pair_by_pair():
  first = np.array([True] * 30 + [False] * 70)
  same = shares.paired_difference(first, first)
  apart = shares.difference(
    intervals.wilson(30, 100), intervals.wilson(30, 100)
  )
  assert same.mean == 0
  assert same.high - same.low < 0.15 * (apart.high - apart.low)
  more = np.array([True] * 40 + [False] * 60)
  gap = shares.paired_difference(more, first)
  apart = shares.difference(
    intervals.wilson(40, 100), intervals.wilson(30, 100)
  )
  assert gap.mean == pytest.approx(0.1)
  assert gap.high - gap.low < apart.high - apart.low


def test_a_text_is_alone_whichever_group_its_double_is_in():
  lonely = shares.alone([(0, 3), (1, 1), (4, 2)], 6)
  assert lonely.tolist() == [False, True, False, False, False, True]


def _sized(pairs, owners, total, size):
  array = np.array(pairs, np.int64).reshape(-1, 2)
  return shares.at_size(
    array[:, 0],
    array[:, 1],
    owners=np.asarray(owners),
    num_originals=total,
    size=size,
  )


def test_a_share_at_a_size_is_the_mean_over_all_choices():
  pairs, copies, originals = [(0, 0), (0, 1), (1, 2), (2, 2), (3, 0)], 6, 5
  for size in range(1, originals):
    brute = [
      len({c for c, o in pairs if o in chosen}) / copies
      for chosen in itertools.combinations(range(originals), size)
    ]
    found = _sized(pairs, range(copies), originals, size)
    assert found.share.mean == pytest.approx(np.mean(brute))


def test_copies_of_one_owner_count_as_one_draw():
  pairs = [(i, i) for i in range(10)]
  apart = _sized(pairs, range(100), 200, 50)
  together = _sized(pairs, [0] * 10 + [*range(1, 91)], 200, 50)
  assert apart.share.mean == together.share.mean
  assert together.variance > 2 * apart.variance


def test_one_original_behind_all_copies_makes_the_share_unsure():
  spread = _sized([(i, i) for i in range(10)], range(100), 200, 50)
  single = _sized([(i, 0) for i in range(10)], range(100), 200, 50)
  assert spread.share.mean == pytest.approx(single.share.mean)
  assert single.variance > 5 * spread.variance


def test_nothing_found_is_no_certainty():
  found = _sized([], range(40), 60, 30).share
  assert (found.mean, found.low) == (0, 0)
  assert found.high == pytest.approx(intervals.wilson(0, 30).high)


def test_too_few_originals_are_refused():
  with pytest.raises(ValueError, match="size=5, num_originals=5"):
    _sized([(0, 0)], range(3), 5, 5)


def _drawn(rng, copied: float):
  """A log of common and rare queries, and what a generator wrote."""
  popularity = 1 / np.arange(1, 4001) ** 0.8
  popularity /= popularity.sum()
  log = rng.choice(4000, 500, p=popularity)
  written = rng.choice(4000, 400, p=popularity)
  written[rng.random(400) < 0.7] = -1  # like nothing
  copies = rng.random(400) < copied
  written[copies] = log[rng.integers(400, size=copies.sum())]
  return log, written  # the first 400 of the log are trained on


def _gap(log, written):
  left, right = np.nonzero(written[:, None] == log[None, :])
  owners = np.arange(400) // 2
  sized = [
    shares.at_size(
      left[inside],
      right[inside] - first,
      owners=owners,
      num_originals=total,
      size=99,
    )
    for first, total, inside in (
      (0, 400, right < 400),
      (400, 100, right >= 400),
    )
  ]
  return shares.sized_difference(*sized, owners)


def test_written_queries_that_copy_nothing_are_nearer_to_no_group():
  rng = np.random.default_rng(2)
  gaps = [_gap(*_drawn(rng, 0.0)) for _ in range(200)]
  means = [one.mean for one in gaps]
  assert abs(np.mean(means)) < 3 * np.std(means) / math.sqrt(200)
  assert np.mean([one.low <= 0 <= one.high for one in gaps]) >= 0.95


def test_written_queries_that_copy_are_nearer_to_what_they_copy():
  rng = np.random.default_rng(3)
  gaps = [_gap(*_drawn(rng, 0.5)) for _ in range(50)]
  assert np.mean([one.low > 0 for one in gaps]) > 0.9


def test_a_bootstrap_of_the_originals_would_find_what_is_not_there():
  """Why `at_size` has no bootstrap: a resample holds 63% of the originals."""
  rng = np.random.default_rng(4)
  biases = []
  for _ in range(100):
    log, written = _drawn(rng, 0.0)
    again = np.concatenate(
      [rng.choice(log[:400], 400), rng.choice(log[400:], 100)]
    )
    biases.append(_gap(again, written).mean - _gap(log, written).mean)
  assert np.mean(biases) > 5 * np.std(biases) / math.sqrt(100)


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


def test_units_are_the_draws_where_a_split_drew_them():
  rng, repeats = np.random.default_rng(3), 150
  alarms, naive, missed = 0, 0, 0
  for repeat in range(repeats):
    found, first, units = drawn_documents(rng)
    alarms += 0.05 >= shares.permutation_p_value(
      found, first, units, permutations=199, seed=repeat
    )
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
