"""Vectors of a collection in a folder of blocks, which processes share.

A block is block_NNNNN.npy, a float32 array, and block_NNNNN.json, which is
written last and says whose vectors these are: a block without it, or one that
it does not describe, does not count. Nothing else is in the folder, so that
processes that write different blocks need not know of each other.
"""

import dataclasses
import json
import os
import pathlib

import numpy as np
from jaxtyping import Float

from synthq_jax import artifacts, checks
from synthq_jax.data import blocks

__all__ = [
  "Layout",
  "Writer",
  "open_vectors",
  "rows_of_shard",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """What all blocks of a folder agree on.

  Attributes:
    encoder: a fingerprint of what made the vectors.
    rows: vectors in all blocks, >= 1.
    dim: numbers of a vector, >= 1.
    block_rows: vectors of every block but the last, >= 1.
  """

  encoder: str
  rows: int
  dim: int
  block_rows: int

  def __post_init__(self):
    checks.at_least(1, rows=self.rows, dim=self.dim, block_rows=self.block_rows)

  @property
  def num_blocks(self) -> int:
    return -(-self.rows // self.block_rows)

  def bounds(self, number: int) -> tuple[int, int]:
    """Returns the first row of a block and the one past its last."""
    first = number * self.block_rows
    return first, min(first + self.block_rows, self.rows)

  def of_shard(self, shard: int, num_shards: int) -> range:
    """Returns the blocks of one of several processes, which lie together.

    >>> layout = Layout(encoder="e", rows=100, dim=8, block_rows=10)
    >>> [list(layout.of_shard(shard, 3)) for shard in range(3)]
    [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]

    Args:
      shard: the number of the process, in [0, num_shards).
      num_shards: how many there are.

    Returns:
      The numbers of its blocks; none where there are more shards than blocks.

    Raises:
      ValueError: if `shard` is out of range.
    """
    checks.within(f"[0, {num_shards})", shard=shard)
    total = self.num_blocks
    return range(total * shard // num_shards, total * (shard + 1) // num_shards)


def rows_of_shard(
  rows: int, *, block_rows: int, shard: int, num_shards: int
) -> int:
  """Returns how many rows the blocks of one of several processes have.

  >>> [rows_of_shard(95, block_rows=10, shard=i, num_shards=3) for i in range(3)]
  [30, 30, 35]

  Args:
    rows: of all processes, >= 1.
    block_rows: as in `Layout`.
    shard: the number of the process, in [0, num_shards).
    num_shards: how many there are.
  """
  layout = Layout(encoder="", rows=rows, dim=1, block_rows=block_rows)
  bounds = map(layout.bounds, layout.of_shard(shard, num_shards))
  return sum(stop - first for first, stop in bounds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Record:
  """What is known of a finished block.

  Attributes:
    layout: that of its folder.
    num_shards: how many processes its writer was one of.
    source: a digest of what was encoded.
    vectors: a digest of the vectors.
  """

  layout: Layout
  num_shards: int
  source: str
  vectors: str


@dataclasses.dataclass(frozen=True)
class Writer:
  """Writes the blocks of a folder.

  Attributes:
    directory: the folder; made with the first block.
    layout: what its blocks agree on.
    num_shards: how many processes write.
  """

  directory: pathlib.Path
  layout: Layout
  num_shards: int

  def __post_init__(self):
    for number, record in _records(self.directory).items():
      if record.layout != self.layout:
        raise ValueError(
          f"{self._files.path(number)}: expected a block of "
          f"{self.layout}, got one of {record.layout}; use another directory, "
          "or delete this one"
        )

  @property
  def _files(self) -> blocks.Blocks:
    return _blocks(self.directory)

  def has(self, number: int, source: str) -> bool:
    """Returns whether a block is there, undamaged, and made from `source`."""
    record = _record(self._files.path(number))
    if record is None or record.source != source:
      return False
    vectors = self._files.read(number, mapped=True)
    return vectors is not None and blocks.digest(vectors) == record.vectors

  def write(
    self, number: int, source: str, vectors: Float[np.ndarray, "row dim"]
  ) -> None:
    """Writes a block; a kill leaves it whole or not there.

    Args:
      number: which one.
      source: a digest of what was encoded.
      vectors: float32, as many as the layout says.

    Raises:
      ValueError: if these are not vectors of that block.
    """
    first, stop = self.layout.bounds(number)
    if vectors.shape != (stop - first, self.layout.dim):
      raise ValueError(
        f"expected vectors of shape {(stop - first, self.layout.dim)} in block "
        f"{number}, got shape {vectors.shape}; check the encoder"
      )
    mark = self._files.path(number).with_suffix(".json")
    artifacts.remove(mark)  # it would describe the vectors before
    self._files.write(number, vectors, mark=False)  # it has one of its own
    record = _Record(
      layout=self.layout,
      num_shards=self.num_shards,
      source=source,
      vectors=blocks.digest(vectors),
    )
    text = json.dumps(artifacts.to_json(record), indent=1, sort_keys=True)
    artifacts.write_atomically(mark, text + "\n")


def open_vectors(directory: str | os.PathLike) -> blocks.Rows:
  """Opens the vectors that `encode.to_files` wrote.

  The files are mapped, not read: a number that changed on disk is found by
  `encode.to_files`, which reads and mends them.

  Args:
    directory: the folder that all its processes wrote to.

  Returns:
    The vectors.

  Raises:
    ValueError: if there are none, a block is missing or cut short, or blocks
      are of different encoders or collections.
  """
  directory = pathlib.Path(directory)
  records = _records(directory)
  if not records:
    raise ValueError(
      f"{directory}: expected blocks of vectors, got none; run encode.to_files"
    )
  layout = _common_layout(directory, records)
  missing = sorted(set(range(layout.num_blocks)) - records.keys())
  if missing:
    shards = max(record.num_shards for record in records.values())
    unfinished = [
      shard
      for shard in range(shards)
      if not set(layout.of_shard(shard, shards)).isdisjoint(missing)
    ]
    raise ValueError(
      f"{directory}: expected {layout.num_blocks} blocks, got none for "
      f"{_listed(missing)}; finish encode.to_files for shard "
      f"{_listed(unfinished)} of {shards}"
    )
  files = _blocks(directory)
  for number in range(layout.num_blocks):
    _check(files, layout, number)
  return blocks.Rows([files.path(n) for n in range(layout.num_blocks)])


def _common_layout(
  directory: pathlib.Path, records: dict[int, _Record]
) -> Layout:
  """Returns the layout of all blocks, or says that there are several."""
  by_layout = {record.layout: number for number, record in records.items()}
  if len(by_layout) > 1:
    names = " and ".join(
      _blocks(directory).path(n).name for n in by_layout.values()
    )
    raise ValueError(
      f"{directory}: expected blocks of one encoder and collection, got "
      f"different ones in {names}; delete the folder and encode again"
    )
  return next(iter(by_layout))


def _check(files: blocks.Blocks, layout: Layout, number: int) -> None:
  """Refuses a block that is damaged, missing or of another shape."""
  vectors = files.read(number, mapped=True)
  first, stop = layout.bounds(number)
  shape = stop - first, layout.dim
  if vectors is None or vectors.shape != shape or vectors.dtype != np.float32:
    raise ValueError(
      f"{files.path(number)}: expected float32 vectors of shape {shape}, got a"
      " damaged or missing file; run encode.to_files again, which mends it"
    )


def _blocks(directory: pathlib.Path) -> blocks.Blocks:
  return blocks.Blocks(directory, "block_{:05}.npy")


def _records(directory: pathlib.Path) -> dict[int, _Record]:
  found = {}
  for mark in sorted(directory.glob("block_*.json")):
    number = mark.stem.removeprefix("block_")
    record = _record(mark)
    if record is not None and number.isdecimal():
      found[int(number)] = record
  return found


def _record(path: pathlib.Path) -> _Record | None:
  try:
    content = json.loads(path.with_suffix(".json").read_text())
    return artifacts.from_json(_Record, content)
  except (FileNotFoundError, ValueError, AttributeError, KeyError):
    return None  # cut short, or of another version


def _listed(numbers: list[int]) -> str:
  """Names the first few of some numbers.

  >>> _listed([1]), _listed([0, 1, 2, 3, 4, 5])
  ('1', '0, 1, 2, 3 and 2 more')
  """
  text = ", ".join(map(str, numbers[:4]))
  more = len(numbers) - 4
  return f"{text} and {more} more" if more > 0 else text
