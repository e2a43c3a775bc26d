"""Reads the texts of a pre-training corpus part by part: files, or shards of TFDS.

C4 exists in both forms: as 1,024 files c4-train.*.json.gz of JSON lines with a
"text", which need no preparation, or as the TFDS dataset c4/en, which needs one.
"""

import dataclasses
import glob
import os
import pathlib
from collections.abc import Iterator
from typing import Protocol

from synthq_jax import extras
from synthq_jax.data import beir_sets, compression, files, table_files

__all__ = ["Part", "parts"]

_TFDS = "tfds:"
_TABLES = (".jsonl", ".json", ".parquet", ".arrow")


class Part(Protocol):
  """A part of a corpus that can be read by itself."""

  @property
  def identity(self) -> str:
    """A text that changes with the part."""

  def texts(self) -> Iterator[str]:
    """Yields the texts of the part."""


def parts(source: str) -> list[Part]:
  """Returns the parts of a corpus without reading them.

  Args:
    source: a glob of files, plain or compressed: JSON lines with a "text" (.jsonl,
      .json), tables with such a column (.parquet, .arrow), or else one text a
      line. Or tfds:NAME[@SPLIT], e.g. tfds:c4/en@validation, in TFDS's data folder
      (TFDS_DATA_DIR); the default split is train.

  Returns:
    The files in the order of their names, or the shards in the order of numbers.

  Raises:
    ValueError: if no file matches, or TFDS has not prepared the dataset.
  """
  if source.startswith(_TFDS):
    name, _, split = source.removeprefix(_TFDS).partition("@")
    return _list_shards(name, split or "train")
  paths = sorted(glob.glob(os.path.expanduser(source), recursive=True))
  files_ = [_File(pathlib.Path(path)) for path in paths if os.path.isfile(path)]
  if not files_:
    raise ValueError(
      f"expected files of a corpus, got none for {source!r}: give a path or a"
      ' glob in quotes, e.g. "c4/*.json.gz"'
    )
  return files_


@dataclasses.dataclass(frozen=True)
class _File:
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


@dataclasses.dataclass(frozen=True)
class _Shard:
  """Reads a shard of a dataset that TFDS has prepared."""

  name: str
  version: str
  split: str
  number: int

  @property
  def identity(self) -> str:
    """Name, version, split and number: a version of a dataset never changes."""
    return f"{_TFDS}{self.version}@{self.split} {self.number}"

  def texts(self) -> Iterator[str]:
    """Yields the feature "text" of the shard's examples."""
    with extras.required("seqio"):
      import tensorflow_datasets as tfds

    examples = _get_builder(self.name).as_dataset(
      split=f"{self.split}[{self.number}shard:{self.number + 1}shard]",
      decoders=tfds.decode.PartialDecoding({"text": True}),
    )
    for example in examples.as_numpy_iterator():
      yield example["text"].decode()


def _list_shards(name: str, split: str) -> list[Part]:
  builder = _get_builder(name)
  if split not in builder.info.splits:
    existing = sorted(builder.info.splits)
    command = beir_sets.get_prepare_command(name, builder.data_dir_root)
    raise ValueError(
      f"{_TFDS}{name}@{split}: expected a prepared dataset, got"
      f" {f'only {existing}' if existing else 'none in TFDS_DATA_DIR'}: run {command}"
      " (C4 needs a cluster), or give a glob of its files"
    )
  if "text" not in (builder.info.features or {}):
    raise ValueError(
      f'{_TFDS}{name}: expected a feature "text", got'
      f" {sorted(builder.info.features or {})}: give another dataset"
    )
  version = builder.info.full_name
  number = builder.info.splits[split].num_shards
  return [_Shard(name, version, split, i) for i in range(number)]


def _get_builder(name: str):
  with extras.required("seqio"):
    import tensorflow_datasets as tfds

  try:
    return tfds.builder(name)
  except Exception as error:
    first = str(error).partition("\n")[0]
    raise ValueError(
      f"{_TFDS}{name}: expected a dataset of TFDS, got {type(error).__name__}:"
      f" {first}; check the name"
    ) from error
