"""Stores arrays on disk in blocks of rows, and reads rows of them.

A block is a .npy file that is complete or not there, so that a kill costs one.
Token caches, vectors of a collection and the parts of a long stage are kept this
way. Nothing but NumPy is needed to read them.
"""

import functools
import hashlib
import os
import pathlib
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from synthq_jax.storage import array_files, artifacts

__all__ = ["Blocks", "Rows", "digest"]


_DIGEST = 64
"""Characters of a digest."""


def digest(array: np.ndarray) -> str:
  """Returns a digest of the type, shape and numbers of an array.

  >>> digest(np.arange(2)) == digest(np.arange(2).reshape(1, 2))
  False
  """
  array = np.ascontiguousarray(array)
  state = hashlib.sha256(f"{array.dtype} {array.shape}\n".encode())
  state.update(array.reshape(-1).view(np.uint8))
  return state.hexdigest()


class Blocks:
  """Numbered arrays in files that are complete or not there."""

  def __init__(self, directory: pathlib.Path, pattern: str = "{}.npy"):
    """Takes a folder, made with the first block, and the names in it."""
    self.directory, self._pattern = directory, pattern

  def path(self, number: int) -> pathlib.Path:
    """Returns the file of a block."""
    return self.directory / self._pattern.format(number)

  def read(
    self, number: int, *, mapped: bool = False, made_of: str = ""
  ) -> np.ndarray | None:
    """Returns a block, or None if it is missing or damaged: make it again.

    Args:
      number: which one.
      mapped: whether it stays on disk and is read where it is used.
      made_of: what it was made of; of something else it counts as missing.
    """
    try:
      rows = array_files.read(self.path(number), mapped=mapped)
    except (FileNotFoundError, ValueError):
      return None
    mark = self._mark(number)
    if not mark.exists():
      return None if made_of else rows
    expected = f"{digest(rows)}{made_of}".encode()
    return rows if mark.read_bytes() == expected else None

  def made_of(self, number: int) -> str:
    """Returns what a block says it was made of; empty where it does not."""
    mark = self._mark(number)
    if not mark.exists():
      return ""
    return mark.read_bytes()[_DIGEST:].decode(errors="replace")

  def write(self, number: int, rows: np.ndarray, *, made_of: str = "") -> None:
    """Writes a block in one step, and its digest and origin beside it.

    Args:
      number: which one.
      rows: its content.
      made_of: what it was made of, for `read`.
    """
    artifacts.remove(self._mark(number))  # of the block before
    array_files.save(self.path(number), rows)
    artifacts.write_atomically(self._mark(number), digest(rows) + made_of)

  def _mark(self, number: int) -> pathlib.Path:
    return self.path(number).with_suffix(".sha256")


class Rows:
  """Rows of arrays that stay on disk and are read where they are used.

  `rows[a:b]`, `rows[positions]` and `rows[mask]` are arrays in memory, and
  `numpy.asarray(rows)` reads all. A slice inside one block that keeps its type
  is a memory map.

  Attributes:
    blocks: memory maps of the files, in order.
    shape: of all rows together.
    dtype: of what is read.
  """

  def __init__(
    self,
    paths: Sequence[pathlib.Path],
    *,
    dtype: Any = None,
    mapped: bool = True,
  ):
    """Opens blocks; all but the last have as many rows as the first.

    Args:
      paths: .npy files, at least one.
      dtype: what rows are read as, then always in arrays of their own; None: as
        they are stored.
      mapped: whether scattered rows are read through memory maps. A page that a
        map touches is waited for alone, with its neighbours, and counts as
        memory of the process; without maps, all rows are asked for first.

    Raises:
      ValueError: if a file is shorter or longer than its array.
    """
    self._arguments = tuple(paths), dtype, mapped
    self.blocks = tuple(array_files.read(path, mapped=True) for path in paths)
    for path, block in zip(paths, self.blocks, strict=True):
      check_size(path, block.offset + block.nbytes)
    first = self.blocks[0]
    self._block_rows = max(len(first), 1)
    self._copies = dtype is not None
    self.dtype = np.dtype(dtype or first.dtype)
    self.shape = (sum(map(len, self.blocks)), *first.shape[1:])
    self._files = () if mapped else [os.open(p, os.O_RDONLY) for p in paths]
    for file in self._files:
      weakref.finalize(self, os.close, file)

  def __reduce__(self):
    """Another process opens the files again."""
    paths, dtype, mapped = self._arguments
    return functools.partial(Rows, dtype=dtype, mapped=mapped), (paths,)

  def __len__(self) -> int:
    return self.shape[0]

  def __getitem__(self, rows: Any) -> np.ndarray:
    """Returns the rows at a position, in a slice, a mask or an array of them."""
    if not isinstance(rows, slice):
      return self._gathered(np.asarray(rows))
    start, stop, step = rows.indices(len(self))
    if step != 1:
      return self._gathered(np.arange(start, stop, step))
    stop, size = max(start, stop), self._block_rows
    parts = [
      self.blocks[number][max(start - number * size, 0) : stop - number * size]
      for number in range(start // size, -(-stop // size))
    ]
    if len(parts) == 1 and not self._copies:
      return parts[0]
    empty = np.zeros((0, *self.shape[1:]), self.dtype)
    return np.concatenate([empty, *parts], dtype=self.dtype, casting="unsafe")

  def __array__(
    self, dtype: Any = None, copy: bool | None = None
  ) -> np.ndarray:
    """Returns all rows in memory."""
    del copy  # there is no way without one
    return np.concatenate(self.blocks).astype(dtype or self.dtype, copy=False)

  def _gathered(self, at: np.ndarray) -> np.ndarray:
    """Reads scattered rows in the order of the disk."""
    if at.dtype == bool and at.shape == self.shape[:1]:
      at = np.flatnonzero(at)
    if at.size and not np.issubdtype(at.dtype, np.integer):
      raise IndexError(f"expected positions, got an array of {at.dtype}")
    at = at.astype(np.int64)
    if at.size and not -len(self) <= at.min() <= at.max() < len(self):
      raise IndexError(
        f"expected positions below {len(self)}, got {at.min()} to {at.max()}"
      )
    flat = at.reshape(-1) % max(len(self), 1)
    order = np.argsort(flat, kind="stable")
    found = np.empty((len(flat), *self.shape[1:]), self.dtype)
    owners = flat[order] // self._block_rows
    for number in np.unique(owners):
      chosen = order[owners == number]
      found[chosen] = self._read(
        number, flat[chosen] - number * self._block_rows
      )
    return found.reshape(*at.shape, *self.shape[1:])

  def _read(self, number: int, rows: np.ndarray) -> np.ndarray:
    """Reads rows of a block, given in its order."""
    block = self.blocks[number]
    if not self._files or not hasattr(os, "preadv"):
      return block[rows]
    file, path = self._files[number], self._arguments[0][number]
    found = np.empty((len(rows), *self.shape[1:]), block.dtype)
    size = block.strides[0]
    places = (block.offset + rows * size).tolist()
    if hasattr(os, "posix_fadvise"):
      for place in places:
        os.posix_fadvise(file, place, size, os.POSIX_FADV_WILLNEED)
    for row, place in zip(found, places, strict=True):
      if os.preadv(file, [row], place) != size:
        raise OSError(f"{path}: shorter than it was when opened")
    return found


def check_size(path: pathlib.Path, size: int) -> None:
  """Refuses a file that is shorter or longer than what is in it."""
  found = path.stat().st_size
  if found != size:
    raise ValueError(f"{path.name} has {found} bytes and not {size}")
