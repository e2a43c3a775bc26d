"""Stores arrays on disk in blocks of rows and reads single rows.

A block is a .npy file that is written atomically, so that a kill costs one block.
Token caches, vectors of a collection and the parts of a long stage are stored this
way. NumPy alone can read them.
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
"""Number of characters of a digest."""


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
  """Reads and atomically writes numbered arrays in a folder."""

  def __init__(self, directory: pathlib.Path, pattern: str = "{}.npy"):
    """Stores the folder, which the first block creates, and its names'
    pattern."""
    self.directory, self._pattern = directory, pattern

  def path(self, number: int) -> pathlib.Path:
    """Returns the file of a block."""
    return self.directory / self._pattern.format(number)

  def paths(self, number: int) -> tuple[pathlib.Path, pathlib.Path]:
    """Returns the files of a block: its rows, and their digest and origin."""
    return self.path(number), self._mark(number)

  def read(
    self, number: int, *, mapped: bool = False, made_of: str = ""
  ) -> np.ndarray | None:
    """Reads a block; None if it is missing, damaged or of another origin.

    Args:
      number: the number of the block.
      mapped: whether to map the file into memory instead of reading it at once.
      made_of: the expected origin of the block; "" admits only a block whose
        stored origin is "", or that stores none.
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
    """Returns the stored origin of a block, or ""."""
    mark = self._mark(number)
    if not mark.exists():
      return ""
    return mark.read_bytes()[_DIGEST:].decode(errors="replace")

  def write(self, number: int, rows: np.ndarray, *, made_of: str = "") -> None:
    """Writes a block atomically, and its digest and origin to a second file.

    Args:
      number: the number of the block.
      rows: the rows of the block.
      made_of: the origin of the block, for `read`.
    """
    artifacts.remove(self._mark(number))  # belongs to the old block
    array_files.save(self.path(number), rows)
    artifacts.write_atomically(self._mark(number), digest(rows) + made_of)

  def _mark(self, number: int) -> pathlib.Path:
    return self.path(number).with_suffix(".sha256")


class Rows:
  """Reads rows of arrays on disk lazily.

  `rows[a:b]`, `rows[positions]` and `rows[mask]` are arrays in memory, and
  `numpy.asarray(rows)` reads all. A slice inside one block that keeps its type
  is a memory map.

  Attributes:
    blocks: memory maps of the files, in order.
    shape: shape of all rows together.
    dtype: type of the rows that are read.
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
      dtype: type to which rows are converted, always as copies; None: the stored
        type.
      mapped: whether to read scattered rows through memory maps. A map waits for
        each page by itself, and its pages count as memory of the process. Without
        maps, all rows are requested from the system before the first is read.

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
    """Pickles the arguments, so that another process opens the files again."""
    paths, dtype, mapped = self._arguments
    return functools.partial(Rows, dtype=dtype, mapped=mapped), (paths,)

  def __len__(self) -> int:
    return self.shape[0]

  def __getitem__(self, rows: Any) -> np.ndarray:
    """Returns the rows at a position, in a slice, a mask or an array of them."""
    if not isinstance(rows, slice):
      return self._gather(np.asarray(rows))
    start, stop, step = rows.indices(len(self))
    if step != 1:
      return self._gather(np.arange(start, stop, step))
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
    del copy  # concatenation always copies
    return np.concatenate(self.blocks).astype(dtype or self.dtype, copy=False)

  def _gather(self, positions: np.ndarray) -> np.ndarray:
    """Reads scattered rows, in the order in which they are on disk."""
    if positions.dtype == bool and positions.shape == self.shape[:1]:
      positions = np.flatnonzero(positions)
    if positions.size and not np.issubdtype(positions.dtype, np.integer):
      raise IndexError(f"expected positions, got an array of {positions.dtype}")
    positions = positions.astype(np.int64)
    if positions.size and not -len(
      self
    ) <= positions.min() <= positions.max() < len(self):
      raise IndexError(
        f"expected positions below {len(self)}, got {positions.min()} to {positions.max()}"
      )
    flat = positions.reshape(-1) % max(len(self), 1)
    order = np.argsort(flat, kind="stable")
    gathered = np.empty((len(flat), *self.shape[1:]), self.dtype)
    owners = flat[order] // self._block_rows
    for number in np.unique(owners):
      chosen = order[owners == number]
      gathered[chosen] = self._read(
        number, flat[chosen] - number * self._block_rows
      )
    return gathered.reshape(*positions.shape, *self.shape[1:])

  def _read(self, number: int, rows: np.ndarray) -> np.ndarray:
    """Reads rows of a block, given in its order."""
    block = self.blocks[number]
    if not self._files or not hasattr(os, "preadv"):
      return block[rows]
    file, path = self._files[number], self._arguments[0][number]
    values = np.empty((len(rows), *self.shape[1:]), block.dtype)
    size = block.strides[0]
    offsets = (block.offset + rows * size).tolist()
    if hasattr(os, "posix_fadvise"):
      for offset in offsets:
        os.posix_fadvise(file, offset, size, os.POSIX_FADV_WILLNEED)
    for row, offset in zip(values, offsets, strict=True):
      if os.preadv(file, [row], offset) != size:
        raise OSError(f"{path}: the file became shorter after it was opened")
    return values


def check_size(path: pathlib.Path, size: int) -> None:
  """Refuses a file that does not have `size` bytes."""
  file_size = path.stat().st_size
  if file_size != size:
    raise ValueError(f"{path.name} has {file_size} bytes and not {size}")
