"""Training state on disk, through orbax: complete or not there at all."""

import os
import pathlib
from typing import Any

import jax

__all__ = ["latest_step", "restore", "save"]

_PREFIX = "step_"


def save(directory: str | os.PathLike, step: int, state: Any) -> None:
  """Saves a pytree of arrays as the state after `step` steps.

  Written under another name first and renamed when complete; older states are
  removed afterwards, so that one complete state is there at any moment.

  Args:
    directory: the stage's folder for states.
    step: optimizer steps done.
    state: pytree of arrays.
  """
  import orbax.checkpoint as ocp

  root = pathlib.Path(directory).absolute()
  root.mkdir(parents=True, exist_ok=True)
  old = _steps(root)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(root / f"{_PREFIX}{step}", state, force=True)
    checkpointer.wait_until_finished()
  for earlier in old:
    if earlier != step:
      _remove(root / f"{_PREFIX}{earlier}")


def latest_step(directory: str | os.PathLike) -> int | None:
  """Returns the step of the newest complete state, or None."""
  return max(_steps(pathlib.Path(directory)), default=None)


def restore(directory: str | os.PathLike, step: int, like: Any) -> Any:
  """Reads a state back.

  Args:
    directory: the stage's folder for states.
    step: from `latest_step`.
    like: a state of the same structure, shapes and types.

  Returns:
    The saved state.

  Raises:
    ValueError: if it cannot be read, or is one of another training.
  """
  import orbax.checkpoint as ocp

  abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
  path = pathlib.Path(directory).absolute() / f"{_PREFIX}{step}"
  try:
    with ocp.StandardCheckpointer() as checkpointer:
      return checkpointer.restore(path, abstract)
  except Exception as error:  # orbax and tensorstore have many kinds
    raise ValueError(
      f"{path}: expected a saved training state, got one that cannot be read"
      f" ({type(error).__name__}): delete {path.parent}, and the training"
      " starts again from its beginning"
    ) from error


def _steps(root: pathlib.Path) -> list[int]:
  """Returns the steps of complete states: orbax renames a state when done."""
  names = [path.name for path in root.glob(f"{_PREFIX}*") if path.is_dir()]
  numbers = [name.removeprefix(_PREFIX) for name in names]
  return sorted(int(number) for number in numbers if number.isdigit())


def _remove(path: pathlib.Path) -> None:
  import shutil

  doomed = path.with_name(f"old_{path.name}")
  path.rename(doomed)
  shutil.rmtree(doomed)
