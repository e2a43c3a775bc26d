"""Shares of texts that have a near-duplicate, and how sure they are.

A text can meet another one by coincidence: people ask alike. What a share says
about copying is therefore its distance from the same share of a control group,
which was drawn alike and cannot have been copied.

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


def difference(
  first: intervals.Interval, second: intervals.Interval
) -> intervals.Interval:
  """Returns the difference of two independent shares with Newcombe's interval.

  Exact for no sample size, but sound where a share is 0, where the usual
  interval shrinks to a point.

  >>> gap = difference(intervals.wilson(10, 100), intervals.wilson(0, 100))
  >>> round(gap.mean, 3), round(gap.low, 3), round(gap.high, 3)
  (0.1, 0.042, 0.174)

  Args:
    first: of one group.
    second: of another one.

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
  found: Bool[np.ndarray, " text"],
  first: Bool[np.ndarray, " text"],
  units: Int[np.ndarray, " text"],
  *,
  permutations: int = 1999,
  seed: int = 0,
) -> float:
  """Tests whether two groups of whole units have the same share.

  It asks how far apart the shares would be if chance had put as many units into
  the first group: whatever makes the texts of a unit alike, it is exact.

  Args:
    found: which texts were found.
    first: which are of the first group; all of a unit, or none.
    units: of each text.
    permutations: how often to draw; no p is below one in so many and one.
    seed: of NumPy's generator.

  Returns:
    The two-sided p value.
  """
  _, starts, place = np.unique(units, return_index=True, return_inverse=True)
  totals, hits = np.bincount(place), np.bincount(place, found)
  sides = first[starts]

  def apart(sides: Bool[np.ndarray, " unit"]) -> float:
    means = (hits @ side / (totals @ side) for side in (sides, ~sides))
    return abs(next(means) - next(means))

  seen, rng = apart(sides) - 1e-12, np.random.default_rng(seed)
  further = sum(
    apart(rng.permutation(sides)) >= seen for _ in range(permutations)
  )
  return (further + 1) / (permutations + 1)


def alone(
  pairs: Iterable[tuple[int, int]], number: int
) -> Bool[np.ndarray, " text"]:
  """Says which texts have no near-duplicate among the others.

  >>> alone([(0, 0), (1, 2), (3, 3)], 4).tolist()
  [True, False, False, True]

  Args:
    pairs: positions of near-duplicates; one of a text with itself is none.
    number: of texts.

  Returns:
    One value for each text.
  """
  found = np.asarray([*pairs], np.int64).reshape(-1, 2)
  found = found[found[:, 0] != found[:, 1]]
  lonely = np.ones(number, bool)
  lonely[found.ravel()] = False
  return lonely
