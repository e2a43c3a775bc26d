"""Checks of arguments that the modules of this package share."""

import numbers
from typing import Any

__all__ = ["RELATIONS", "check_count", "relation_name"]

RELATIONS = ("ADD_OR_REMOVE_ONE", "REPLACE_ONE", "REPLACE_SPECIAL")


def check_count(name: str, value: Any, low: int, high: int = 2**31 - 1) -> None:
  """Raises ValueError unless `value` is an integer in [low, high]."""
  is_integer = isinstance(value, numbers.Integral)
  if not is_integer or isinstance(value, bool) or not low <= value <= high:
    raise ValueError(
      f"expected an integer {name} in [{low}, {high}], got {name}={value!r}"
    )


def relation_name(relation: Any) -> str:
  """Returns the name of a neighbouring relation.

  Args:
    relation: a `dp_accounting.NeighboringRelation` or the name of one.

  Returns:
    One of `RELATIONS`.

  Raises:
    ValueError: if it is neither.
  """
  name = getattr(relation, "name", relation)
  if name not in RELATIONS:
    raise ValueError(f"expected a relation in {RELATIONS}, got {relation!r}")
  return name
