"""Downloads the privacy statements around a checkpoint that is named by a URL."""

import contextlib
import functools
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence

from synthq_jax.storage import object_store, stores

__all__ = ["download"]

_STEP = re.compile(r"checkpoint_\d+")
_LEVELS = 2
"""Prefixes above a checkpoint that are read: of URL/state, checkpoint_STEP and
T5X's MODEL_DIR."""


@contextlib.contextmanager
def download(
  checkpoint: pathlib.Path, names: Sequence[str]
) -> Iterator[list[pathlib.Path]]:
  """Downloads statements, so that a private checkpoint is not taken for public.

  Args:
    checkpoint: the folder that a URL was downloaded to; any other folder has none.
    names: names of the statements' files in a folder.

  Yields:
    A temporary folder for each prefix above the URL, and for each other checkpoint
    of the same MODEL_DIR that has a statement of its own.
  """
  with tempfile.TemporaryDirectory() as scratch:
    yield _download(stores.get_url(checkpoint), pathlib.Path(scratch), names)


def _download(
  url: str, target: pathlib.Path, names: Sequence[str]
) -> list[pathlib.Path]:
  parents, siblings, prefix = [], [], url
  for _ in range(_LEVELS):
    prefix, _, name = prefix.rpartition("/")
    if not prefix or prefix.endswith((":", "/")):  # nothing above the bucket
      break
    parents.append(prefix)
    if _STEP.fullmatch(name):  # this prefix is MODEL_DIR; others are not listed
      steps = _list_steps(prefix, tuple(names))
      siblings += [f"{prefix}/{step}" for step in steps if step != name]
  folders = []
  for number, folder_url in enumerate([*parents, *siblings]):
    folder = target / str(number)
    folders.append(folder)
    for name in names:
      copy = pathlib.Path(stores.local(f"{folder_url}/{name}", missing_ok=True))
      if copy.is_file():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(copy, folder / name)
  return folders


@functools.cache
def _list_steps(url: str, names: tuple[str, ...]) -> list[str]:
  """Lists the checkpoints under a URL that have a statement of their own."""
  objects = object_store.Store(url).list()
  steps = {name.partition("/")[0] for name in objects if name.endswith(names)}
  return sorted(step for step in steps if _STEP.fullmatch(step))
