"""Computes intervals of measured values: a value and its two ends."""

import dataclasses
import math

import numpy as np
import scipy.stats
from jaxtyping import Num

__all__ = ["Interval", "bounded", "clopper_pearson", "student", "wilson"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
  """A measured value, mostly a mean, and the interval around it.

  The function that returns it documents the quantity, the confidence level and the
  population that the interval covers (queries, canaries, clients).

  >>> f"{Interval(mean=0.25, low=0.24, high=0.2604):.3f}"
  '0.250 [0.240, 0.260]'
  """

  mean: float
  """The measured value."""
  low: float
  """Lower end of the interval."""
  high: float
  """Upper end of the interval."""

  def __format__(self, spec: str) -> str:
    """Formats the value, then the ends in brackets, each with this format."""
    return f"{self.mean:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"

  def __neg__(self) -> "Interval":
    """Returns the interval of the negated value."""
    return Interval(mean=-self.mean, low=-self.high, high=-self.low)

  def __mul__(self, factor: float) -> "Interval":
    """Returns the interval of a multiple, for example in percent.

    Args:
      factor: the factor, at least 0.
    """
    return Interval(
      mean=factor * self.mean, low=factor * self.low, high=factor * self.high
    )

  __rmul__ = __mul__


def student(
  values: Num[np.ndarray, " value"], *, confidence: float = 0.95
) -> Interval:
  """Computes a mean with Student's interval.

  It assumes that values are independent draws and that their mean is normal. 30
  values are enough for that unless almost all of them are equal; then use `bounded`.
  The interval of a single value is infinite.

  >>> f"{student(np.array([40, 60, 50, 50])):.1f}"
  '50.0 [37.0, 63.0]'

  Args:
    values: the values, at least one.
    confidence: level of the interval, in (0, 1).
  """
  mean, number = float(np.mean(values)), len(values)
  if number == 1:
    return Interval(mean=mean, low=-math.inf, high=math.inf)
  error = float(np.std(values, ddof=1)) / math.sqrt(number)
  half = float(scipy.stats.t.ppf((1 + confidence) / 2, number - 1)) * error
  return Interval(mean=mean, low=mean - half, high=mean + half)


def clopper_pearson(
  hits: int, total: int, *, confidence: float = 0.95
) -> Interval:
  """Computes a share with Clopper and Pearson's interval.

  >>> f"{clopper_pearson(0, 10):.3f}"
  '0.000 [0.000, 0.308]'

  Args:
    hits: number of successes in independent trials.
    total: number of trials, at least 1.
    confidence: level of the interval, in (0, 1).

  Returns:
    Values in [0, 1]; the interval covers the true share with a probability of
    `confidence` or more.

  References:
    Clopper and Pearson, "The use of confidence or fiducial limits illustrated
    in the case of the binomial", Biometrika 1934.
  """
  each = (1 - confidence) / 2
  misses = total - hits
  low = scipy.stats.beta.ppf(each, hits, misses + 1) if hits else 0.0
  high = scipy.stats.beta.isf(each, hits + 1, misses) if misses else 1.0
  return Interval(mean=hits / total, low=float(low), high=float(high))


def wilson(hits: float, total: float, *, confidence: float = 0.95) -> Interval:
  """Computes a share with Wilson's interval, which suits few texts, too.

  >>> share = wilson(0, 100)
  >>> share.mean, share.low, round(share.high, 3)
  (0.0, 0.0, 0.037)

  Args:
    hits: number of texts that count; it may be fractional.
    total: number of independent texts, above 0.
    confidence: level of the interval, in (0, 1).

  Returns:
    Values in [0, 1].

  Raises:
    ValueError: if there are no texts, or more hits than texts.

  References:
    Wilson, "Probable inference, the law of succession, and statistical
    inference", JASA 1927.
  """
  if not 0 <= hits <= total or not total > 0:
    raise ValueError(
      f"expected 0 <= hits <= total and total > 0, got hits={hits},"
      f" total={total}; count again"
    )
  z = scipy.stats.norm.isf((1 - confidence) / 2)
  share = hits / total
  middle = (share + z**2 / (2 * total)) / (1 + z**2 / total)
  half = z * math.sqrt(share * (1 - share) / total + (z / (2 * total)) ** 2)
  half /= 1 + z**2 / total
  return Interval(
    mean=float(share),
    low=float(min(share, max(0.0, middle - half))),
    high=float(max(share, min(1.0, middle + half))),
  )


def bounded(
  values: Num[np.ndarray, " value"],
  low: float,
  high: float,
  *,
  confidence: float = 0.95,
) -> Interval:
  """Computes the mean of bounded values with an interval that is valid for few.

  It does not assume normality: it covers the mean of independent draws with a
  probability of `confidence` or more for every distribution, also if almost all
  values are equal.

  >>> f"{bounded(np.ones(30), 1, 100):.1f}"
  '1.0 [1.0, 15.8]'

  Args:
    values: one or more values within the bounds, in an order that does not depend
      on them.
    low: the smallest possible value.
    high: the largest possible value.
    confidence: level of the interval, in (0, 1).

  Returns:
    Mean and ends, within the bounds.

  References:
    Waudby-Smith and Ramdas, "Estimating means of bounded random variables by
    betting", JRSS B 2024, theorem 3 (hedged capital): for each possible
    mean, a gambler bets that it is too low and another that it is too high; it is
    rejected if half of one gambler's capital reaches 1 / (1 - confidence).
  """
  x = (np.asarray(values, float) - low) / (high - low)
  number, limit = len(x), math.log(2 / (1 - confidence))
  # Mean and variance of the values so far, on which the next bet may depend.
  seen = np.arange(1, number + 1)
  means = (0.5 + np.cumsum(x)) / (seen + 1)
  variances = (0.25 + np.cumsum((x - means) ** 2)) / (seen + 1)
  before = np.concatenate([[0.25], variances[:-1]])
  bets = np.sqrt(2 * limit / (number * before))
  means_tried = np.linspace(0, 1, 2001)[1:-1]
  gains = x[:, None] - means_tried  # [value, mean]
  up = np.minimum(bets[:, None], 0.75 / means_tried) * gains
  down = np.minimum(bets[:, None], 0.75 / (1 - means_tried)) * -gains
  refused = [
    np.log1p(won).cumsum(axis=0).max(axis=0) >= limit for won in (up, down)
  ]
  least = means_tried[refused[0]].max(initial=0.0)
  most = means_tried[refused[1]].min(initial=1.0)
  mean = float(np.mean(values))
  return Interval(
    mean=mean,
    low=min(mean, float(low + (high - low) * least)),
    high=max(mean, float(low + (high - low) * most)),
  )
