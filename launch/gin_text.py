"""Gin files read as text: the macros that a recipe defines, and what it needs.

Launchers check names before a machine is paid for, on computers where neither
gin nor synthq_jax need be installed. The library itself checks the rest.
"""

import pathlib
import re

__all__ = ["REQUIRED", "find", "macros"]

REQUIRED = "%gin.REQUIRED"
"""The value of a macro that has no default."""

_INCLUDE = re.compile(r"include\s+['\"]([^'\"]+)['\"]")
_MACRO = re.compile(r"([A-Za-z_]\w*)\s*=\s*(.*)")
_COMMENT = re.compile(r"\s+#.*$")


def find(name: str, root: pathlib.Path) -> pathlib.Path:
  """Finds a gin file inside a checkout.

  Args:
    name: a path that is absolute, or relative to the checkout, to its
      `gin_configs`, or to the current folder.
    root: the checkout.

  Returns:
    The path of the file.

  Raises:
    ValueError: if there is no such file.
  """
  for folder in (root, root / "gin_configs", pathlib.Path()):
    path = folder / name
    if path.is_file():
      return path.resolve()
  raise ValueError(
    f"expected --gin_file to name a file, got {name}, which is neither there"
    f" nor in {root.name}/gin_configs; correct the path"
  )


def macros(path: pathlib.Path, root: pathlib.Path) -> dict[str, str]:
  """Reads the macros that a gin file and what it includes define.

  Args:
    path: the file.
    root: the checkout, where included files are looked for.

  Returns:
    The first line of each macro's value as text; the last definition wins, as
    in gin.

  Raises:
    ValueError: if an included file is missing.
  """
  values: dict[str, str] = {}
  for line in path.read_text(encoding="utf-8").splitlines():
    if included := _INCLUDE.match(line):
      values |= macros(find(included[1], root), root)
    elif macro := _MACRO.match(line):
      values[macro[1]] = _COMMENT.sub("", macro[2]).strip()
  return values
