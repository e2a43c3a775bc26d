"""Reads the docstrings of installed packages without importing them.

The package name "python" stands for the standard library.
"""

import ast
import dataclasses
import functools
import importlib.metadata
import importlib.util
import pathlib
import platform
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Mapping

__all__ = [
  "STANDARD_LIBRARY",
  "Docstring",
  "get_max_count",
  "read",
  "read_file",
  "version",
  "words",
]

STANDARD_LIBRARY = "python"
"""Package name of the modules that come with the interpreter."""

# Modules that some distributions leave out or later versions lack.
_NOT_EVERYWHERE = frozenset(
  "antigravity distutils ensurepip idlelib lib2to3 pydoc_data this tkinter"
  " turtle turtledemo venv".split()
)

_SKIPPED = re.compile(
  r"(^|[/_])(tests?|testing|_vendor|vendored|third_party)([/_.]|$)"
)
_ROLE = re.compile(r":[a-zA-Z:+-]+:`([^`<]*?)(?:\s*<[^>]*>)?`")
_LINK = re.compile(r"`([^`<]+?)\s*<[^>]*>`_*")
_MARKUP = re.compile(r"`+|\*\*|(?<!\w)\*(?=\w)|(?<=\w)\*(?!\w)|_(?=\s|$)")
_RULE = re.compile(r"^[\s\-=~^.*_#+|]{3,}$")
_DIRECTIVE = re.compile(r"^\s*(\.\.\s.*|:[a-z-]+:.*|@\S*|>>>.*|\.\.\.\s.*)$")
_WORD = re.compile(r"[a-z0-9]+")


@dataclasses.dataclass(frozen=True)
class Docstring:
  """A docstring without markup, in two parts."""

  package: str
  """Name by which the docstring's package is imported."""
  name: str
  """Dotted name of the module, class or function."""
  first: str
  """The first paragraph, on one line."""
  rest: str
  """The other paragraphs, on one line."""


def words(text: str) -> list[str]:
  """Returns the lower-cased words of a text.

  >>> words("Returns the n-th item.")
  ['returns', 'the', 'n', 'th', 'item']
  """
  return _WORD.findall(text.lower())


def version(package: str) -> str:
  """Returns the installed version of a top-level package, or of Python."""
  if package == STANDARD_LIBRARY:
    return platform.python_version()
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return importlib.metadata.version(
      _get_distributions().get(package, [package])[0]
    )


@functools.cache  # slow: it reads the file list of every distribution
def _get_distributions() -> Mapping[str, list[str]]:
  return importlib.metadata.packages_distributions()


def read(package: str) -> Iterator[Docstring]:
  """Yields the public docstrings of an installed package, file by file.

  Files are parsed, never executed. Test folders, private classes and functions, and
  docstrings of a single paragraph are left out.

  Args:
    package: the top-level name to import it by, e.g. "numpy", or
      `STANDARD_LIBRARY`.

  Raises:
    ValueError: if the package is not installed.
  """
  for path, relative in _list_files(package):
    module = f"{package}.{relative[:-3].replace('/', '.')}"
    yield from read_file(path, package, module)


def get_max_count(package: str) -> int:
  """Returns an upper bound of what `read` yields, without parsing a file.

  Args:
    package: as in `read`.

  Raises:
    ValueError: if the package is not installed.
  """
  texts = (path.read_bytes() for path, _ in _list_files(package))
  return sum(1 + t.count(b"def ") + t.count(b"class ") for t in texts)


def _list_files(package: str) -> Iterator[tuple[pathlib.Path, str]]:
  """Yields each source file and its name within the package, in order.

  Files of test folders are left out.
  """
  if package == STANDARD_LIBRARY:
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    names = sorted(sys.stdlib_module_names - _NOT_EVERYWHERE)
    parts = [root / name for name in names if not name.startswith("_")]
    paths = [path.with_suffix(".py") for path in parts]
    paths = [path for path in paths if path.is_file()]
    roots = [(root, [*paths, *_list_python_files(*parts)])]
  else:
    spec = importlib.util.find_spec(package)
    if spec is None:
      raise ValueError(f"expected package {package!r} to be installed: pip it")
    locations = map(pathlib.Path, spec.submodule_search_locations or ())
    roots = [(root, _list_python_files(root)) for root in locations]
  for root, paths in roots:
    for path in paths:
      relative = path.relative_to(root).as_posix()
      if not _SKIPPED.search(relative):
        yield path, relative


def _list_python_files(*folders: pathlib.Path) -> list[pathlib.Path]:
  """Returns the Python files of each folder, sorted within it."""
  return [path for folder in folders for path in sorted(folder.rglob("*.py"))]


def read_file(
  path: pathlib.Path, package: str = "", module: str = ""
) -> Iterator[Docstring]:
  """Yields the public docstrings of one source file; none if it is not Python.

  Args:
    path: the file.
    package: the import name of the file's package.
    module: the dotted name of the file's module.
  """
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")  # other people's invalid escapes
      tree = ast.parse(path.read_text(encoding="utf-8"))
  except (SyntaxError, UnicodeDecodeError):
    return
  for name, node in _iterate_definitions(tree, module):
    text = ast.get_docstring(node)
    first, rest = _split(text or "")
    if first and rest:
      yield Docstring(package, name, first, rest)


def _iterate_definitions(tree: ast.Module, module: str):
  """Yields (dotted name, node) of the module and its public definitions."""
  stack = [(module, tree)]
  while stack:
    name, node = stack.pop(0)
    yield name, node
    for child in ast.iter_child_nodes(node):
      kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
      if isinstance(child, kinds) and not child.name.startswith("_"):
        stack.append((f"{name}.{child.name}", child))


def _split(docstring: str) -> tuple[str, str]:
  """Splits a docstring after its first paragraph and cleans both parts."""
  paragraphs = re.split(r"\n\s*\n", docstring.strip(), maxsplit=1)
  if len(paragraphs) < 2:
    return "", ""
  return _clean(paragraphs[0]), _clean(paragraphs[1])


def _clean(text: str) -> str:
  """Removes rules, directives, doctests and markup; joins the lines."""
  lines = [
    line
    for line in text.splitlines()
    if not _RULE.match(line) and not _DIRECTIVE.match(line)
  ]
  text = " ".join(line.strip() for line in lines if line.strip())
  text = _LINK.sub(r"\1", _ROLE.sub(r"\1", text))
  return re.sub(r"\s+", " ", _MARKUP.sub("", text)).strip()
