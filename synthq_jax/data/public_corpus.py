"""Reads the texts of a pre-training corpus file by file.

C4 is 1,024 files c4-train.*.json.gz of JSON lines with a "text".
"""

import dataclasses
import glob
import os
import pathlib
from collections.abc import Iterator

from synthq_jax.data import compression, files, table_files

__all__ = ["File", "parts"]

_TABLES = (".jsonl", ".json", ".parquet", ".arrow")


@dataclasses.dataclass(frozen=True)
class File:
  """Reads a file of a corpus."""

  path: pathlib.Path

  @property
  def identity(self) -> str:
    """Path, size and mtime: reading a terabyte for a digest takes too long."""
    status = self.path.stat()
    return f"{self.path.resolve()} {status.st_size} {status.st_mtime_ns}"

  def texts(self) -> Iterator[str]:
    """Yields the texts.

    Raises:
      ValueError: naming the malformed line.
    """
    name = compression.remove_suffix(self.path.name)
    if name.endswith(_TABLES):
      for where, entry in table_files.rows(self.path):
        yield files.field(where, entry, "text")
      return
    for _, line in files.lines(self.path):
      yield line


def parts(source: str) -> list[File]:
  """Returns the files of a corpus without reading them.

  Args:
    source: a glob of files, plain or compressed: JSON lines with a "text" (.jsonl,
      .json), tables with such a column (.parquet, .arrow), or else one text a
      line.

  Returns:
    The files in the order of their names.

  Raises:
    ValueError: if no file matches.
  """
  paths = sorted(glob.glob(os.path.expanduser(source), recursive=True))
  files_ = [File(pathlib.Path(path)) for path in paths if os.path.isfile(path)]
  if not files_:
    raise ValueError(
      f"expected files of a corpus, got none for {source!r}: give a path or a"
      ' glob in quotes, e.g. "c4/*.json.gz"'
    )
  return files_
