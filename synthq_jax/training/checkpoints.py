"""Saves and restores training states with orbax; every state is complete."""

import contextlib
import errno
import json
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from synthq_jax import extras
from synthq_jax.storage import artifacts, file_lists, stores
from synthq_jax.training import distributed

__all__ = ["Writer", "latest_step", "restore", "save"]

_PREFIX = "step_"
_AWAITED = ("async_checkpointer.py", "future.py")
"""Modules of orbax whose threads log an error and also raise it in the caller."""
_SYSTEM_ERRORS = (
  *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES),
  errno.EIO,
)


class Writer:
  """Writes the states of one training in the background.

  A state is written under a temporary name and renamed when complete. Older states
  are removed afterwards, so once a state is saved, a complete one always exists.
  `save` copies the state before it returns, so you may donate its buffers. With
  several processes all of them call it, after the same step.

  As a context manager, the writer waits for the last state, also if an error ends
  the training.
  """

  def __init__(self, directory: str | os.PathLike):
    """Creates the folder if it is missing.

    Args:
      directory: the stage's folder for states.
    """
    self._root = pathlib.Path(directory).absolute()
    self._root.mkdir(parents=True, exist_ok=True)
    self._checkpointer = _make_checkpointer()
    self._pending: tuple[int, Callable[[], object]] | None = None

  def __enter__(self) -> "Writer":
    return self

  def __exit__(self, *exception: object) -> None:
    try:
      self.wait()
    finally:
      self._checkpointer.close()

  def save(
    self,
    step: int,
    state: Any,
    then: Callable[[], object] = lambda: None,
  ) -> None:
    """Waits for the state before, then begins to write a state.

    Args:
      step: the number of optimizer steps done.
      state: pytree of arrays.
      then: called in process 0 when the state is complete and older states are
        removed.

    Raises:
      Exception: the error of the state before.
    """
    self.wait()
    if _is_apart():
      state = jax.device_get(state)
    if distributed.is_main():  # remove an earlier state of this step
      artifacts.remove(_get_listing_path(self._root, step))
      stores.remove(self._root / f"{_PREFIX}{step}")
    path = self._root / f"{_PREFIX}{step}"
    with _raise_system_errors(path):
      self._checkpointer.save(path, state, force=True)
    self._pending = step, then

  def wait(self) -> None:
    """Waits until the last state is complete, then removes older states.

    Raises:
      Exception: the error of the last state, once; older states are kept then.
    """
    pending, self._pending = self._pending, None
    with _raise_system_errors(self._root):
      self._checkpointer.wait_until_finished()
    if pending is None or not distributed.is_main():
      return
    step, then = pending
    _write_listing(self._root, step)
    for earlier in _list_steps(self._root):
      if earlier != step:
        artifacts.remove(_get_listing_path(self._root, earlier))
        _remove(self._root / f"{_PREFIX}{earlier}")
    then()


def save(directory: str | os.PathLike, step: int, state: Any) -> None:
  """Writes a pytree of arrays as the state after `step` steps, and waits.

  Args:
    directory: the stage's folder for states.
    step: the number of optimizer steps done.
    state: pytree of arrays.
  """
  with Writer(directory) as writer:
    writer.save(step, state)


def latest_step(directory: str | os.PathLike) -> int | None:
  """Returns the step of the newest complete state, or None."""
  return max(_list_steps(pathlib.Path(directory)), default=None)


