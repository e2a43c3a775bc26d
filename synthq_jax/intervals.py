"""Defines the one interval of the package: a value and its two ends."""

import dataclasses
import math

import numpy as np
import scipy.stats
from jaxtyping import Num

__all__ = ["Interval", "bounded", "clopper_pearson", "student", "wilson"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
  """A measured value, mostly a mean, and the interval around it.

  What was measured, at which level, and what the interval covers (queries,
  canaries, clients) is said by the function that returns it.

  >>> f"{Interval(mean=0.25, low=0.24, high=0.2604):.3f}"
  '0.250 [0.240, 0.260]'
  """

  mean: float
  """The value."""
  low: float
  """The lower end."""
  high: float
  """The upper end."""

  def __format__(self, spec: str) -> str:
    """Writes the value, then the ends in brackets, each with this format."""
    return f"{self.mean:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"

  def __neg__(self) -> "Interval":
    """Returns the interval of the value with the other sign."""
    return Interval(mean=-self.mean, low=-self.high, high=-self.low)

  def __mul__(self, factor: float) -> "Interval":
    """Returns the interval of a multiple, for instance in percent.

    Args:
      factor: at least 0.
    """
    return Interval(
      mean=factor * self.mean, low=factor * self.low, high=factor * self.high
    )

  __rmul__ = __mul__


def student(
  values: Num[np.ndarray, " value"], *, confidence: float = 0.95
) -> Interval:
  """Returns a mean with Student's interval.

  It takes the values for independent draws and their mean for normal, which 30
  values are enough for unless almost all of them are equal: then `bounded` holds.
  A single value says nothing: its interval is endless.

  >>> f"{student(np.array([40, 60, 50, 50])):.1f}"
  '50.0 [37.0, 63.0]'

  Args:
    values: at least one.
    confidence: in (0, 1).
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
  """Returns a share with Clopper and Pearson's interval.

  >>> f"{clopper_pearson(0, 10):.3f}"
  '0.000 [0.000, 0.308]'

  Args:
    hits: of independent trials.
    total: trials, at least 1.
    confidence: in (0, 1).

  Returns:
    Values in [0, 1]; the interval covers the truth at least so often.

  References:
    Clopper and Pearson, "The use of confidence or fiducial limits illustrated
    in the case of the binomial", Biometrika 1934.
  """
  each = (1 - confidence) / 2
  misses = total - hits
  low = scipy.stats.beta.ppf(each, hits, misses + 1) if hits else 0.0
  high = scipy.stats.beta.isf(each, hits + 1, misses) if misses else 1.0
  return Interval(mean=hits / total, low=float(low), high=float(high))


def wilson(found: float, total: float, *, confidence: float = 0.95) -> Interval:
  """Returns a share with Wilson's interval, which holds for few texts, too.

  >>> share = wilson(0, 100)
  >>> share.mean, share.low, round(share.high, 3)
  (0.0, 0.0, 0.037)

  Args:
    found: how many of the texts; no whole number where they count by halves.
    total: the number of independent texts, above 0.
    confidence: of the interval, in (0, 1).

  Returns:
    Values in [0, 1].

  Raises:
    ValueError: if there are no texts, or more were found than there are.

  References:
    Wilson, "Probable inference, the law of succession, and statistical
    inference", JASA 1927.
  """
  if not 0 <= found <= total or not total > 0:
    raise ValueError(
      f"expected 0 <= found <= total and total > 0, got found={found},"
      f" total={total}; count again"
    )
  z = scipy.stats.norm.isf((1 - confidence) / 2)
  share = found / total
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
  """Returns the mean of bounded values with an interval that holds for few.

  Nothing is taken for normal: it covers the mean of independent draws at least
  so often, whatever their law, also where almost all of them are equal.

  >>> f"{bounded(np.ones(30), 1, 100):.1f}"
  '1.0 [1.0, 15.8]'

  Args:
    values: at least one, within the bounds, in an order that does not depend on
      them.
    low: the least value that there could be.
    high: the largest.
    confidence: in (0, 1).

  Returns:
    Mean and ends, within the bounds.

  References:
    Waudby-Smith and Ramdas, "Estimating means of bounded random variables by
    betting", JRSS B 2024, theorem 3 (hedged capital): for each mean that could
    be, a gambler bets that it is too low and another that it is too high; it is
    refused where half of what one of them won is 1 / (1 - confidence).
  """
  x = (np.asarray(values, float) - low) / (high - low)
  number, limit = len(x), math.log(2 / (1 - confidence))
  # What is known before each value: its mean and variance so far.
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
