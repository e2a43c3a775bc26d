"""Checks and extremal masses behind the closed forms of `sensitivity`."""

import math
import numbers
from typing import Any

from synthq_jax.privacy import _checks

__all__ = [
  "UNITS",
  "batch_size",
  "batch_sizes",
  "check_finite",
  "check_unit",
  "logistic",
  "mass_of_negatives",
  "mass_on_newcomer",
  "positive",
  "replaces",
  "share",
  "similarity_range",
]

UNITS = ("pair", "query")


def mass_of_negatives(negatives: float, gap: float) -> float:
  """Returns the largest probability that a row's negatives have together.

  Args:
    negatives: how many columns beside the own one, at least 0, or math.inf.
    gap: width of the similarity range over the temperature.
  """
  if negatives == 0:
    return 0.0
  return 1.0 / (1.0 + math.exp(-gap) / negatives)


def mass_on_newcomer(n: float, gap: float) -> float:
  """Returns the most that n - 1 rows together give to the n-th pair's columns.

  Args:
    n: pairs, the newcomer among them, or math.inf.
    gap: width of the similarity range over the temperature.
  """
  if n == 1:
    return 0.0
  inverse = 1.0 / (n - 1) + math.exp(-gap)
  if inverse < 1e-300:
    raise ValueError(
      f"expected a finite limit, got max_batch_size={n} and a similarity range "
      f"of {gap:.0f} temperatures: give a finite max_batch_size"
    )
  return 1.0 / inverse


def share(count: float, total: float) -> float:
  """Returns count / total, its limit 1, or 0 where there is nothing."""
  if math.isinf(count):
    return 1.0
  return count / total if total else 0.0


def logistic(x: float) -> float:
  """Returns 1 / (1 + exp(-x)) without overflow."""
  return (1.0 + math.tanh(x / 2)) / 2


def replaces(relation: Any) -> bool:
  """Returns whether neighbours differ by an exchange."""
  return _checks.relation_name(relation) == "REPLACE_ONE"


def check_unit(unit: str) -> None:
  """Raises ValueError unless it is "pair" or "query"."""
  if unit not in UNITS:
    raise ValueError(f"expected a unit in {UNITS}, got {unit=}")


def check_finite(name: str, value: Any) -> None:
  """Raises ValueError unless `value` is a finite number."""
  if not isinstance(value, numbers.Real) or not math.isfinite(value):
    raise ValueError(f"expected a finite {name}, got {name}={value!r}")


def positive(name: str, value: Any) -> float:
  """Returns a positive finite number as a float."""
  if not isinstance(value, numbers.Real) or not 0 < value < math.inf:
    raise ValueError(f"expected a positive finite {name}, got {name}={value!r}")
  return float(value)


def batch_size(name: str, value: Any) -> float:
  """Returns a number of pairs: an integer of at least 1, or math.inf."""
  if value != math.inf:
    _checks.check_count(name, value, 1)
  return value


def batch_sizes(largest: Any, declared: Any) -> tuple[float, float]:
  """Returns the largest batch and the one that weights are made for."""
  largest = batch_size("max_batch_size", largest)
  if declared is None:
    return largest, largest
  declared = batch_size("declared_batch_size", declared)
  if largest > declared:
    raise ValueError(
      "expected max_batch_size of at most declared_batch_size, got "
      f"max_batch_size={largest} and declared_batch_size={declared}"
    )
  return largest, declared


def similarity_range(bounds: Any) -> tuple[float, float]:
  """Returns (low, high), which are finite and in this order."""
  low, high = bounds
  check_finite("similarity_range[0]", low)
  check_finite("similarity_range[1]", high)
  if not low < high:
    raise ValueError(
      f"expected similarity_range (low, high), got similarity_range={bounds!r}"
    )
  return float(low), float(high)
