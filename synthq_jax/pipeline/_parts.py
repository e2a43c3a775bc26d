"""Arrays that a long stage has finished, so that a kill costs one part."""

import io
import pathlib
import shutil

import numpy as np

from synthq_jax import artifacts

__all__ = ["Parts"]


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
    path = self.directory / f"{first}.npy"
    try:
      return np.load(path, mmap_mode="r" if mapped else None)
    except (FileNotFoundError, ValueError, EOFError):
      return None  # the same numbers are made again

  def save(self, first: int, rows: np.ndarray) -> None:
    """Writes a part in one step."""
    content = io.BytesIO()
    np.save(content, rows)
    path = self.directory / f"{first}.npy"
    artifacts.write_atomically(path, content.getvalue())

  def remove(self) -> None:
    """Removes all parts, and those of older settings beside them."""
    kind = self.directory.name.partition("_")[0]
    for parts in self.directory.parent.glob(f"{kind}_*"):
      shutil.rmtree(parts, ignore_errors=True)
