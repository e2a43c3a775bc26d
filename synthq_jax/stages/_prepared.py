"""Shares prepared data between several working directories.

Runs of a sweep read one log. The first run to prepare it leaves a copy, and the
others take that copy instead of tokenizing the collection again. The
fingerprint of settings, files and versions names the copy, so that other
settings never use it.
"""

import pathlib
import shutil
import tempfile

from synthq_jax.runtime import results, stage
from synthq_jax.storage import artifacts

__all__ = ["publish", "take"]

_PARTS = ("public", "private")


def take(task: stage.Task, copy: pathlib.Path) -> results.PreparedData | None:
  """Copies prepared data into a working directory, if a run has left it.

  Args:
    task: task of prepare_data, whose folders receive the copy.
    copy: folder of the copy, in a private folder that runs share.

  Returns:
    The result; None if there is no copy, and the data must be prepared.

  Raises:
    ValueError: if the copy is not what was written.
  """
  if not (copy / artifacts.RESULT_NAME).exists():
    return None
  artifacts.check(copy)
  for part, own in zip(_PARTS, _folders(task), strict=True):
    shutil.rmtree(own, ignore_errors=True)
    shutil.copytree(
      copy / part, own, ignore=shutil.ignore_patterns(artifacts.FILES_NAME)
    )
  return artifacts.load(copy, results.PreparedData)


def publish(
  task: stage.Task, result: results.PreparedData, copy: pathlib.Path
) -> None:
  """Leaves a copy of prepared data for other runs; the first copy stays.

  Args:
    task: task of prepare_data.
    result: its result, complete in the task's folders.
    copy: folder of the copy; its parent is created for this user alone if it is
      missing.
  """
  root = copy.parent
  root.mkdir(mode=0o700, parents=True, exist_ok=True)
  if copy.exists():
    return
  new = pathlib.Path(tempfile.mkdtemp(prefix="new-", dir=root))  # mode 700
  try:
    for part, own in zip(_PARTS, _folders(task), strict=True):
      shutil.copytree(own, new / part)
    parts = [new / part for part in _PARTS]
    artifacts.save(new, result, copy.name, folders=parts)
    new.rename(copy)
  except OSError:
    if not copy.exists():  # no other run was faster
      raise
  finally:
    shutil.rmtree(new, ignore_errors=True)


def _folders(task: stage.Task) -> tuple[pathlib.Path, pathlib.Path]:
  space, path = task.space, task.result_path
  return space.public(path), space.private(path)
