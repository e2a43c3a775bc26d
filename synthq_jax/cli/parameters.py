"""Resolves the NAME of a --gin.NAME flag: module, class, parameter.

Gin binds only parameters of modules that a gin file imports. A flag may name those
of every module of this package, whose import lines are found here.
"""

import dataclasses
import difflib
import functools
import importlib
import itertools
import pathlib
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from synthq_jax.cli import flags

__all__ = ["find_imports", "find_unused", "is_class", "suggest"]

_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
_FIRST = ("studies", "runtime", "stages", "models", "training", "data")
"""Packages that win, in this order, if several have a module of the same name."""
_Read = Sequence[Sequence[pathlib.Path]]
"""For each --gin_file, the file and those it includes."""


def find_imports(text: str, read: _Read) -> list[str]:
  """Returns the import lines that a binding needs; those of the gin files win.

  Args:
    text: the binding, NAME = value.
    read: the gin files.
  """
  import_lines = dict(_list_modules())
  for path in itertools.chain(*read):
    import_lines |= flags.parse_imports(flags.read_gin(path))
  names = sorted(set(re.findall(r"(\w+)\.", text)) & set(import_lines))
  return [import_lines[name] for name in names]


def find_unused(
  config: str, operative: str, macros_in_files: Collection[str], read: _Read
) -> list[str]:
  """Lists settings without effect in words; refuses those that look like slips.

  A macro that a file refers to passes, even if a flag binds the parameter.

  Args:
    config: all bindings, as gin writes them.
    operative: the bindings that had an effect.
    macros_in_files: macros that the files refer to.
    read: the gin files.

  Raises:
    UsageError: if nothing uses a macro, and a similar name is used.
  """
  used = {name.rpartition("/")[2] for name in flags.names(operative)}
  unused = []
  for name in flags.names(config):
    if name.rpartition("/")[2] in used or name in macros_in_files:
      continue
    words = f"{name} is set, but nothing uses it"
    near = difflib.get_close_matches(name.upper(), macros_in_files, 1, 0.85)
    if near and "." not in name:
      where = flags.locate(name, read, ())
      raise flags.UsageError(f"{where}: {words}; did you mean {near[0]}?")
    unused.append(words)
  return unused


def is_class(name: str, read: _Read) -> bool:
  """Tests whether a name is a class's, without a parameter."""
  *_, (_, scope) = _resolve_parts(name, read)
  return isinstance(scope, type)


def suggest(name: str, read: _Read) -> str:
  """Suggests a similar name for the first wrong part of a parameter's name.

  Args:
    name: the name, module.Class.parameter.
    read: the gin files.

  Returns:
    The suggested part, or "" if nothing is similar.
  """
  names = list(_list_modules())
  for part, scope in _resolve_parts(name, read) if "." in name else ():
    if part not in names:
      return next(iter(difflib.get_close_matches(part, names, 1)), "")
    if scope is None:  # its extra is not installed
      return ""
    names = list(getattr(scope, "__all__", dir(scope)))
    if dataclasses.is_dataclass(scope):
      names = [field.name for field in dataclasses.fields(scope)]
  return ""


def _resolve_parts(name: str, read: _Read) -> Iterator[tuple[str, Any]]:
  """Yields each part of a name with its object, or None if there is none."""
  module, *rest = name.rpartition("/")[2].split(".")
  scope = None
  try:
    match = re.match(
      r"from (\S+) import (\w+)", *find_imports(f"{module}.", read)
    )
    scope = importlib.import_module(".".join(match.groups()))
  except (AttributeError, ImportError, TypeError):  # no such module, or extra
    pass
  yield module, scope
  for part in rest:
    scope = getattr(scope, part, None)
    yield part, scope


@functools.cache
def _list_modules() -> dict[str, str]:
  """Returns the import line of each module and package here, by its name."""
  import_lines = {}
  folders = {path.parent for path in _PACKAGE.rglob("__init__.py")} - {_PACKAGE}
  priority = {name: number for number, name in enumerate(_FIRST)}
  for folder in sorted(
    folders,
    key=lambda folder: (priority.get(folder.name, len(priority)), folder),
  ):
    for path in (folder, *sorted(folder.glob("[a-z]*.py"))):
      parts = path.relative_to(_PACKAGE).with_suffix("").parts
      package = ".".join(("synthq_jax", *parts[:-1]))
      import_lines.setdefault(path.stem, f"from {package} import {parts[-1]}")
  return import_lines
