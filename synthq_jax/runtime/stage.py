"""Defines a stage of a run, its jobs and its tasks.

A stage makes results. The module `runner` alone decides whether a result is
finished already, which process makes it, and how work resumes after a kill.
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
  "plan_one_result",
  "tidy",
]

_REMADE = ("parts_", "ranks_", "vectors_")
"""Beginnings of names of unfinished work that costs time to redo, but no
release."""


_Value = TypeVar("_Value", covariant=True)
_Settings = TypeVar("_Settings", covariant=True)
_Inputs = TypeVar("_Inputs", covariant=True)


class Made(NamedTuple, Generic[_Value]):
  """A finished result, and the fingerprint that dependent results use."""

  value: _Value
  digest: str  # `fingerprints.of_result`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(Generic[_Inputs]):
  """Work for one result of a stage."""

  depends: tuple[Any, ...]
  """Settings, and the fingerprints of the inputs. The result is made again when
  one of these changes, and never otherwise."""
  settings: Any = None
  """Settings of the task."""
  inputs: _Inputs
  """Inputs of the task: the stage's Inputs; None for a stage without any."""
  row: "rows.Row | None" = None
  """Row that the result belongs to."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(Generic[_Settings, _Inputs]):
  """Input of a stage for one result."""

  result_path: str
  """Folder of the result, e.g. "finetune_dp/eps8", below the working directory
  or its `private/`."""
  row: "rows.Row | None" = None
  """Row that the result belongs to; None: no single one."""
  digest: str
  """Fingerprint of the result, in the names of unfinished work."""
  data: str = ""
  """Fingerprint of the prepared data."""
  settings: _Settings
  """Config of the stage."""
  inputs: _Inputs
  """Inputs of the stage: earlier results, and other data that it reads."""
  is_private: bool = False
  """Whether the result lies under `private/` whatever it claims."""
  folders: "workspace.Folders"
  """The working directory; a `workspace.Workspace`, which has the secret, if
  the stage declares that it needs it."""

  def get_row(self) -> "rows.Row":
    """Returns the row of a result that has one."""
    assert self.row is not None, self.result_path
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
        f"{self.result_path}: expected a stage with needs_secret=True, got one whose"
        " task holds no secret"
      )
    return self.folders

  def folder(self, *, private: bool) -> pathlib.Path:
    """Returns the result's folder, and creates it.

    If the result is private, the shared folder of the same result is removed:
    it holds results of other settings, which no claim would count.

    Args:
      private: whether the content of the result must not be shared.
    """
    private = private or self.is_private
    if private:
      artifacts.remove(self.folders.public(self.result_path))
    get_path = self.folders.private if private else self.folders.public
    directory = get_path(self.result_path)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage(Generic[_Inputs]):
  """A kind of result, and the functions that plan, make and print it."""

  name: str
  """Name of the module, the command and the field of `plan.RunConfig`."""
  result: type
  """Type of the results, a frozen dataclass of `runtime.results`; `make` fills
  in its `seconds`."""
  needs: tuple[str, ...]
  """Names of the stages whose results it reads; they run first."""
  plan: Callable[["rows.Plan"], Mapping[str, Any]]
  """Maps the folder of each planned result, below the stage's own, to the
  target of the result: usually a `rows.Row`. `plan_one_result` is the plan of a stage with
  one result."""
  job: Callable[[Any, Any], Job[_Inputs] | None]
  """Makes the job from the run so far (`runtime.runner.Run`) and a target;
  None: the data rules the result out."""
  training: Callable[[Any, Any], Any] = lambda plan, row: None
  """Returns the private training behind a target, a `private_training.Planned`,
  from a `rows.Plan` and the target; None: it trains without noise, or not at
  all."""
  run: Callable[[Task[Any, _Inputs]], Any]
  """Makes one result and writes its files; may return None in processes other
  than 0."""
  starts_from: str = ""
  """Field of `plan.RunConfig` with the public checkpoint that the stage reads:
  "checkpoint" or "encoder"; empty: it reads none."""
  config: type | None = None
  """Type of its settings, a field of `plan.RunConfig`."""
  check: Callable[[Any], None] = lambda run: None
  """Refuses settings that the prepared data rules out, before any other
  work."""
  folder: str = ""
  """Folder of its results, if it is not named after the stage."""
  needs_secret: bool = False
  """Whether tasks hold the secret, from which batches and noise are drawn."""
  together: bool = False
  """Whether all processes of a run work on a result; else process 0 does."""
  finish: Callable[[Any], None] = lambda run: None
  """Removes what its results shared, when all of them are made."""
  screen: Callable[[Sequence[Any]], str] = lambda results: ""
  """Returns the text that its command prints at the end, from its results."""
  get_directory: Callable[[Any], str] = operator.attrgetter("directory")
  """Returns the folder of a result's result.json."""

  def make(self, task: Task[Any, Any], *, saves: bool = True) -> Any:
    """Makes a result and saves it.

    Args:
      task: the task, from the runner.
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
    folder = task.folders.root / self.get_directory(result)
    folders = [
      task.folders.public(task.result_path),
      task.folders.private(task.result_path),
    ]
    artifacts.save(folder, result, task.digest, folders=folders, data=task.data)
    tidy(folders, task.digest)
    return result


def tidy(folders: Sequence[pathlib.Path], digest: str) -> None:
  """Removes unfinished work of a finished result, and remains of earlier
  results.

  Under `private/`, training states and measurements of other settings stay: to
  begin their trainings anew would be one more release each.

  Args:
    folders: the result's public and its private folder.
    digest: fingerprint of the result.
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


def plan_one_result(plan: "rows.Plan") -> Mapping[str, None]:
  """Plans one result, in the stage's own folder."""
  del plan
  return {"": None}
