"""Arrays in files that are complete or not there: .npy and .npz."""

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
"""What follows the name of an array of texts that is stored end to end."""
_WASTE = 4
"""Places of rows as long as the longest, for each character, at most."""


def as_texts(values: Sequence[str]) -> np.ndarray:
  """Returns an array of texts whose memory follows their own lengths.

  In NumPy's usual arrays of text, every one takes what the longest takes.

  Args:
    values: the texts.
  """
  return np.array(values, _TEXTS)


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
    arrays: NumPy arrays by name. Those of `as_texts` are stored end to end where
      one text is much longer than the others, else in rows of one width.
    compressed: whether it is smaller, and written more slowly.

  Raises:
    OSError: naming the file, if a part of it could not be written.
  """
  write = np.savez_compressed if compressed else np.savez
  stored: dict[str, Any] = {}
  for name, rows in arrays.items():
    stored |= _stored(name, rows)
  with artifacts.replacing(path) as stream:
    write(stream, **stored)


def _stored(name: str, rows: Any) -> dict[str, Any]:
  """Returns what an array is stored as: texts have no form in NumPy's files."""
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
    found = {name: stored[name] for name in stored.files}
    for name in [name for name in found if name.endswith(_ENDS)]:
      whole = name.removesuffix(_ENDS)
      held = found.pop(whole + _UTF8).tobytes()
      bounds = itertools.pairwise([0, *found.pop(name).tolist()])
      found[whole] = as_texts([held[i:j].decode() for i, j in bounds])
    return found


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
