"""Stores the vectors of a collection as blocks in a folder that processes share.

A block is block_NNNNN.npy, a float32 array. Beside it lies the mark of
`data.blocks`: the digest of the vectors, their encoder and their tokens. Processes
that write different blocks need no communication. A single shared file
(`numpy.lib.format.open_memmap`) would be uploaded whole to a bucket after each
block.
"""

import os
import pathlib
import shutil

from synthq_jax import checks
from synthq_jax.data import blocks
from synthq_jax.storage import artifacts, stores

__all__ = [
  "files",
  "link_blocks",
  "of_shard",
  "open_vectors",
  "rows_of_shard",
  "shorten",
]


def files(directory: str | os.PathLike) -> blocks.Blocks:
  """Returns the blocks of a folder, whose marks are "ENCODER TOKENS".

  Args:
    directory: the folder, which need not exist.
  """
  return blocks.Blocks(pathlib.Path(directory), "block_{:05}.npy")


def of_shard(
  rows: int, *, block_rows: int, shard: int, num_shards: int
) -> dict[int, slice]:
  """Returns the consecutive blocks of one of several processes.

  >>> [list(of_shard(95, block_rows=10, shard=i, num_shards=3)) for i in range(3)]
  [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]

  Args:
    rows: the number of rows of all processes, >= 1.
    block_rows: the number of rows of every block but the last, >= 1.
    shard: the number of the process, in [0, num_shards).
    num_shards: the number of processes.

  Returns:
    Block number -> rows; may be empty if there are more shards than blocks.

  Raises:
    ValueError: if a number is out of range.
  """
  checks.at_least(1, rows=rows, block_rows=block_rows)
  checks.within(f"[0, {num_shards})", shard=shard)
  total = -(-rows // block_rows)
  first, stop = (total * (shard + i) // num_shards for i in range(2))
  starts = {number: number * block_rows for number in range(first, stop)}
  return {n: slice(at, min(at + block_rows, rows)) for n, at in starts.items()}


def rows_of_shard(rows: int, **shares: int) -> int:
  """Counts the rows in the blocks of `of_shard`.

  >>> [rows_of_shard(95, block_rows=10, shard=i, num_shards=3) for i in range(3)]
  [30, 30, 35]

  Args:
    rows: the number of rows of all processes.
    **shares: the other arguments of `of_shard`.
  """
  return sum(s.stop - s.start for s in of_shard(rows, **shares).values())


def link_blocks(
  earlier: str | os.PathLike,
  directory: str | os.PathLike,
  rows: int,
  *,
  block_rows: int,
) -> None:
  """Links the blocks of an earlier collection into a folder that may lack them.

  `encode.to_files` keeps those of the same encoder and tokens, and replaces the
  others; the earlier folder never changes. Nothing is copied where the file
  system has hard links. In the mirror of a store, the blocks are uploaded.

  Args:
    earlier: folder of the earlier collection.
    directory: folder of this one.
    rows: number of rows of this collection.
    block_rows: number of rows of every block but the last, in both.
  """
  old, new = files(earlier), files(directory)
  new.directory.mkdir(parents=True, exist_ok=True)
  for number in range(-(-rows // block_rows)):
    pairs = zip(old.paths(number), new.paths(number), strict=True)
    for source, target in pairs:
      if source.exists() and not target.exists():
        try:
          os.link(source, target)
        except OSError:  # another file system, or one without links
          shutil.copy(source, target)
        stores.push(target)


def shorten(
  directory: str | os.PathLike, rows: int, *, block_rows: int
) -> None:
  """Removes blocks beyond those of a collection of so many rows, from the store
  that mirrors the folder, too."""
  folder = files(directory)
  needed = {folder.path(number) for number in range(-(-rows // block_rows))}
  # A kill may have left a gap before the last of them.
  for path in {*folder.directory.glob("block_*.npy")} - needed:
    artifacts.remove(path.with_suffix(".sha256"))
    artifacts.remove(path)


def open_vectors(directory: str | os.PathLike, rows: int) -> blocks.Rows:
  """Opens the vectors that `encode.to_files` wrote.

  The files are memory-mapped, not read. So damaged numbers are not detected here;
  `encode.to_files` reads the blocks and replaces damaged ones.

  Args:
    directory: the folder that all processes wrote to.
    rows: the expected number of vectors.

  Raises:
    ValueError: if a block is missing or cut short, there are more vectors, or
      they are of different encoders.
  """
  folder = files(directory)
  paths = sorted(folder.directory.glob("block_*.npy"))
  vectors = blocks.Rows(paths) if paths else ()
  if not paths or len(vectors) != rows:
    raise ValueError(
      f"{directory}: expected {rows} vectors, got {len(vectors)}; finish"
      " encode.to_files for every process, or delete the folder and encode again"
    )
  origins = [folder.made_of(number) for number in range(len(paths))]
  if len({origin.partition(" ")[0] for origin in origins}) > 1:
    raise ValueError(
      f"{directory}: expected vectors of one encoder, got several, or a mark is"
      " missing; delete the folder of this result and make it again"
    )
  return vectors
