"""Computes intervals and the order of means that were released with noise.

Every result is a function of released numbers alone: post-processing.
"""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from scipy import stats

from synthq_jax import intervals
from synthq_jax.runtime import results

__all__ = ["Pair", "compute_quantile", "difference", "mean", "pairs"]


class Pair(NamedTuple):
  """Two rows; the row with the greater released mean comes first."""

  first: str
  """Name of the row with the greater mean."""
  second: str
  """Name of the other row."""
  less: results.ReleasedMean
  """Mean of the first row minus mean of the second."""


def compute_quantile(confidence: float) -> float:
  """Returns the half width, in standard deviations, of a normal interval.

  >>> round(compute_quantile(0.95), 2)
  1.96

  Args:
    confidence: confidence of the two-sided interval, in (0, 1).
  """
  return float(stats.norm.ppf((1 + confidence) / 2))


def mean(
  value: float, *, noise: float, number: int, confidence: float, most: int = 1
) -> results.ReleasedMean:
  """Returns a mean of values in [0, 1] with both of its intervals.

  The variance of such values is at most m (1 - m) for their mean m (Bhatia and
  Davis, 2000). The interval takes the largest such variance that the noise
  leaves possible. If each user has up to K queries, which may score alike, the
  variance of the mean is at most K m (1 - m) / n, by Cauchy and Schwarz for
  each user. Beyond these queries a normal interval covers too
  little where the noise is tiny and a mean of few values is near 0 or 1: 0.84
  instead of 0.95 at a mean of 0.97 of 60 values.

  Args:
    value: the released mean, which may lie outside [0, 1].
    noise: standard deviation of its noise.
    number: number of values.
    confidence: confidence of each interval by itself.
    most: K, the maximum number of values of one user; each user's number is
      taken as fixed.
  """
  width = compute_quantile(confidence)
  here = _around(value, width * noise, 0.0)
  middle = min(max(0.5, here.low), here.high)
  spread = most * middle * (1 - middle)
  half = width * math.sqrt(noise**2 + spread / number)
  return results.ReleasedMean(here=here, beyond=_around(value, half, 0.0))


def difference(
  value: float,
  other: float,
  *,
  noise: float,
  number: int,
  confidence: float,
  most: int = 1,
) -> results.ReleasedMean:
  """Returns the difference of two noisy means with both intervals.

  For means a and b of values in [0, 1] the mean square of the differences is at
  most min(a + b, 2 - a - b). It is attained when few queries are good for both
  rows. The release does not tell how alike two rows are query by query.

  Args:
    value: the first released mean.
    other: the second released mean, over the same queries.
    noise: standard deviation of each mean's noise, which are independent.
    number: number of queries.
    confidence: confidence of each interval by itself.
    most: as in `mean`.
  """
  width = compute_quantile(confidence)
  error = math.sqrt(2) * noise
  here = _around(value - other, width * error, -1.0)
  total = value + other
  half = width * error  # of the sum of both means, too
  total = min(max(1.0, total - half), total + half)
  least = min(max(0.0, here.low), here.high)
  spread = most * max(0.0, min(total, 2 - total) - least**2)
  half = width * math.sqrt(error**2 + spread / number)
  return results.ReleasedMean(
    here=here, beyond=_around(value - other, half, -1.0)
  )


def pairs(scores: results.ReleasedScores, measure: str) -> Iterator[Pair]:
  """Yields all pairs of rows, with intervals that hold for all of them at once.

  With probability `scores.confidence` no interval of its kind misses the truth
  (Bonferroni). The statements about the order of rows therefore hold together.

  Args:
    scores: the released scores.
    measure: name of one of its measures.
  """
  values = {row.name: row.means[measure].here.mean for row in scores.rows}
  ordered = sorted(values, key=values.__getitem__, reverse=True)
  combinations = list(itertools.combinations(ordered, 2))
  for first, second in combinations:
    yield Pair(
      first,
      second,
      difference(
        values[first],
        values[second],
        noise=scores.noise,
        number=scores.num_queries,
        most=scores.statement.unit.max_records,
        confidence=1 - (1 - scores.confidence) / len(combinations),
      ),
    )


def _around(value: float, half: float, lowest: float) -> intervals.Interval:
  """Returns an interval that is cut to the possible range of the value."""
  value, low, high = (
    min(max(x, lowest), 1.0) for x in (value, value - half, value + half)
  )
  return intervals.Interval(mean=value, low=low, high=high)
