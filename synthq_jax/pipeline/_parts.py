"""Arrays that a long stage has finished, so that a kill costs one part."""

import pathlib
import shutil
from typing import Any

import numpy as np

from synthq_jax import artifacts

__all__ = ["Parts", "bar"]


class Parts:
  """Numbered arrays in files that are complete or not there."""

  def __init__(self, directory: pathlib.Path):
    self.directory = directory

  def load(self, first: int, *, mapped: bool = False) -> np.ndarray | None:
    """Returns a part, or None if it is missing or damaged.

    Args:
      first: its number.
      mapped: whether it stays on disk and is read where it is used.
    """
    # What is damaged is made again: the same numbers.
    return artifacts.load_array(self._path(first), mapped=mapped)

  def save(self, first: int, rows: np.ndarray) -> None:
    """Writes a part in one step."""
    artifacts.save_array(self._path(first), rows)

  def _path(self, first: int) -> pathlib.Path:
    return self.directory / f"{first}.npy"

  def remove(self) -> None:
    """Removes all parts, and those of older settings beside them."""
    kind = self.directory.name.partition("_")[0]
    for parts in self.directory.parent.glob(f"{kind}_*"):
      shutil.rmtree(parts, ignore_errors=True)


def bar(description: str, total: int, progress: bool) -> Any:
  """Returns a bar of rows; it shows nothing without `progress`."""
  import tqdm

  return tqdm.tqdm(
    total=total, desc=description, unit="row", disable=not progress,
    mininterval=1.0, dynamic_ncols=True,
  )  # fmt: skip
