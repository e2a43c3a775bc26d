"""Finds what a flag's NAME means: modules, classes and their parameters.

Gin binds parameters of what a file imports; a flag may name those of every module
of this package, which are looked up here without importing them.
"""

import dataclasses
import difflib
import functools
import importlib
import itertools
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from synthq_jax.cli import flags

__all__ = ["imports", "is_class", "nearest"]

_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
_FIRST = ("studies", "runtime", "stages", "models", "training", "data")
"""Packages whose modules a flag means where others have one of the name."""
_Read = Sequence[Sequence[pathlib.Path]]
"""For each --gin_file, the file and what it includes."""


def imports(text: str, read: _Read) -> list[str]:
  """Returns a binding's gin imports: as the files have them, else by module name.

  Args:
    text: NAME = value.
    read: the gin files.
  """
  found = dict(_modules())
  for path in itertools.chain(*read):
    found |= flags.parse_imports(path.read_text())
  names = sorted(set(re.findall(r"(\w+)\.", text)) & set(found))
  return [found[name] for name in names]


def is_class(name: str, read: _Read) -> bool:
  """Tests for the name of a class without a parameter behind it."""
  *_, (_, scope) = _walked(name, read)
  return isinstance(scope, type)


def nearest(name: str, read: _Read) -> str:
  """Returns the name that a parameter is closest to, where a part is wrong.

  Args:
    name: module.Class.parameter.
    read: the gin files.

  Returns:
    What the wrong part likely should be; "" where nothing is near.
  """
  names = list(_modules())
  for part, scope in _walked(name, read) if "." in name else ():
    if part not in names:
      return next(iter(difflib.get_close_matches(part, names, 1)), "")
    if scope is None:  # of an extra that is not there
      return ""
    names = list(getattr(scope, "__all__", dir(scope)))
    if dataclasses.is_dataclass(scope):
      names = [field.name for field in dataclasses.fields(scope)]
  return ""


def _walked(name: str, read: _Read) -> Iterator[tuple[str, Any]]:
  """Yields each part of a name and what it stands for; None: nobody knows."""
  module, *rest = name.rpartition("/")[2].split(".")
  scope = None
  try:
    place = re.match(r"from (\S+) import (\w+)", *imports(f"{module}.", read))
    scope = importlib.import_module(".".join(place.groups()))
  except (AttributeError, ImportError, TypeError):  # no such module, or extra
    pass
  yield module, scope
  for part in rest:
    scope = getattr(scope, part, None)
    yield part, scope


@functools.cache
def _modules() -> dict[str, str]:
  """The packages and modules of this package by name, each with its import."""
  found = {}
  folders = {path.parent for path in _PACKAGE.rglob("__init__.py")} - {_PACKAGE}
  place = {name: number for number, name in enumerate(_FIRST)}
  for folder in sorted(
    folders, key=lambda one: (place.get(one.name, len(place)), one)
  ):
    for path in (folder, *sorted(folder.glob("[a-z]*.py"))):
      parts = path.relative_to(_PACKAGE).with_suffix("").parts
      package = ".".join(("synthq_jax", *parts[:-1]))
      found.setdefault(path.stem, f"from {package} import {parts[-1]}")
  return found
