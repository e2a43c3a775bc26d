"""Checks of arguments that the modules of this package share."""

import math
import numbers
from typing import Any

__all__ = ["RELATIONS", "check_clip_norm", "check_count", "relation_name"]

RELATIONS = ("ADD_OR_REMOVE_ONE", "REPLACE_ONE", "REPLACE_SPECIAL")


_SMALLEST_CLIP_NORM = 1e-12


def check_clip_norm(l2_clip_norm: float) -> None:
  """Raises ValueError unless gradients can be clipped to a norm in float32.

  Squares below 2^-126 are lost. Of a million numbers they may hide a norm of
  1e-16, which is nothing beside the smallest clip norm.
  """
  if not (_SMALLEST_CLIP_NORM <= l2_clip_norm and math.isfinite(l2_clip_norm)):
    raise ValueError(
      f"expected l2_clip_norm >= {_SMALLEST_CLIP_NORM:g} and finite, got"
      f" {l2_clip_norm=}: squares of smaller numbers leave the range of float32,"
      " so scale the loss"
    )


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
