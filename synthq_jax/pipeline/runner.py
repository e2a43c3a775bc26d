"""Finished results: a stage runs only if its result is not there yet.

A stage whose fingerprint (its settings and the fingerprints of what it reads)
equals that of the result on disk is skipped. With several processes process 0
decides, and works alone while the others wait, or all of them work together.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import synthq_jax
from synthq_jax import artifacts
from synthq_jax.pipeline import workspace
from synthq_jax.training import distributed

__all__ = ["Runner"]

_FORMAT = 4  # raise when a stage's files change, so that old ones are remade
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
    """Returns a result, which process 0 makes, and its fingerprint.

    Args:
      name: of the stage and row, e.g. "finetune_dp/eps8".
      kind: of the result.
      parts: what it depends on.
      make: from the fingerprint; saves the result. Called in process 0, on its
        own devices.

    Returns:
      Both, in every process.
    """

    def make_alone(digest: str) -> None:
      if distributed.is_main():
        with distributed.alone():
          make(digest)

    return self.together(name, kind, parts, make_alone)

  def together(
    self,
    name: str,
    kind: type[_Result],
    parts: Sequence[Any],
    make: Callable[[str], _Result | None],
  ) -> tuple[_Result, str]:
    """Returns a result that all processes make, and its fingerprint.

    Args:
      name: of the stage and row.
      kind: of the result.
      parts: what it depends on.
      make: from the fingerprint; called in every process, for its devices or
        its share of the work. Process 0 saves the result.

    Returns:
      Both, in every process.

    Raises:
      ValueError: if the processes would make different results.
    """
    digest, places = self._digest(name, parts), self._places(name)
    distributed.check_same(
      f"settings, data and versions for {name}",
      digest,
      "give all processes the same command, packages and --workdir",
    )
    if distributed.decided(name, lambda: self._is_there(places, digest)):
      self._say(f"[{name}] finished earlier, skipped")
      return self._found(name, places, kind, digest), digest
    if distributed.is_main():
      for place in places:
        (place / artifacts.RESULT_NAME).unlink(missing_ok=True)
    self._say(f"[{name}] running")
    self.made.append(name)
    make(digest)
    distributed.barrier(name)
    # As it is on disk: a later run, which finds it there, gets the same value.
    return self._found(name, places, kind, digest), digest

  def will_make(self, name: str, parts: Sequence[Any]) -> bool:
    """Says whether this process writes a result that is not there yet."""
    if not distributed.is_main():
      return False
    return not self._is_there(self._places(name), self._digest(name, parts))

  def _is_there(self, places: Sequence[pathlib.Path], digest: str) -> bool:
    return any(artifacts.read_fingerprint(place) == digest for place in places)

  def _digest(self, name: str, parts: Sequence[Any]) -> str:
    version = synthq_jax.__version__
    return artifacts.fingerprint(_FORMAT, version, name, *parts)

  def _places(self, name: str) -> tuple[pathlib.Path, pathlib.Path]:
    return self._space.public(name), self._space.private(name)

  def _found(
    self, name: str, places, kind: type[_Result], digest: str
  ) -> _Result:
    for place in places:
      if artifacts.read_fingerprint(place) == digest:
        return artifacts.load(place, kind)
    if distributed.is_main():
      raise RuntimeError(f"{name} did not save its result: report this bug")
    raise ValueError(
      f"{places[0]}: expected the result that process 0 has saved, got none:"
      " give all processes one --workdir on a file system that they share"
    )
