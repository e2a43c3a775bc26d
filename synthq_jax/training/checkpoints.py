"""Training state on disk, through orbax: complete or not there at all."""

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
"""Modules of orbax whose threads log an error and hand it on."""
_OF_SYSTEM = (
  *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES),
  errno.EIO,
)


class Writer:
  """Writes the states of one training while it goes on.

  A state is written under another name first and renamed when complete; older
  states are removed afterwards, so that one complete state is there at any
  moment. `save` has copied the state when it returns: its buffers may be
  donated. With several processes all of them call it, after the same step.

  As a context manager it waits for the last state, also when an error ends
  the training.
  """

  def __init__(self, directory: str | os.PathLike):
    """Makes the folder where it is missing.

    Args:
      directory: the stage's folder for states.
    """
    self._root = pathlib.Path(directory).absolute()
    self._root.mkdir(parents=True, exist_ok=True)
    self._checkpointer = _checkpointer()
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
    """Begins to write a state, once the one before is complete.

    Args:
      step: optimizer steps done.
      state: pytree of arrays.
      then: called in process 0 when the state is complete and is the newest.

    Raises:
      Exception: what went wrong with the state before.
    """
    self.wait()
    if _is_apart():
      state = jax.device_get(state)
    if distributed.is_main():  # of an earlier state of this step
      artifacts.remove(_listing(self._root, step))
      stores.remove(self._root / f"{_PREFIX}{step}")
    path = self._root / f"{_PREFIX}{step}"
    with _of_system(path):
      self._checkpointer.save(path, state, force=True)
    self._pending = step, then

  def wait(self) -> None:
    """Waits until the last state is complete, and removes older ones.

    Raises:
      Exception: what went wrong with it, once; the older ones are still there.
    """
    pending, self._pending = self._pending, None
    with _of_system(self._root):
      self._checkpointer.wait_until_finished()
    if pending is None or not distributed.is_main():
      return
    step, then = pending
    _write_listing(self._root, step)
    for earlier in _steps(self._root):
      if earlier != step:
        artifacts.remove(_listing(self._root, earlier))
        _remove(self._root / f"{_PREFIX}{earlier}")
    then()


def save(directory: str | os.PathLike, step: int, state: Any) -> None:
  """Writes a pytree of arrays as the state after `step` steps, and waits.

  Args:
    directory: the stage's folder for states.
    step: optimizer steps done.
    state: pytree of arrays.
  """
  with Writer(directory) as writer:
    writer.save(step, state)


def latest_step(directory: str | os.PathLike) -> int | None:
  """Returns the step of the newest complete state, or None."""
  return max(_steps(pathlib.Path(directory)), default=None)


