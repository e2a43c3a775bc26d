"""Writes the numbers of a claim; epsilon and delta are rounded up.

So a text never claims more than its numbers. Every printed epsilon and delta goes
through here, so one number reads alike everywhere.
"""

import decimal
import math

__all__ = ["delta", "epsilon", "factor", "noise", "up"]


def epsilon(value: float) -> str:
  """Writes an epsilon with four digits.

  >>> epsilon(7.99911), epsilon(8.0), epsilon(0.0), epsilon(math.inf)
  ('8', '8', '0', 'inf')
  """
  return up(value, digits=4)


def factor(epsilon: float) -> str:
  """Writes e^epsilon, the factor by which odds may grow.

  It is rounded up to three digits; from 1,000 to 1e9, to an integer.

  >>> [factor(epsilon) for epsilon in (1, 1.5, 8, 700, 800)]
  ['2.72', '4.49', '2,981', '1.02e+304', 'inf']
  """
  value = math.exp(epsilon) if epsilon < 709 else math.inf
  if 1000 <= value < 1e9:
    return f"{math.ceil(value):,}"
  return f"{float(up(value, digits=3)):,.4g}"


def delta(value: float) -> str:
  """Writes a delta with three digits.

  >>> delta(1 / 13122), delta(1e-05)
  ('7.63e-05', '1e-05')
  """
  return up(value, digits=3)


def up(
  value: float, *, digits: int | None = None, places: int | None = None
) -> str:
  """Writes a number, rounded up to `digits` digits or `places` decimal places.

  Formal guarantee: the text, read as a float, is at least the value. It is the
  value itself if the shortest decimal form of the value is short enough.

  >>> up(12.1201, digits=4), up(0.57, places=2), up(2.001, places=2)
  ('12.13', '0.57', '2.01')

  Args:
    value: at least 0; may be infinite.
    digits: the number of significant digits; or
    places: the number of decimal places.
  """
  if math.isinf(value):
    return "inf"
  number = decimal.Decimal(repr(float(value)))
  if digits is not None:
    last = number.adjusted() - digits + 1
  else:
    assert places is not None, "digits or places"
    last = -places
  return _round(number, last, decimal.ROUND_CEILING)


def noise(value: float, *, digits: int) -> str:
  """Writes a noise multiplier, rounded down, so that the text claims no more.

  >>> noise(0.5517531, digits=4), noise(0.0, digits=4), noise(1e-21, digits=2)
  ('0.5517', '0', '1e-21')

  Args:
    value: at least 0, finite.
    digits: the number of significant digits.

  Returns:
    The number as text, which is at most the value.
  """
  number = decimal.Decimal(repr(float(value)))
  return _round(number, number.adjusted() - digits + 1, decimal.ROUND_FLOOR)


def _round(number: decimal.Decimal, last: int, rounding: str) -> str:
  exponent = number.as_tuple().exponent
  assert isinstance(exponent, int), "a finite number"
  if exponent < last:
    number = number.quantize(decimal.Decimal(1).scaleb(last), rounding)
  return repr(float(number)).removesuffix(".0")
