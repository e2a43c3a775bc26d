"""Defines the one interval of the package: a value and its two ends."""

import dataclasses

__all__ = ["Interval"]


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

  def __mul__(self, factor: float) -> "Interval":
    """Returns the interval of a multiple, for instance in percent.

    Args:
      factor: at least 0.
    """
    return Interval(
      mean=factor * self.mean, low=factor * self.low, high=factor * self.high
    )

  __rmul__ = __mul__
