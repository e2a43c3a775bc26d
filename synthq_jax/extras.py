"""Names the extra that brings a package, where an import does not find it."""

import contextlib
import importlib.util
from collections.abc import Iterator

__all__ = ["MissingExtraError", "check", "required"]

_ELSEWHERE = {"t5x": "'t5x @ git+https://github.com/google-research/t5x'"}
"""What is on no package index, and so cannot be an extra."""


class MissingExtraError(ModuleNotFoundError):
  """A package of an extra is not installed; its text is one line."""


@contextlib.contextmanager
def required(extra: str) -> Iterator[None]:
  """Imports packages of an extra: one line says how to get what is missing.

  >>> with required("run"):
  ...   import no_such_package
  Traceback (most recent call last):
  synthq_jax.extras.MissingExtraError: no_such_package is not installed: pip install 'synthq_jax[run]'

  Args:
    extra: of pyproject.toml, or "t5x".

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
      raise  # a mistake of ours
    what = _ELSEWHERE.get(extra, f"'synthq_jax[{extra}]'")
    raise MissingExtraError(
      f"{package} is not installed: pip install {what}", name=package
    ) from error


def check(extra: str, *packages: str) -> None:
  """Refuses to go on without packages, and imports none.

  Args:
    extra: of pyproject.toml.
    *packages: by the names they are imported by.

  Raises:
    MissingExtraError: naming the first that is not there.
  """
  with required(extra):
    for package in packages:
      if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(name=package)
