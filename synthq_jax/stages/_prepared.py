"""Prepared data that several working directories share.

Runs of a sweep read one log: the first to prepare it leaves a copy, and the others
take that instead of tokenizing a collection again. A copy goes by the fingerprint of
settings, files and versions, so that other settings never find it.
"""

import pathlib
import shutil
import tempfile

from synthq_jax.runtime import results, stage
from synthq_jax.storage import artifacts

__all__ = ["publish", "take"]

_PARTS = ("public", "private")


def take(task: stage.Task, copy: pathlib.Path) -> results.PreparedData | None:
  """Copies prepared data into a working directory, if somebody has left it.

  Args:
    task: of prepare_data; its folders get what was left.
    copy: the folder of its settings, in a private one that runs share.

  Returns:
    The result; None where there is no copy, and the data has to be prepared.

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
  """Leaves a copy of prepared data for others; the first one to come stays.

  Args:
    task: of prepare_data.
    result: its result, complete in the task's folders.
    copy: the folder of its settings; the one around it is made for this user
      alone if it is not there.
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
    if not copy.exists():  # nobody else was faster
      raise
  finally:
    shutil.rmtree(new, ignore_errors=True)


def _folders(task: stage.Task) -> tuple[pathlib.Path, pathlib.Path]:
  return task.space.public(task.place), task.space.private(task.place)
