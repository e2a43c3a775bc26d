"""Shares of texts that have a near-duplicate, and how sure they are.

A text can meet another one by coincidence: people ask alike. What a share says
about copying is therefore its distance from the same share of a control group,
which was drawn alike and cannot have been copied. Two views, see `difference`
and `at_size`: of the texts that may have been copied, and of the copies.

References:
  Newcombe, "Interval estimation for the difference between independent
  proportions", Statistics in Medicine 1998, method 10.
  Hurlbert, "The nonconcept of species diversity", Ecology 1971 (rarefaction).
  Efron and Stein, "The jackknife estimate of variance", Annals of Statistics
  1981.
"""

import dataclasses
import math
from collections.abc import Iterable

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import stats

from synthq_jax import intervals

__all__ = [
  "Sized",
  "alone",
  "at_size",
  "difference",
  "paired_difference",
  "permutation_p_value",
  "sized_difference",
]


def difference(
  first: intervals.Interval,
  second: intervals.Interval,
  *,
  correlation: float = 0.0,
) -> intervals.Interval:
  """Returns the difference of two shares with Newcombe's interval.

  Exact for no sample size, but sound where a share is 0, where the usual
  interval shrinks to a point.

  >>> gap = difference(intervals.wilson(10, 100), intervals.wilson(0, 100))
  >>> round(gap.mean, 3), round(gap.low, 3), round(gap.high, 3)
  (0.1, 0.042, 0.174)

  Args:
    first: of one group.
    second: of another one.
    correlation: of the two, in [-1, 1]; 0 for independent groups.

  Returns:
    `first` minus `second`, with the confidence of their intervals.
  """
  value = first.mean - second.mean
  down = (first.mean - first.low, second.high - second.mean)
  up = (first.high - first.mean, second.mean - second.low)
  return intervals.Interval(
    mean=value,
    low=value - _third_side(*down, correlation),
    high=value + _third_side(*up, correlation),
  )


def _third_side(one: float, other: float, correlation: float) -> float:
  squared = one**2 - 2 * correlation * one * other + other**2
  return math.sqrt(max(0.0, squared))


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


def paired_difference(
  first: Bool[np.ndarray, " text"],
  second: Bool[np.ndarray, " text"],
  *,
  confidence: float = 0.95,
) -> intervals.Interval:
  """Returns by how much the share of two systems differs on the same texts.

  `difference` with the correlation of what the two find.

  Args:
    first: which texts one system finds, at least one text.
    second: which the other.
    confidence: of the interval, in (0, 1).

  Returns:
    Share of the first minus share of the second.
  """
  ends = [
    intervals.wilson(int(one.sum()), len(one), confidence=confidence)
    for one in (first, second)
  ]
  spread = float(first.std() * second.std())
  common = float(np.mean(first & second) - first.mean() * second.mean())
  return difference(*ends, correlation=common / spread if spread else 0.0)


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sized:
  """What `at_size` found: the share, and what its interval rests on."""

  share: intervals.Interval
  chances: Float[np.ndarray, " copy"]
  """Of each copy, to have a near-duplicate among so many originals."""
  variance: float
  """Of the share."""


def at_size(
  copies: Int[np.ndarray, " pair"],
  originals: Int[np.ndarray, " pair"],
  *,
  owners: Int[np.ndarray, " copy"],
  num_originals: int,
  size: int,
  confidence: float = 0.95,
) -> Sized:
  """Returns the share of copies with a near-duplicate among `size` originals.

  The share grows with the number of originals, so two groups can be compared
  at one size alone. The originals are not drawn: the value is the mean over all
  choices of `size` of them, by the hypergeometric distribution (rarefaction).

  The interval takes copies as draws of their owners, all copies of one
  together, and originals as draws from more of their kind. Bootstrapping the
  originals would not do: a resample holds 63% of them, which takes more from
  the share of a small group than from that of a larger one. The jackknife's
  variance is too large rather than too small (Efron and Stein), and the ends
  are Wilson's for as many independent copies as would vary as much.

  Args:
    copies: position of the copy in each pair of near-duplicates, no pair twice.
    originals: position of the original in it.
    owners: of each copy, e.g. the document that it was written for.
    num_originals: how many there are.
    size: below `num_originals`.
    confidence: of the interval, in (0, 1).

  Returns:
    The share, in [0, 1].

  Raises:
    ValueError: if there are no copies, or too few originals.
  """
  if not len(owners) or not 0 < size < num_originals:
    raise ValueError(
      f"expected copies and 0 < size < num_originals, got {len(owners)} copies,"
      f" size={size}, num_originals={num_originals}; compare at a smaller size"
    )
  counts = np.bincount(copies, minlength=len(owners))
  chances = _chance(counts, num_originals, size)
  share = float(chances.mean())
  variance = _covariance(chances, chances, owners) + _variance_of_originals(
    copies, originals, counts, num_originals, size
  )
  effective = share * (1 - share) / variance if variance else 0.0
  if not effective:  # none was found, or each
    effective = min(len(np.unique(owners)), size)
  return Sized(
    share=intervals.wilson(share * effective, effective, confidence=confidence),
    chances=chances,
    variance=variance,
  )


def sized_difference(
  first: Sized, second: Sized, owners: Int[np.ndarray, " copy"]
) -> intervals.Interval:
  """Returns the difference of two shares of the same copies.

  Args:
    first: with a near-duplicate in one group of originals.
    second: in another, independent one, at the same size.
    owners: of each copy.

  Returns:
    `first` minus `second`.
  """
  spread = math.sqrt(first.variance * second.variance)
  common = _covariance(first.chances, second.chances, owners)
  correlation = common / spread if spread else 0.0
  return difference(
    first.share, second.share, correlation=max(-1.0, min(1.0, correlation))
  )


def _chance(
  counts: Int[np.ndarray, " copy"], total: int, size: int
) -> Float[np.ndarray, " copy"]:
  """Returns the chance that `size` of `total` hold one of so many."""
  values, place = np.unique(counts, return_inverse=True)
  none = stats.hypergeom.pmf(0, total, values, size)
  none[values == 0] = 1.0  # but for rounding
  return (1 - none)[place]


def _covariance(one, other, owners) -> float:
  """Returns the covariance of two means over copies, owners being drawn."""
  _, place = np.unique(owners, return_inverse=True)
  number = place.max() + 1
  if number < 2:
    return 0.0
  first, second = (
    np.bincount(place, weights=chances - chances.mean())
    for chances in (one, other)
  )
  return float(number / (number - 1) * (first @ second)) / len(owners) ** 2


def _variance_of_originals(copies, originals, counts, total, size) -> float:
  """Returns the jackknife's variance, originals being drawn."""
  before = _chance(counts, total - 1, size)
  after = _chance(np.maximum(counts - 1, 0), total - 1, size)
  lost = np.bincount(
    originals, weights=(after - before)[copies], minlength=total
  )
  return float(np.sum((lost - lost.mean()) ** 2)) / len(counts) ** 2