def restore(directory: str | os.PathLike, step: int, like: Any) -> Any:
  """Reads a state back, from whatever mesh it was on.

  Args:
    directory: the stage's folder for states.
    step: from `latest_step`.
    like: a state of the same structure, shapes and types. Its arrays say where
      those of the saved one go: devices, and which part to which.

  Returns:
    The saved state.

  Raises:
    ValueError: if it cannot be read, or is one of another training.
  """
  import numpy as np

  with extras.required("run"):
    import orbax.checkpoint as ocp

  def expected(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and not _is_apart():
      return ocp.utils.to_shape_dtype_struct(leaf)
    return np.empty(leaf.shape, leaf.dtype)

  abstract = jax.tree.map(expected, like)
  path = pathlib.Path(directory).absolute() / f"{_PREFIX}{step}"
  try:
    if distributed.is_main():
      _check_listing(path.parent, step)
    with _checkpointer() as checkpointer:
      state = checkpointer.restore(path, abstract)
  except Exception as error:  # orbax and tensorstore have many kinds
    is_of_system = isinstance(error, OSError) and not isinstance(
      error, FileNotFoundError
    )
    if is_of_system or distributed.is_loss(error):
      raise  # the state may be whole
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    raise ValueError(
      f"{path}: expected a saved training state, got one that cannot be read"
      f" ({reason}): delete {path.parent}, and the training starts again from"
      " its beginning"
    ) from error
  return jax.tree.map(_placed, state, like) if _is_apart() else state


@contextlib.contextmanager
def _of_system(path: pathlib.Path) -> Iterator[None]:
  """Raises what tensorstore tells of a full disk as the OSError that it is."""
  try:
    yield
  except OSError:
    raise
  except Exception as error:
    for number in _OF_SYSTEM:
      if os.strerror(number) in str(error):
        raise OSError(number, os.strerror(number), str(path)) from error
    raise


def _is_apart() -> bool:
  """Says whether this process works without the others that there are.

  Among several processes orbax writes no jax.Array of one alone, but does
  write NumPy's.
  """
  return jax.process_count() > 1 and distributed.count() == 1


def _is_news(record: logging.LogRecord) -> bool:
  """Leaves out tracebacks of what a thread's waiter raises: `Writer.wait`."""
  place = pathlib.PurePath(record.pathname)
  return not (
    record.exc_info and "orbax" in place.parts and place.name in _AWAITED
  )


def _is_heard(record: logging.LogRecord) -> bool:
  """Leaves out what asyncio says of orbax's other writes when one has failed."""
  _, error, trace = record.exc_info or (None, None, None)
  if trace is None and "Error writing" in str(error):
    return False  # of one that nobody had begun to wait for
  while trace:
    name = trace.tb_frame.f_code.co_filename
    if "orbax" in pathlib.PurePath(name).parts:
      return False
    trace = trace.tb_next
  return True


def _without_late(shown: Callable[..., None]) -> Callable[..., None]:
  """Returns a `sys.unraisablehook` without what comes after an error.

  Where one write of a state fails, orbax closes its event loop, and tensorstore
  prints of each other write that it has nobody to tell.
  """

  def hook(caught: Any) -> None:
    trace, error = caught.exc_traceback, caught.exc_value
    begins = trace.tb_frame.f_code.co_name if trace else ""
    is_late = isinstance(error, RuntimeError) and "closed" in str(error)
    if not (is_late and begins == "call_soon_threadsafe"):
      shown(caught)

  return hook


def _checkpointer():
  with extras.required("run"):
    import orbax.checkpoint as ocp

  logging.getLogger("absl").addFilter(_is_news)
  logging.getLogger("asyncio").addFilter(_is_heard)
  if getattr(sys.unraisablehook, "__module__", "") != __name__:
    sys.unraisablehook = _without_late(sys.unraisablehook)
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


def _placed(value: Any, like: Any) -> Any:
  """Puts an array where another one is."""
  if isinstance(like, jax.Array):
    return jax.device_put(value, like.sharding)
  return value


def _steps(root: pathlib.Path) -> list[int]:
  """Returns the steps of complete states: orbax renames a state when done.

  In a store a state is complete once its listing is there, which is put last.
  """
  names = [path.name for path in root.glob(f"{_PREFIX}*") if path.is_dir()]
  numbers = [name.removeprefix(_PREFIX) for name in names]
  steps = sorted(int(number) for number in numbers if number.isdigit())
  if stores.has(root):
    return [step for step in steps if _listing(root, step).exists()]
  return steps


def _listing(root: pathlib.Path, step: int) -> pathlib.Path:
  return root / f"files_{step}.json"


def _write_listing(root: pathlib.Path, step: int) -> None:
  """Notes what was written, by which damage is known that orbax reads."""
  folder = root / f"{_PREFIX}{step}"
  content = {"files": file_lists.list_files(folder)}
  stores.push(*(folder / name for name in content["files"]))
  text = json.dumps(artifacts.sealed(content), indent=1)
  artifacts.write_atomically(_listing(root, step), text)


def _check_listing(root: pathlib.Path, step: int) -> None:
  path = _listing(root, step)
  if path.exists():  # else the process was killed, or the version an older one
    files = artifacts.read_json(path)["files"]
    file_lists.check_files(root / f"{_PREFIX}{step}", files, "damaged")


def _remove(path: pathlib.Path) -> None:
  stores.remove(path)
  doomed = path.with_name(f"old_{path.name}")
  path.rename(doomed)
  artifacts.remove(doomed, must=True)
