"""Vectors of a collection in a folder of blocks, which processes share.

A block is block_NNNNN.npy, a float32 array, with the mark of `data.blocks` beside
it: its digest, and whose vectors of what these are. Processes that write
different blocks need not know of each other. One file that all write into
(`numpy.lib.format.open_memmap`) would go into a bucket whole after each block.
"""

import os
import pathlib

from synthq_jax import checks
from synthq_jax.data import blocks

__all__ = ["files", "of_shard", "open_vectors", "rows_of_shard"]


def files(directory: str | os.PathLike) -> blocks.Blocks:
  """Returns the blocks of a folder; made of an encoder, a space, and tokens.

  Args:
    directory: the folder, which need not be there.
  """
  return blocks.Blocks(pathlib.Path(directory), "block_{:05}.npy")


def of_shard(
  rows: int, *, block_rows: int, shard: int, num_shards: int
) -> dict[int, slice]:
  """Returns the blocks of one of several processes, which lie together.

  >>> [list(of_shard(95, block_rows=10, shard=i, num_shards=3)) for i in range(3)]
  [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]

  Args:
    rows: of all processes, >= 1.
    block_rows: rows of every block but the last, >= 1.
    shard: the number of the process, in [0, num_shards).
    num_shards: how many there are.

  Returns:
    Number -> rows; none where there are more shards than blocks.

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
  """Returns how many rows the blocks of `of_shard` have.

  >>> [rows_of_shard(95, block_rows=10, shard=i, num_shards=3) for i in range(3)]
  [30, 30, 35]

  Args:
    rows: of all processes.
    **shares: the other arguments of `of_shard`.
  """
  return sum(s.stop - s.start for s in of_shard(rows, **shares).values())


def open_vectors(directory: str | os.PathLike, rows: int) -> blocks.Rows:
  """Opens the vectors that `encode.to_files` wrote.

  The files are mapped, not read: a number that changed on disk is found by
  `encode.to_files`, which reads and mends them.

  Args:
    directory: the folder that all its processes wrote to.
    rows: how many vectors there are to be.

  Raises:
    ValueError: if a block is missing or cut short, there are more vectors, or
      they are of different encoders.
  """
  of_folder = files(directory)
  paths = sorted(of_folder.directory.glob("block_*.npy"))
  found = blocks.Rows(paths) if paths else ()
  if not paths or len(found) != rows:
    raise ValueError(
      f"{directory}: expected {rows} vectors, got {len(found)}; finish"
      " encode.to_files for every process, or delete the folder and encode again"
    )
  origins = [of_folder.made_of(number) for number in range(len(paths))]
  if len({origin.partition(" ")[0] for origin in origins}) > 1:
    raise ValueError(
      f"{directory}: expected vectors of one encoder, got several, or a mark is"
      " missing; delete the folder of this result and make it again"
    )
  return found
