"""Finished results: a stage runs only if its result is not there yet.

A stage whose fingerprint (its settings and the fingerprints of what it reads)
equals that of the result on disk is skipped.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import synthq_jax
from synthq_jax import artifacts
from synthq_jax.pipeline import workspace

__all__ = ["Runner"]

_FORMAT = 3  # raise when a stage's files change, so that old ones are remade
_Result = TypeVar("_Result")


class Runner:
  """Makes results, or finds them finished."""

  def __init__(self, space: workspace.Workspace, say: Callable[[str], None]):
    self._space = space
    self._say = say
    self.made: list[str] = []

  def __call__(
    self,
    name: str,
    kind: type[_Result],
    parts: Sequence[Any],
    make: Callable[[str], _Result],
  ) -> tuple[_Result, str]:
    """Returns a result and its fingerprint."""
    digest, places = self._digest(name, parts), self._places(name)
    found = self._load(places, kind, digest)
    if found is not None:
      self._say(f"[{name}] finished earlier, skipped")
      return found, digest
    for place in places:
      (place / artifacts.RESULT_NAME).unlink(missing_ok=True)
    self._say(f"[{name}] running")
    self.made.append(name)
    make(digest)
    # As it is on disk: a later run, which finds it there, gets the same value.
    found = self._load(places, kind, digest)
    if found is None:
      raise RuntimeError(f"{name} did not save its result: report this bug")
    return found, digest

  def is_finished(self, name: str, parts: Sequence[Any]) -> bool:
    """Says whether a result is there that these parts made."""
    digest = self._digest(name, parts)
    return any(
      artifacts.read_fingerprint(place) == digest
      for place in self._places(name)
    )

  def _digest(self, name: str, parts: Sequence[Any]) -> str:
    version = synthq_jax.__version__
    return artifacts.fingerprint(_FORMAT, version, name, *parts)

  def _places(self, name: str) -> tuple[pathlib.Path, pathlib.Path]:
    return self._space.public(name), self._space.private(name)

  def _load(self, places, kind: type[_Result], digest: str) -> _Result | None:
    for place in places:
      if artifacts.read_fingerprint(place) == digest:
        return artifacts.load(place, kind)
    return None