def restore(directory: str | os.PathLike, step: int, like: Any) -> Any:
  """Reads a saved state, whatever mesh it was saved from.

  Args:
    directory: the stage's folder for states.
    step: the step of the state, as `latest_step` returns it.
    like: a state of the same structure, shapes and types. The arrays of the saved
      state get the shardings of its arrays.

  Returns:
    The saved state.

  Raises:
    ValueError: if the state cannot be read, or belongs to another training.
  """
  import numpy as np

  with extras.required("run"):
    import orbax.checkpoint as ocp

  def make_abstract(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and not _is_apart():
      return ocp.utils.to_shape_dtype_struct(leaf)
    return np.empty(leaf.shape, leaf.dtype)

  abstract = jax.tree.map(make_abstract, like)
  path = pathlib.Path(directory).absolute() / f"{_PREFIX}{step}"
  try:
    if distributed.is_main():
      _check_listing(path.parent, step)
    with _make_checkpointer() as checkpointer:
      state = checkpointer.restore(path, abstract)
  except Exception as error:  # orbax and tensorstore have many kinds
    is_of_system = isinstance(error, OSError) and not isinstance(
      error, FileNotFoundError
    )
    if is_of_system or distributed.is_loss(error):
      raise  # the state itself may be intact
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    raise ValueError(
      f"{path}: expected a saved training state, got one that cannot be read"
      f" ({reason}): delete {path.parent}, and the training starts again from"
      " its beginning"
    ) from error
  return jax.tree.map(_place_like, state, like) if _is_apart() else state


@contextlib.contextmanager
def _raise_system_errors(path: pathlib.Path) -> Iterator[None]:
  """Raises tensorstore's errors about the disk, such as a full one, as OSError."""
  try:
    yield
  except OSError:
    raise
  except Exception as error:
    for number in _SYSTEM_ERRORS:
      if os.strerror(number) in str(error):
        raise OSError(number, os.strerror(number), str(path)) from error
    raise


def _is_apart() -> bool:
  """Checks whether this process works alone although there are others.

  With several processes, orbax does not write a jax.Array of a single process. It
  does write NumPy arrays.
  """
  return jax.process_count() > 1 and distributed.count() == 1


def _is_news(record: logging.LogRecord) -> bool:
  """Filters out orbax's tracebacks of errors that `Writer.wait` raises again."""
  path = pathlib.PurePath(record.pathname)
  return not (
    record.exc_info and "orbax" in path.parts and path.name in _AWAITED
  )


def _is_heard(record: logging.LogRecord) -> bool:
  """Filters out asyncio's messages on orbax's other writes after one failed."""
  _, error, trace = record.exc_info or (None, None, None)
  if trace is None and "Error writing" in str(error):
    return False  # from a write that no code awaited yet
  while trace:
    name = trace.tb_frame.f_code.co_filename
    if "orbax" in pathlib.PurePath(name).parts:
      return False
    trace = trace.tb_next
  return True


def _make_hook(previous_hook: Callable[..., None]) -> Callable[..., None]:
  """Returns a `sys.unraisablehook` that ignores errors of a closed event loop.

  If one write of a state fails, orbax closes its event loop. Then tensorstore
  prints one such error for each other write.
  """

  def hook(caught: Any) -> None:
    trace, error = caught.exc_traceback, caught.exc_value
    function = trace.tb_frame.f_code.co_name if trace else ""
    is_late = isinstance(error, RuntimeError) and "closed" in str(error)
    if not (is_late and function == "call_soon_threadsafe"):
      previous_hook(caught)

  return hook


def _make_checkpointer():
  with extras.required("run"):
    import orbax.checkpoint as ocp

  logging.getLogger("absl").addFilter(_is_news)
  logging.getLogger("asyncio").addFilter(_is_heard)
  if getattr(sys.unraisablehook, "__module__", "") != __name__:
    sys.unraisablehook = _make_hook(sys.unraisablehook)
  if not _is_apart():
    return ocp.StandardCheckpointer()
  own = jax.process_index()
  return ocp.StandardCheckpointer(
    multiprocessing_options=ocp.options.MultiprocessingOptions(
      primary_host=own,
      active_processes={own},
      barrier_sync_key_prefix=f"process_{own}",
    )
  )


def _place_like(value: Any, like: Any) -> Any:
  """Puts an array on the devices of another one."""
  if isinstance(like, jax.Array):
    return jax.device_put(value, like.sharding)
  return value


def _list_steps(root: pathlib.Path) -> list[int]:
  """Returns the steps of complete states, which orbax renames when done.

  In a store, a state is complete once its listing exists, which is uploaded last.
  """
  names = [path.name for path in root.glob(f"{_PREFIX}*") if path.is_dir()]
  numbers = [name.removeprefix(_PREFIX) for name in names]
  steps = sorted(int(number) for number in numbers if number.isdigit())
  if stores.has(root):
    return [step for step in steps if _get_listing_path(root, step).exists()]
  return steps


def _get_listing_path(root: pathlib.Path, step: int) -> pathlib.Path:
  return root / f"files_{step}.json"


def _write_listing(root: pathlib.Path, step: int) -> None:
  """Writes the list of a state's files, to detect damage that orbax misses."""
  folder = root / f"{_PREFIX}{step}"
  content = {"files": file_lists.list_files(folder)}
  stores.push(*(folder / name for name in content["files"]))
  text = json.dumps(artifacts.sealed(content), indent=1)
  artifacts.write_atomically(_get_listing_path(root, step), text)


def _check_listing(root: pathlib.Path, step: int) -> None:
  path = _get_listing_path(root, step)
  if path.exists():  # missing after a kill, and in states of older versions
    files = artifacts.read_json(path)["files"]
    file_lists.check_files(root / f"{_PREFIX}{step}", files, "damaged")


def _remove(path: pathlib.Path) -> None:
  stores.remove(path)
  doomed = path.with_name(f"old_{path.name}")
  path.rename(doomed)
  artifacts.remove(doomed, must=True)
