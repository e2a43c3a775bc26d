"""Reads and writes arrays as .npy and .npz files; each write is atomic."""

import contextlib
import errno
import itertools
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from synthq_jax.storage import artifacts

__all__ = ["as_texts", "read", "read_npz", "save", "save_npz"]

_TEXTS = np.dtypes.StringDType()
_UTF8, _ENDS = ".utf8", ".ends"
"""Suffixes of the two arrays that hold an array of texts stored end to end."""
_WASTE = 4
"""Largest number of cells per character for texts stored in rows of one
width."""


def as_texts(values: Sequence[str]) -> np.ndarray:
  """Returns an array of texts that takes memory by the length of each text.

  In NumPy's usual arrays of text, every text takes as much as the longest.

  Args:
    values: the texts.
  """
  return np.array(values, _TEXTS)


def save(path: str | os.PathLike, rows: Any) -> None:
  """Writes an array to a .npy file, atomically.

  Args:
    path: the file; a missing folder is created.
    rows: a NumPy array.

  Raises:
    OSError: naming the file, if a part of it could not be written.
  """
  with artifacts.replacing(path) as stream:
    # Given a file object, NumPy writes through C and misses a failed last write.
    np.save(types.SimpleNamespace(write=stream.write), rows)


def save_npz(path: str | os.PathLike, arrays: Mapping[str, Any]) -> None:
  """Writes arrays to an .npz file, atomically.

  Args:
    path: the file; a missing folder is created.
    arrays: NumPy arrays by name. Arrays of `as_texts` are stored end to end if
      one text is much longer than the others, else in rows of one width.

  Raises:
    OSError: naming the file, if a part of it could not be written.
  """
  stored: dict[str, Any] = {}
  for name, rows in arrays.items():
    stored |= _list_stored_arrays(name, rows)
  with artifacts.replacing(path) as stream:
    np.savez(stream, **stored)


def _list_stored_arrays(name: str, rows: Any) -> dict[str, Any]:
  """Returns the arrays that store one array; NumPy's files hold no
  `StringDType`."""
  if getattr(rows, "dtype", None) != _TEXTS:
    return {name: rows}
  lengths = np.strings.str_len(rows)
  widest = int(max(1, lengths.max(initial=1)))
  if widest * len(rows) <= _WASTE * (int(lengths.sum()) + len(rows)):
    return {name: rows.astype(f"U{widest}")}
  texts = [text.encode() for text in rows.tolist()]
  ends = np.cumsum([len(text) for text in texts])
  return {
    name + _UTF8: np.frombuffer(b"".join(texts), np.uint8),
    name + _ENDS: ends.astype(np.int64),
  }


def read(path: str | os.PathLike, *, mapped: bool = False) -> Any:
  """Reads the array of a .npy file.

  Args:
    path: the file.
    mapped: whether to map the file into memory instead of reading it at once.

  Raises:
    OSError: if the file cannot be read.
    ValueError: naming the file, if it is damaged.
  """
  with _refuse_damaged(path):
    return np.load(path, mmap_mode="r" if mapped else None)


def read_npz(path: str | os.PathLike) -> dict[str, Any]:
  """Reads the arrays of an .npz file by name.

  Args:
    path: the file.

  Raises:
    OSError: if the file cannot be read.
    ValueError: naming the file, if it is damaged.
  """
  with _refuse_damaged(path), np.load(path) as stored:
    arrays = {name: stored[name] for name in stored.files}
    for name in [name for name in arrays if name.endswith(_ENDS)]:
      array_name = name.removesuffix(_ENDS)
      content = arrays.pop(array_name + _UTF8).tobytes()
      bounds = itertools.pairwise([0, *arrays.pop(name).tolist()])
      arrays[array_name] = as_texts([content[i:j].decode() for i, j in bounds])
    return arrays


@contextlib.contextmanager
def _refuse_damaged(path: str | os.PathLike) -> Iterator[None]:
  """Turns the dozen kinds of errors that NumPy raises for a damaged file into
  one."""
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
