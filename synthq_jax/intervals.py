"""Defines the one interval of the package: a value and its two ends."""

import dataclasses
import math

import numpy as np
import scipy.stats
from jaxtyping import Num

__all__ = ["Interval", "clopper_pearson", "student"]


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
  values are enough for. A single value says nothing: its interval is endless.

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
