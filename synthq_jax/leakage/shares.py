"""Shares of texts that have a near-duplicate, with tests and intervals.

Two texts can be near-duplicates by coincidence: people ask alike. Evidence of
copying is therefore the difference from the same share of a control group,
which is sampled alike and cannot have been copied.

References:
  Newcombe, "Interval estimation for the difference between independent
  proportions", Statistics in Medicine 1998, method 10.
"""

import math
from collections.abc import Iterable

import numpy as np
from jaxtyping import Bool, Int

from synthq_jax import intervals

__all__ = ["alone", "difference", "permutation_p_value"]

_PERMUTATIONS = 1999  # random assignments of a test


def difference(
  first: intervals.Interval, second: intervals.Interval
) -> intervals.Interval:
  """Returns the difference of two independent shares with Newcombe's interval.

  The interval is approximate at every sample size. It stays sound if a share is
  0, where the usual interval shrinks to a point.

  >>> gap = difference(intervals.wilson(10, 100), intervals.wilson(0, 100))
  >>> round(gap.mean, 3), round(gap.low, 3), round(gap.high, 3)
  (0.1, 0.042, 0.174)

  Args:
    first: share of one group.
    second: share of another group.

  Returns:
    `first` minus `second`, with the confidence of their intervals.
  """
  value = first.mean - second.mean
  return intervals.Interval(
    mean=value,
    low=value - math.hypot(first.mean - first.low, second.high - second.mean),
    high=value + math.hypot(first.high - first.mean, second.mean - second.low),
  )


def permutation_p_value(
  marked: Bool[np.ndarray, " text"],
  first: Bool[np.ndarray, " text"],
  units: Int[np.ndarray, " text"],
) -> float:
  """Tests whether two groups of whole units have the same share.

  The test compares the difference of the shares with the differences after
  random assignments of as many units to the first group. It is exact, however
  the texts of a unit depend on each other.

  Args:
    marked: True for texts that count in the share.
    first: True for texts of the first group; all texts of a unit, or none.
    units: unit of each text.

  Returns:
    The two-sided p value, at least 1 / 2000.

  Raises:
    ValueError: if a group is empty, or a unit has texts in both groups.
  """
  if first.all() or not first.any():
    raise ValueError(
      f"expected texts in both groups, got {int(first.sum())} of {len(first)} in"
      " the first"
    )
  _, starts, unit_ids = np.unique(units, return_index=True, return_inverse=True)
  totals, hits = np.bincount(unit_ids), np.bincount(unit_ids, marked)
  sides = first[starts]
  if (first != sides[unit_ids]).any():
    raise ValueError(
      "expected all texts of a unit in one group, got a unit with texts in both:"
      " take smaller units, or leave such units out"
    )

  def measure_gap(sides: Bool[np.ndarray, " unit"]) -> float:
    means = (hits @ side / (totals @ side) for side in (sides, ~sides))
    return abs(next(means) - next(means))

  observed, rng = measure_gap(sides) - 1e-12, np.random.default_rng(0)
  num_larger = sum(
    measure_gap(rng.permutation(sides)) >= observed
    for _ in range(_PERMUTATIONS)
  )
  return (num_larger + 1) / (_PERMUTATIONS + 1)


def alone(
  pairs: Iterable[tuple[int, int]], number: int
) -> Bool[np.ndarray, " text"]:
  """Marks the texts that have no near-duplicate among the others.

  >>> alone([(0, 0), (1, 2), (3, 3)], 4).tolist()
  [True, False, False, True]

  Args:
    pairs: positions of near-duplicates; a text paired with itself is ignored.
    number: number of texts.

  Returns:
    True for each text without a near-duplicate.
  """
  positions = np.asarray([*pairs], np.int64).reshape(-1, 2)
  positions = positions[positions[:, 0] != positions[:, 1]]
  lonely = np.ones(number, bool)
  lonely[positions.ravel()] = False
  return lonely
