"""Defines what a stage of a run is.

A stage makes results; whether one is finished already, who makes it and where work
goes on after a kill is the business of `runner` alone.
"""

import dataclasses
import operator
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from synthq_jax.storage import artifacts

if TYPE_CHECKING:  # JAX takes a second to load
  from synthq_jax.runtime import rows, workspace

__all__ = [
  "Job",
  "Made",
  "Stage",
  "Task",
  "only",
  "tidy",
]

_REMADE = ("parts_", "ranks_", "vectors_")
"""Begin the names of work that takes time to make again, and no release."""


_Value = TypeVar("_Value", covariant=True)
_Settings = TypeVar("_Settings", covariant=True)
_Inputs = TypeVar("_Inputs", covariant=True)


class Made(NamedTuple, Generic[_Value]):
  """A finished result, and the fingerprint by which others depend on it."""

  value: _Value
  digest: str  # `fingerprints.of_result`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(Generic[_Inputs]):
  """One result that a stage has to make."""

  depends: tuple[Any, ...]
  """Settings, and the fingerprints of what is read: the result is made again
  when one of these changes, and never otherwise."""
  settings: Any = None
  """What the task hands over as its settings."""
  inputs: _Inputs
  """What the task hands over: the stage's Inputs; None for a stage without."""
  is_private: bool = False
  """Whether it lies under `private/` whatever it claims (`plan.Rows.compared`)."""
  row: "rows.Row | None" = None
  """The row that it belongs to."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(Generic[_Settings, _Inputs]):
  """What a stage is given to make one result."""

  place: str
  """The result's folder, e.g. "finetune_dp/eps8", below the working directory
  or its `private/`."""
  row: "rows.Row | None" = None
  """The row that the result belongs to; None: no single one."""
  digest: str
  """The result's fingerprint, in the names of unfinished work."""
  data: str = ""
  """The fingerprint of the prepared data."""
  settings: _Settings
  """The stage's Config."""
  inputs: _Inputs
  """The stage's Inputs: earlier results, and what else it reads."""
  is_private: bool = False
  """Whether the result lies under `private/` whatever it claims."""
  folders: "workspace.Folders"
  """The working directory; a `workspace.Workspace`, which has the secret, if the
  stage declares that it needs it."""
  progress: bool = True
  """Whether bars are shown."""

  def get_row(self) -> "rows.Row":
    """Returns the row of a result that belongs to one."""
    assert self.row is not None, self.place
    return self.row

  @property
  def space(self) -> "workspace.Workspace":
    """The working directory with the secret.

    Raises:
      TypeError: if the stage has not declared that it needs the secret.
    """
    from synthq_jax.runtime import workspace

    if not isinstance(self.folders, workspace.Workspace):
      raise TypeError(
        f"{self.place}: expected a stage with needs_secret=True, got one whose"
        " task holds no secret"
      )
    return self.folders

  def folder(self, *, private: bool) -> pathlib.Path:
    """Returns the result's folder, which is made.

    Where the result is private, what other settings left of it in the folder
    that is shared goes: no claim would count it.

    Args:
      private: whether what the result says must not be shared.
    """
    private = private or self.is_private
    if private:
      artifacts.remove(self.folders.public(self.place))
    place = self.folders.private if private else self.folders.public
    directory = place(self.place)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage(Generic[_Inputs]):
  """A kind of result, and how it is made of others."""

  name: str
  """Of the module, the command and the field of `plan.RunConfig`."""
  result: type
  """A frozen dataclass of `runtime.results`; its `seconds` are filled in."""
  needs: tuple[str, ...]
  """Stages whose results it reads; they run first."""
  plan: Callable[["rows.Plan"], Mapping[str, Any]]
  """Maps the folder of each planned result, below the stage's own, to what the result
  is of: mostly a `rows.Row`. `only` is the plan of a stage with one result."""
  job: Callable[[Any, Any], Job[_Inputs] | None]
  """From the run so far (`runtime.runner.Run`) and what a result is of to the work;
  None: the data leaves it out."""
  training: Callable[[Any, Any], Any] = lambda plan, row: None
  """From a `rows.Plan` and what a result is of to the private training behind it, a
  `private_training.Planned`; None: it trains without noise, or not at all."""
  run: Callable[[Task[Any, _Inputs]], Any]
  """Makes one result, and writes its files; None in processes other than 0."""
  starts_from: str = ""
  """The field of `plan.RunConfig` that names the public checkpoint it reads:
  "checkpoint" or "encoder"; empty: it reads none."""
  config: type | None = None
  """Its settings, a field of `plan.RunConfig`."""
  check: Callable[[Any], None] = lambda run: None
  """Refuses settings that the prepared data rules out, before any other work."""
  narrowed: Callable[[Any], tuple[str, ...]] | None = None
  """Which of `needs` it reads under these settings; None: all."""
  folder: str = ""
  """Where its results lie, if not under its name."""
  needs_secret: bool = False
  """Whether tasks hold the secret, from which batches and noise are drawn."""
  together: bool = False
  """Whether all processes of a run work on a result; else process 0 does."""
  screen: Callable[[Sequence[Any]], str] = lambda made: ""
  """From its results to what its command prints when it is done."""
  place_of: Callable[[Any], str] = operator.attrgetter("directory")
  """From a result to the folder of its result.json."""

  def make(self, task: Task[Any, Any], *, saves: bool = True) -> Any:
    """Makes a result and saves it.

    Args:
      task: from the runner.
      saves: False in processes other than 0.

    Returns:
      The result.
    """
    start = time.monotonic()
    result = self.run(task)
    if not saves:
      return result
    if hasattr(result, "seconds"):
      seconds = result.seconds + time.monotonic() - start
      result = dataclasses.replace(result, seconds=seconds)
    place = task.folders.root / self.place_of(result)
    folders = [
      task.folders.public(task.place),
      task.folders.private(task.place),
    ]
    artifacts.save(place, result, task.digest, folders=folders, data=task.data)
    tidy(folders, task.digest)
    return result


def tidy(folders: Sequence[pathlib.Path], digest: str) -> None:
  """Removes unfinished work of a finished result, and what earlier ones left.

  Under `private/`, states of other settings stay, and what they have measured:
  to begin their trainings anew would be one more release each.

  Args:
    folders: the result's public and its private one.
    digest: its fingerprint.
  """
  from synthq_jax.runtime import release  # JAX takes a second to load

  public, _ = folders
  own = {f"{kind}{digest}" for kind in artifacts.UNFINISHED}
  for folder in filter(pathlib.Path.is_dir, folders):
    is_shared = folder == public and (folder / artifacts.RESULT_NAME).exists()
    for path in folder.iterdir():
      is_other = artifacts.fingerprint_in(path.name) not in (None, digest)
      if path.name in own:
        release.remove(path)
      elif is_other and (is_shared or path.name.startswith(_REMADE)):
        artifacts.remove(path, must=True)


def only(plan: "rows.Plan") -> Mapping[str, None]:
  """Plans one result, in the stage's own folder."""
  del plan
  return {"": None}
