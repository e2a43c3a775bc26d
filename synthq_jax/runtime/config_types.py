"""Checks values against the types of a dataclass's fields.

Configurations come from text (gin files, flags). A wrong type must be reported
with its setting before a stage spends an hour and then fails.
"""

import contextlib
import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from synthq_jax import checks
from synthq_jax.storage import artifacts

__all__ = [
  "Encoder",
  "at_least",
  "conform",
  "different_names",
  "is_file_name",
  "label",
  "named_as_folder",
  "nested",
  "one_of",
  "positive",
  "some_of",
  "within",
]

_PLAIN = (bool, int, float, str, type(None))


def positive(config: Any, *names: str) -> None:
  """Refuses numbers of a configuration that are not above 0 and finite.

  Args:
    config: a dataclass; a field that is None passes.
    *names: names of the fields.

  Raises:
    ValueError: naming the setting as gin files do.
  """
  for name in names:
    value = getattr(config, name)
    if value is not None and not (value > 0 and math.isfinite(value)):
      raise ValueError(f"{_label(config, name)} must be above 0, got {value}")


def at_least(config: Any, low: int, *names: str) -> None:
  """Refuses whole numbers of a configuration that are below `low`."""
  for name in names:
    value = getattr(config, name)
    if value is not None and value < low:
      raise ValueError(
        f"{_label(config, name)} must be at least {low}, got {value}"
      )


def one_of(config: Any, name: str, choices: Sequence[str]) -> None:
  """Refuses a word of a configuration that is not among `choices`."""
  value = getattr(config, name)
  if value not in choices:
    raise ValueError(
      f"{_label(config, name)} must be one of {', '.join(choices)}, got"
      f" {name}={value!r}"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
  """The public encoder that a study starts from."""

  checkpoint: str | None = None
  """A T5 in the format of Hugging Face or any other known one; None: the
  package's own."""
  vocabulary: str | None = None
  """SentencePiece model of the checkpoint."""
  bert: str | None = None
  """Folder of a BERT of Hugging Face or sentence-transformers with its own
  vocabulary, instead of a T5."""

  def __post_init__(self):
    """Refuses a T5 without its vocabulary, and a T5 together with a BERT."""
    if (self.checkpoint is None) != (self.vocabulary is None):
      raise ValueError(
        f"{_label(self, 'vocabulary')} must be given with checkpoint, and only"
        f" then, got checkpoint={self.checkpoint!r} and"
        f" vocabulary={self.vocabulary!r}"
      )
    if self.bert is not None and self.checkpoint is not None:
      raise ValueError(
        f"{_label(self, 'bert')} must be given without checkpoint, got both"
      )


def some_of(config: Any, name: str, choices: Sequence[str]) -> None:
  """Refuses an empty list of words, or a word that is not among `choices`."""
  values = getattr(config, name)
  if not values or not set(values) <= {*choices}:
    raise ValueError(
      f"{_label(config, name)} must be of {', '.join(choices)}, got"
      f" {name}={values}"
    )


def within(config: Any, interval: str, *names: str) -> None:
  """Refuses numbers of a configuration that lie outside an interval.

  Args:
    config: a dataclass; a field that is None passes.
    interval: in the notation of `checks.within`, e.g. "(0, 1]".
    *names: names of the fields.
  """
  for name in names:
    if (value := getattr(config, name)) is not None:
      checks.within(interval, **{_label(config, name): value})


def different_names(config: Any, name: str) -> None:
  """Refuses a configuration in which two parts have the same `name`."""
  names = [part.name for part in getattr(config, name)]
  if len(set(names)) < len(names):
    raise ValueError(
      f"{_label(config, name)} must have different names, got {names}"
    )


def named_as_folder(config: Any, taken: str = "") -> None:
  """Refuses a `name` that cannot be the name of a folder, or is taken.

  Args:
    config: a dataclass.
    taken: a name that is used for something else.
  """
  if not is_file_name(config.name) or config.name == taken:
    other = f", and not {taken!r}" if taken else ""
    raise ValueError(
      f"{_label(config, 'name')} must be a word for a folder{other}, got"
      f" {config.name!r}"
    )


def is_file_name(text: str) -> bool:
  """Checks whether a text is a safe file name on every system.

  >>> [is_file_name(text) for text in ("fiqa", "cqadupstack.gis", "a/b", "..")]
  [True, True, False, False]
  """
  return bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text))


def label(kind: type) -> str:
  """Returns the name of a configuration in gin files: module.Class."""
  return f"{kind.__module__.rpartition('.')[2]}.{kind.__qualname__}"


def _label(config: Any, name: str) -> str:
  return f"{label(type(config))}.{name}"


def nested(hint: Any) -> Iterator[type]:
  """Yields the dataclasses that a type holds, the innermost first."""
  if dataclasses.is_dataclass(hint):
    for inner in artifacts.hints(hint).values():
      yield from nested(inner)
    yield hint
  for inner in typing.get_args(hint):
    yield from nested(inner)


def conform(value: Any, hint: Any, where: str) -> Any:
  """Converts a value to the type of its field.

  Integers become floats and lists become tuples where the type asks for these.
  So 8 and 8.0 are the same setting and have the same fingerprint.

  >>> conform(8, float | None, "x"), conform([1, 2], tuple[float, ...], "x")
  (8.0, (1.0, 2.0))
  >>> conform("8", float, "finetune_dp.Config.epsilon")
  Traceback (most recent call last):
  ValueError: finetune_dp.Config.epsilon: expected float, got '8'

  Args:
    value: anything.
    hint: its type; types other than plain ones, unions, tuples and dataclasses
      are not checked.
    where: name of the setting, for the message.

  Returns:
    The value, converted if the conversion loses nothing.

  Raises:
    ValueError: if it has another type.
  """
  origin = typing.get_origin(hint)
  if origin in (typing.Union, types.UnionType):
    return _conform_union(value, hint, where)
  if origin is tuple:
    return _conform_tuple(value, hint, where)
  if dataclasses.is_dataclass(hint):
    return _conform_fields(value, hint, where)
  if hint is float and type(value) is int:
    return float(value)
  if hint in _PLAIN and type(value) is not hint:
    raise _error(value, hint, where)
  return value


def _conform_union(value: Any, hint: Any, where: str) -> Any:
  for kind in typing.get_args(hint):
    with contextlib.suppress(ValueError):
      return conform(value, kind, where)
  raise _error(value, hint, where)


def _conform_tuple(value: Any, hint: Any, where: str) -> Any:
  kinds = typing.get_args(hint)
  if not isinstance(value, (list, tuple)):
    raise _error(value, hint, where)
  if kinds[-1:] == (...,):
    kinds = kinds[:1] * len(value)
  if len(kinds) != len(value):
    raise _error(value, hint, where)
  items = enumerate(zip(value, kinds, strict=True))
  return tuple(conform(v, kind, f"{where}[{i}]") for i, (v, kind) in items)


def _conform_fields(value: Any, hint: type, where: str) -> Any:
  """Checks every field; returns a copy if a value was converted."""
  if not isinstance(value, hint):
    raise _error(value, hint, where)
  changed = {}
  for name, kind in artifacts.hints(type(value)).items():
    before = getattr(value, name)
    after = conform(before, kind, f"{where}.{name}")
    if after is not before and repr(after) != repr(before):
      changed[name] = after
  return dataclasses.replace(value, **changed) if changed else value


def _error(value: Any, hint: Any, where: str) -> ValueError:
  words = hint.__name__ if isinstance(hint, type) else str(hint)
  return ValueError(f"{where}: expected {words}, got {value!r}")
