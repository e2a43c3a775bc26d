"""Arrays in files that are complete or not there: .npy and .npz."""

import contextlib
import errno
import os
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from synthq_jax import artifacts

__all__ = ["read", "read_npz", "save", "save_npz"]


def save(path: str | os.PathLike, rows: Any) -> None:
  """Writes an array as a .npy file that is complete or not there.

  Args:
    path: the file; its folder is made where it is missing.
    rows: a NumPy array.

  Raises:
    OSError: naming the file, if a part of it could not be written.
  """
  with artifacts.replacing(path) as stream:
    # A file itself NumPy hands to C, and does not hear when its end is refused.
    np.save(types.SimpleNamespace(write=stream.write), rows)


def save_npz(
  path: str | os.PathLike, arrays: Mapping[str, Any], *, compressed=False
) -> None:
  """Writes arrays as an .npz file that is complete or not there.

  Args:
    path: the file; its folder is made where it is missing.
    arrays: NumPy arrays by name.
    compressed: whether it is smaller, and written more slowly.

  Raises:
    OSError: naming the file, if a part of it could not be written.
  """
  write = np.savez_compressed if compressed else np.savez
  with artifacts.replacing(path) as stream:
    write(stream, **arrays)


def read(path: str | os.PathLike, *, mapped: bool = False) -> Any:
  """Returns the array of a .npy file.

  Args:
    path: the file.
    mapped: whether it stays on disk and is read where it is used.

  Raises:
    OSError: if it cannot be read.
    ValueError: naming it, if it is damaged.
  """
  with _expected(path):
    return np.load(path, mmap_mode="r" if mapped else None)


def read_npz(path: str | os.PathLike) -> dict[str, Any]:
  """Returns the arrays of an .npz file by name.

  Args:
    path: the file.

  Raises:
    OSError: if it cannot be read.
    ValueError: naming it, if it is damaged.
  """
  with _expected(path), np.load(path) as stored:
    return {name: stored[name] for name in stored.files}


@contextlib.contextmanager
def _expected(path: str | os.PathLike) -> Iterator[None]:
  """Refuses a damaged file of arrays: NumPy raises a dozen kinds of errors."""
  try:
    yield
  except Exception as error:
    is_of_system = isinstance(error, OSError) and error.errno != errno.EINVAL
    if is_of_system and error.errno is not None:
      raise
    raise ValueError(
      f"{path}: expected arrays as they were written, got"
      f" {type(error).__name__}: make them again"
    ) from error
