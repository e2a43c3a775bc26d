"""Says how far means hold that were released with noise, and in which order.

A function of what was released alone: all of it is post-processing.
"""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from scipy import stats

from synthq_jax import intervals
from synthq_jax.runtime import results

__all__ = ["Pair", "difference", "mean", "pairs", "quantile"]


class Pair(NamedTuple):
  """Two rows, the one with the greater released mean first."""

  first: str
  """Name of a row."""
  second: str
  """Name of a row."""
  less: results.ReleasedMean
  """The first minus the second."""


def quantile(confidence: float) -> float:
  """Returns the half width, in standard deviations, of a normal interval.

  >>> round(quantile(0.95), 2)
  1.96

  Args:
    confidence: of both sides together, in (0, 1).
  """
  return float(stats.norm.ppf((1 + confidence) / 2))


def mean(
  value: float, *, noise: float, number: int, confidence: float, most: int = 1
) -> results.ReleasedMean:
  """Returns a mean of values in [0, 1] with both of its intervals.

  The variance of such values is at most m (1 - m), m their mean (Bhatia and
  Davis, 2000): the largest of it over what the noise leaves open is taken. Where
  users are drawn, with up to K queries each that may be all alike, that of the
  mean is at most K m (1 - m) / n, by Cauchy and Schwarz for each user. Beyond
  these queries a normal interval covers too little where the noise is tiny and a
  mean of few values near 0 or 1: .84 for .95 at .97 of 60 values.

  Args:
    value: as released, which may lie outside of [0, 1].
    noise: its standard deviation.
    number: of values.
    confidence: of each interval by itself.
    most: K, values of one user at most; how many each has is taken as it is.
  """
  width = quantile(confidence)
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
  """Returns a mean less another, both noisy, with both intervals.

  With means a and b of values in [0, 1] the mean square of the differences is
  at most min(a + b, 2 - a - b), attained where few queries are good for both;
  how alike two rows are, query by query, is not released.

  Args:
    value: a mean as released.
    other: another, over the same queries.
    noise: the standard deviation of each, independent of the other's.
    number: of queries.
    confidence: of each interval by itself.
    most: as in `mean`.
  """
  width = quantile(confidence)
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
  (Bonferroni): what they say of the order of rows may be read as one sentence.

  Args:
    scores: what was released.
    measure: of its measures.
  """
  values = {one.name: one.means[measure].here.mean for one in scores.rows}
  ordered = sorted(values, key=values.__getitem__, reverse=True)
  found = list(itertools.combinations(ordered, 2))
  for first, second in found:
    yield Pair(
      first,
      second,
      difference(
        values[first],
        values[second],
        noise=scores.noise,
        number=scores.num_queries,
        most=scores.statement.unit.max_records,
        confidence=1 - (1 - scores.confidence) / len(found),
      ),
    )


def _around(value: float, half: float, lowest: float) -> intervals.Interval:
  """Returns an interval, cut to what such a value can be."""
  value, low, high = (
    min(max(x, lowest), 1.0) for x in (value, value - half, value + half)
  )
  return intervals.Interval(mean=value, low=low, high=high)
