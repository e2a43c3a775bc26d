"""Refuses arguments out of range, with one line that names them."""

import math
import numbers
import os
from typing import Any

__all__ = [
  "NO_ID",
  "at_least",
  "clip_norm",
  "count",
  "hide",
  "owner_alone",
  "relation",
  "sizes",
  "within",
]

NO_ID = frozenset(
  (
    *("nan", "null", "none", "nil", "<na>", "n/a", "#n/a", "nat", "\\n"),
    *("undefined", "unknown", "anonymous", "(not set)", "(none)", "-", "-1"),
  )
)
"""Words, in lower case, that pandas, databases and web analytics write for a
missing id."""

_RELATIONS = ("ADD_OR_REMOVE_ONE", "REPLACE_ONE", "REPLACE_SPECIAL")
_SMALLEST_CLIP_NORM = 1e-12


def at_least(low: float, **values: Any) -> None:
  """Refuses numbers below `low`, and NaN.

  >>> at_least(1, batch_size=0)
  Traceback (most recent call last):
  ValueError: expected batch_size >= 1, got batch_size=0

  Args:
    low: the smallest admitted number.
    **values: numbers by name.

  Raises:
    ValueError: naming the first number below `low`.
  """
  for name, value in values.items():
    if not value >= low:
      raise ValueError(f"expected {name} >= {low}, got {name}={value}")


def within(interval: str, **values: Any) -> None:
  """Refuses numbers outside of an interval, and NaN.

  >>> within("(0, 1]", share=0.0)
  Traceback (most recent call last):
  ValueError: expected share in (0, 1], got share=0.0

  Args:
    interval: the interval, e.g. "(0, 1]"; "(" and ")" exclude an end.
    **values: numbers by name.

  Raises:
    ValueError: naming the first number outside.
  """
  low, high = (float(end) for end in interval[1:-1].split(","))
  for name, value in values.items():
    is_above = value >= low if interval[0] == "[" else value > low
    is_below = value <= high if interval[-1] == "]" else value < high
    if not (is_above and is_below):
      raise ValueError(f"expected {name} in {interval}, got {name}={value}")


def clip_norm(l2_clip_norm: float) -> None:
  """Refuses a clip norm to which float32 cannot clip gradients, by a ValueError.

  Squares below 2^-126 are lost. In a million numbers they may hide a norm of
  1e-16, which is negligible next to the smallest clip norm.
  """
  if not (_SMALLEST_CLIP_NORM <= l2_clip_norm and math.isfinite(l2_clip_norm)):
    raise ValueError(
      f"expected l2_clip_norm >= {_SMALLEST_CLIP_NORM:g} and finite, got"
      f" {l2_clip_norm=}: squares of smaller numbers leave the range of float32,"
      " so scale the loss"
    )


def count(name: str, value: Any, low: int, high: int = 2**31 - 1) -> None:
  """Refuses a value that is no integer in [low, high], by a ValueError."""
  is_integer = isinstance(value, numbers.Integral)
  if not is_integer or isinstance(value, bool) or not low <= value <= high:
    raise ValueError(
      f"expected an integer {name} in [{low}, {high}], got {name}={value!r}"
    )


def sizes(**values: Any) -> None:
  """Refuses sizes of a network that are no integers from 1, by a ValueError.

  A file with more than a thousand layers counts as damaged: to name all their
  tensors would take too long.

  Args:
    **values: sizes by name; names that end in "layers" are numbers of layers.
  """
  for name, value in values.items():
    most = 1000 if name.endswith("layers") else 2**31 - 1
    count(name, value, 1, most)


def relation(relation: Any) -> str:
  """Returns the name of a neighbouring relation.

  Args:
    relation: a `dp_accounting.NeighboringRelation` or the name of one.

  Returns:
    "ADD_OR_REMOVE_ONE", "REPLACE_ONE" or "REPLACE_SPECIAL".

  Raises:
    ValueError: if `relation` is neither.
  """
  name = getattr(relation, "name", relation)
  if name not in _RELATIONS:
    raise ValueError(f"expected a relation in {_RELATIONS}, got {relation!r}")
  return name


def hide(folder: str | os.PathLike) -> None:
  """Restricts an existing folder to its owner (mode 700).

  Args:
    folder: an existing folder.

  Raises:
    ValueError: if others may open the folder, and we must not change its mode.
  """
  mode = os.stat(folder).st_mode & 0o777
  if not mode & 0o077:
    return
  try:
    os.chmod(folder, 0o700)
  except PermissionError as error:
    raise ValueError(
      f"{folder}: expected a folder that only its owner may open, got mode"
      f" {mode:o} of another owner: give another --workdir"
    ) from error


def owner_alone(path: str | os.PathLike) -> None:
  """Refuses a file with a secret that anyone but its owner may read.

  Args:
    path: the file.

  Raises:
    ValueError: naming the file and its mode.
  """
  mode = os.stat(path).st_mode & 0o777
  if mode & 0o077:
    raise ValueError(
      f"{path}: expected a secret that only its owner may read, got mode"
      f" {mode:o}: chmod 600 it if nobody has read it, or start again elsewhere"
    )
