"""The files of a token cache: what is in them, mapped, written and hashed."""

import hashlib
import json
import os
import pathlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

__all__ = [
  "Column",
  "File",
  "Names",
  "NamesFile",
  "check_size",
  "digest",
  "ends_path",
  "header",
  "names_path",
  "sha256",
  "tokens_path",
]

_PIECE = 1 << 24
"""Bytes hashed at a time."""


class Column:
  """Rows of tokens on disk: indexing gives int32 arrays in memory.

  Attributes:
    shape: records and tokens of each.
  """

  def __init__(self, path: pathlib.Path):
    """Maps a file that `Writer` wrote."""
    self._path = path
    self._stored = np.load(path, mmap_mode="r")
    check_size(path, self._stored.offset + self._stored.nbytes)
    self._file = os.open(path, os.O_RDONLY)
    weakref.finalize(self, os.close, self._file)
    self.shape: tuple[int, int] = self._stored.shape

  def __reduce__(self):
    """Another process opens the file again."""
    return Column, (self._path,)

  def __len__(self) -> int:
    """Returns the number of records."""
    return len(self._stored)

  def __getitem__(self, rows: Any) -> np.ndarray:
    """Returns rows: a number, a slice or an array of numbers."""
    if isinstance(rows, np.ndarray) and rows.ndim == 1 and rows.dtype != bool:
      if rows.size and not -len(self) <= rows.min() <= rows.max() < len(self):
        raise IndexError(f"rows of {len(self)}, got one out of range")
      return self._gathered(rows)
    return np.array(self._stored[rows], np.int32)

  def __array__(
    self, dtype: Any = None, copy: bool | None = None
  ) -> np.ndarray:
    """Returns all rows in memory."""
    del copy  # always one
    return np.array(self._stored, dtype or np.int32)

  def _gathered(self, rows: np.ndarray) -> np.ndarray:
    """Reads rows in the order of the disk, whatever order is asked for."""
    order = np.argsort(rows, kind="stable")
    gathered = np.empty((len(rows), self.shape[1]), np.int32)
    gathered[order] = self._read(rows[order].astype(np.int64) % len(self))
    return gathered

  def _read(self, rows: np.ndarray) -> np.ndarray:
    """Reads rows without mapping them.

    A page that a map touches is waited for alone, with its neighbours, and
    counts as memory of the process; here all are asked for first.
    """
    found = np.empty((len(rows), self.shape[1]), self._stored.dtype)
    size = found.itemsize * self.shape[1]
    places = (self._stored.offset + rows * size).tolist()
    if not hasattr(os, "preadv"):
      return self._stored[rows]
    if hasattr(os, "posix_fadvise"):
      for place in places:
        os.posix_fadvise(self._file, place, size, os.POSIX_FADV_WILLNEED)
    for row, place in zip(found, places, strict=True):
      if os.preadv(self._file, [row], place) != size:
        raise OSError(f"{self._path}: shorter than it was when opened")
    return found


class Names(Sequence[str]):
  """Strings on disk, one for each record."""

  def __init__(self, path: pathlib.Path):
    """Maps a file of lines and the places where they end."""
    ends = np.load(ends_path(path), mmap_mode="r")
    check_size(ends_path(path), ends.offset + ends.nbytes)
    check_size(path, int(ends[-1]) + 1 if len(ends) else 0)
    self._path, self._ends = path, ends
    empty = not len(ends) or not ends[-1]  # an empty file cannot be mapped
    self._bytes = np.zeros(0, np.uint8) if empty else np.memmap(path, np.uint8)

  def __len__(self) -> int:
    """Returns the number of records."""
    return len(self._ends)

  def __getitem__(self, row: Any) -> Any:
    """Returns the name of a record, or a list of names for a slice."""
    if isinstance(row, slice):
      start, stop, step = row.indices(len(self))
      if step == 1 and start < stop:
        return self._block(start, stop)
      return [self[place] for place in range(start, stop, step)]
    row = range(len(self))[int(row)]
    return self._block(row, row + 1)[0]

  def __reduce__(self):
    """Another process opens the file again."""
    return Names, (self._path,)

  def _block(self, start: int, stop: int) -> list[str]:
    """Returns the names of records that lie together, at least one."""
    first = int(self._ends[start - 1]) + 1 if start else 0
    text = bytes(self._bytes[first : int(self._ends[stop - 1])]).decode()
    return text.split("\n")


class File:
  """A file that is hashed while it is written."""

  def __init__(self, path: pathlib.Path):
    self._stream: BinaryIO = open(path, "wb")
    self._hash = hashlib.sha256()

  def write(self, content: Any) -> None:
    self._hash.update(content)
    self._stream.write(content)

  def write_unhashed(self, content: bytes) -> None:
    self._stream.write(content)

  def close(self, header: bytes = b"") -> str:
    """Overwrites the first bytes, makes it durable and returns the digest."""
    self._stream.seek(0)
    self._stream.write(header)
    self._stream.flush()
    os.fsync(self._stream.fileno())
    self._stream.close()
    return self._hash.hexdigest()

  def abandon(self) -> None:
    self._stream.close()


class NamesFile(File):
  """Lines, and where each ends: 8 bytes a record until the file is closed."""

  def __init__(self, path: pathlib.Path):
    super().__init__(path)
    self._path, self._place = path, 0
    self._ends: list[np.ndarray] = []

  def write(self, content: Sequence[str]) -> None:
    encoded = [text.encode() for text in content]
    ends = self._place + np.cumsum([len(text) + 1 for text in encoded]) - 1
    self._place = int(ends[-1]) + 1 if len(ends) else self._place
    self._ends.append(ends.astype(np.int64))
    super().write(b"".join(text + b"\n" for text in encoded))

  def close(self, header: bytes = b"") -> str:
    ends = np.concatenate([np.zeros(0, np.int64), *self._ends])
    np.save(ends_path(self._path), ends)
    return super().close(header)


def digest(body: Mapping[str, Any]) -> str:
  """Returns the digest of what a manifest says of its files."""
  text = json.dumps(body, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def sha256(content: np.ndarray) -> str:
  """Hashes an array of bytes, piece by piece."""
  state = hashlib.sha256()
  for start in range(0, len(content), _PIECE):
    state.update(np.ascontiguousarray(content[start : start + _PIECE]).data)
  return state.hexdigest()


def header(dtype: str, records: int, length: int) -> bytes:
  """Returns a .npy header, as long for any number of records."""
  text = repr(
    {"descr": dtype, "fortran_order": False, "shape": (records, length)}
  )
  body = text.ljust(117).encode() + b"\n"
  return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body


def check_size(path: pathlib.Path, size: int) -> None:
  """Refuses a file that is shorter or longer than what is in it."""
  found = path.stat().st_size
  if found != size:
    raise ValueError(f"{path.name} has {found} bytes and not {size}")


def tokens_path(directory: pathlib.Path, name: str) -> pathlib.Path:
  return directory / f"{name}.npy"


def names_path(directory: pathlib.Path, name: str) -> pathlib.Path:
  return directory / f"{name}.txt"


def ends_path(path: pathlib.Path) -> pathlib.Path:
  return path.with_name(f"{path.stem}_ends.npy")
