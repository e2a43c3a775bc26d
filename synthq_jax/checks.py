"""Refuses arguments out of range, in one line that names them."""

from typing import Any

__all__ = ["at_least", "within"]


def at_least(low: float, **values: Any) -> None:
  """Refuses numbers below `low`, and what is no number.

  >>> at_least(1, batch_size=0)
  Traceback (most recent call last):
  ValueError: expected batch_size >= 1, got batch_size=0

  Args:
    low: the least that is fine.
    **values: numbers by name.

  Raises:
    ValueError: naming the first that is wrong.
  """
  for name, value in values.items():
    if not value >= low:
      raise ValueError(f"expected {name} >= {low}, got {name}={value}")


def within(interval: str, **values: Any) -> None:
  """Refuses numbers outside of an interval, and what is no number.

  >>> within("(0, 1]", share=0.0)
  Traceback (most recent call last):
  ValueError: expected share in (0, 1], got share=0.0

  Args:
    interval: its ends, as they are written: "(" and ")" leave an end out.
    **values: numbers by name.

  Raises:
    ValueError: naming the first that is wrong.
  """
  low, high = (float(end) for end in interval[1:-1].split(","))
  for name, value in values.items():
    is_above = value >= low if interval[0] == "[" else value > low
    is_below = value <= high if interval[-1] == "]" else value < high
    if not (is_above and is_below):
      raise ValueError(f"expected {name} in {interval}, got {name}={value}")
