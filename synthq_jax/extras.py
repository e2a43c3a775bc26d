"""Names the extra that installs a package if an import does not find it."""

import contextlib
import importlib.util
from collections.abc import Iterator

__all__ = ["MissingExtraError", "check", "required"]

_ELSEWHERE = {"t5x": "'t5x @ git+https://github.com/google-research/t5x'"}
"""Packages that are on no package index, and so cannot be an extra."""


class MissingExtraError(ModuleNotFoundError):
  """Raised if a package of an extra is not installed; its text is one line."""


@contextlib.contextmanager
def required(extra: str) -> Iterator[None]:
  """Imports packages of an extra in a `with` block; errors tell how to install
  it.

  >>> with required("run"):
  ...   import no_such_package
  Traceback (most recent call last):
  synthq_jax.extras.MissingExtraError: no_such_package is not installed: pip install 'synthq_jax[run]'

  Args:
    extra: an extra of pyproject.toml, or "t5x".

  Raises:
    MissingExtraError: if an import in the block finds no package.
  """
  try:
    yield
  except MissingExtraError:
    raise
  except ModuleNotFoundError as error:
    package = (error.name or str(error)).partition(".")[0]
    if package == __package__:
      raise  # a fault of this package
    target = _ELSEWHERE.get(extra, f"'synthq_jax[{extra}]'")
    raise MissingExtraError(
      f"{package} is not installed: pip install {target}", name=package
    ) from error


def check(extra: str, *packages: str) -> None:
  """Checks that packages are installed without importing them.

  Args:
    extra: an extra of pyproject.toml.
    *packages: import names of the packages.

  Raises:
    MissingExtraError: naming the first missing package.
  """
  with required(extra):
    for package in packages:
      if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(name=package)
