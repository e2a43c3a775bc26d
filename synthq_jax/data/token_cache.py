"""Caches token rows of one length on disk, with random access and an id each.

A cache is a folder with the tokens as a .npy file, the ids as lines of a text
file, and a manifest, which is written last.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Int

from synthq_jax.data import blocks, files
from synthq_jax.storage import artifacts

__all__ = ["Cache", "Writer", "load", "writing"]

_FORMAT = 1
_MANIFEST, _TOKENS, _IDS = "manifest.json", "tokens.npy", "ids.txt"
_SMALL = 1 << 16
"""Largest vocabulary whose tokens fit into two bytes."""


@dataclasses.dataclass(frozen=True)
class Cache:
  """A finished cache, as `load` opens it.

  Attributes:
    tokens: int32 [record, length], padded with 0; read lazily from disk.
    ids: the id of each record.
  """

  tokens: blocks.Rows
  ids: files.Lines

  def __len__(self) -> int:
    return len(self.tokens)


class Writer:
  """Writes records block by block; `writing` creates it."""

  def __init__(self, tokens: BinaryIO, ids: BinaryIO, length: int, dtype: str):
    """Writes a header for no records."""
    self._tokens, self._ids = tokens, ids
    self._length, self._dtype = length, dtype
    self.num_records = 0
    tokens.write(self._make_header())

  def append(
    self, tokens: Int[np.ndarray, "record length"], ids: Sequence[str]
  ) -> None:
    """Appends records.

    Args:
      tokens: token ids, padded with 0.
      ids: an id for each record, without line feeds.

    Raises:
      ValueError: if a shape is wrong, a token is out of range, or an id has a
        line feed.
    """
    shape, top = (len(ids), self._length), np.iinfo(self._dtype).max
    if np.shape(tokens) != shape:
      raise ValueError(
        f"expected tokens of shape {shape}, got {np.shape(tokens)}"
      )
    if np.size(tokens) and not 0 <= np.min(tokens) <= np.max(tokens) <= top:
      raise ValueError(
        f"expected tokens from 0 to {top}, got {np.min(tokens)} to"
        f" {np.max(tokens)}: state the vocab_size of their vocabulary"
      )
    if any("\n" in text for text in ids):
      raise ValueError("expected ids without line feeds, got one with them")
    self._tokens.write(np.ascontiguousarray(tokens, self._dtype).data)
    self._ids.write("".join(f"{text}\n" for text in ids).encode())
    self.num_records += len(ids)

  def finish(self) -> dict[str, Any]:
    """Completes the header, makes the files durable, returns the manifest."""
    self._tokens.seek(0)
    self._tokens.write(self._make_header())
    for stream in (self._tokens, self._ids):
      stream.flush()
      os.fsync(stream.fileno())
    size = os.fstat(self._ids.fileno()).st_size
    return {
      "format": _FORMAT,
      "num_records": self.num_records,
      "ids_bytes": size,
    }

  def _make_header(self) -> bytes:
    """Returns a .npy header; its length is the same for any number of
    records."""
    shape = (self.num_records, self._length)
    text = repr({"descr": self._dtype, "fortran_order": False, "shape": shape})
    body = text.ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body


@contextlib.contextmanager
def writing(
  directory: str | os.PathLike, length: int, *, vocab_size: int
) -> Iterator[Writer]:
  """Writes a new cache in one pass, with one block in memory at a time.

  The complete folder appears when the `with` block ends without an exception;
  until then a hidden sibling folder grows. Tokens take two bytes if the
  vocabulary allows it: 8.8 million passages of 384 tokens are 6.8 GB.

  >>> import tempfile
  >>> path = pathlib.Path(tempfile.mkdtemp()) / "cache"
  >>> with writing(path, 3, vocab_size=100) as writer:
  ...   writer.append(np.array([[5, 1, 0]]), ["d1"])
  >>> load(path).tokens[:]
  array([[5, 1, 0]], dtype=int32)

  Args:
    directory: a folder that does not exist yet.
    length: number of tokens of a record, at least 1.
    vocab_size: size of the vocabulary; every token id is below it.

  Yields:
    The writer.

  Raises:
    ValueError: if the folder exists, or the length is below 1.
  """
  if length < 1:
    raise ValueError(f"expected length >= 1, got {length=}")
  dtype = "<u2" if vocab_size <= _SMALL else "<i4"
  with artifacts.new_folder(directory, "cache") as folder:
    with (
      open(folder / _TOKENS, "wb") as tokens,
      open(folder / _IDS, "wb") as ids,
    ):
      writer = Writer(tokens, ids, length, dtype)
      yield writer
      manifest = writer.finish()
    text = json.dumps(manifest, indent=2)
    artifacts.write_atomically(folder / _MANIFEST, text)


def load(directory: str | os.PathLike) -> Cache:
  """Opens a finished cache; tokens are read lazily.

  Args:
    directory: a folder that `writing` wrote.

  Raises:
    ValueError: if there is no cache, it has another format, or one of its files
      is too short or too long.
  """
  directory = pathlib.Path(directory)
  path = directory / _MANIFEST
  try:
    manifest = artifacts.unsealed(path.read_bytes())
  except (OSError, ValueError) as error:
    raise ValueError(
      f"{path}: expected the manifest of a token cache, got"
      f" {type(error).__name__}: it is incomplete, or elsewhere"
    ) from error
  if manifest.get("format") != _FORMAT:
    raise ValueError(
      f"{path}: expected a token cache of format {_FORMAT}, got another file;"
      " write the cache again"
    )
  try:
    if "ids_bytes" in manifest:  # missing in caches of earlier versions
      blocks.check_size(directory / _IDS, manifest["ids_bytes"])
    tokens = blocks.Rows([directory / _TOKENS], dtype=np.int32, mapped=False)
    ids = files.Lines(directory / _IDS, _decode_id)
    counts = {manifest["num_records"], len(tokens), len(ids)}
    if len(counts) > 1 or len(tokens.shape) != 2:
      raise ValueError(f"{sorted(counts)} records")
  except (
    *(OSError, ValueError, EOFError),
    *(LookupError, TypeError, AttributeError),
  ) as error:
    raise ValueError(
      f"{directory}: expected the files that its manifest describes, got"
      f" {type(error).__name__} ({error}); write the cache again"
    ) from error
  return Cache(tokens, ids)


def _decode_id(line: bytes) -> str:
  return line[:-1].decode()
