"""Token arrays on disk: fixed shapes, random access, a digest.

The form that training machines read: no TensorFlow is needed for it. A cache is
a folder with one .npy file for each token column, a text file for each column of
names, and a manifest, which is written last.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from synthq_jax.data import blocks, files
from synthq_jax.storage import artifacts

__all__ = ["Cache", "Writer", "load", "verify", "writing"]

_FORMAT = 1
_MANIFEST = "manifest.json"
_HEADER_BYTES = 128
_SMALL = 1 << 16
"""Vocabularies up to this size need two bytes a token."""


@dataclasses.dataclass(frozen=True)
class Cache:
  """A finished cache, as `load` opens it.

  Attributes:
    directory: where it lies.
    columns: tokens, by the name of the column.
    names: strings such as ids, by the name of the column.
    digest: SHA-256 of all tokens and names, in hexadecimal. Whoever holds it
      can test a guess of the whole content: for private records keep it private.
    facts: what the writer noted.
  """

  directory: pathlib.Path
  columns: Mapping[str, blocks.Rows]
  names: Mapping[str, files.Lines]
  digest: str
  facts: Mapping[str, Any]

  def __len__(self) -> int:
    return len(next(iter(self.columns.values())))

  def take(
    self, rows: Int[np.ndarray, " record"]
  ) -> dict[str, Int[np.ndarray, "record length"]]:
    """Returns the tokens of some records.

    For a Poisson batch call `sampler.take(cache.columns, drawn)`, which marks
    the rows of padding.

    Args:
      rows: positions in [0, len(self)), in any order, possibly repeated.

    Returns:
      int32 tokens by column, padded with 0, rows in the order asked for.

    Raises:
      TypeError: if they are a drawn batch, which has rows of padding.
      ValueError: if a position is out of range.
    """
    rows = np.asarray(rows)
    if rows.size and not 0 <= rows.min() <= rows.max() < len(self):
      raise ValueError(
        f"expected rows below {len(self)}, got {rows.min()} to {rows.max()}:"
        f" sample from the {len(self)} records of {self.directory}, a Poisson"
        " batch by sampler.take(cache.columns, drawn)"
      )
    return {name: column[rows] for name, column in self.columns.items()}


class Writer:
  """Takes records block by block; made by `writing`."""

  def __init__(
    self,
    files_: contextlib.ExitStack,
    directory: pathlib.Path,
    lengths: Mapping[str, int],
    names: Sequence[str],
    dtype: str,
  ):
    """Opens the files of a new folder, which `files_` closes."""
    self._dtype, self._lengths, self._names = dtype, dict(lengths), list(names)
    self.num_records = 0
    paths = {name: directory / f"{name}.npy" for name in lengths}
    paths |= {name: directory / f"{name}.txt" for name in names}
    self._streams = {
      name: files_.enter_context(open(path, "wb"))
      for name, path in paths.items()
    }
    self._hashes = {name: hashlib.sha256() for name in paths}
    for name in lengths:
      self._streams[name].write(self._header(name))

  def append(
    self,
    tokens: Mapping[str, Int[np.ndarray, "record length"]],
    names: Mapping[str, Sequence[str]] | None = None,
  ) -> None:
    """Adds records to the end.

    Args:
      tokens: every column, padded with 0.
      names: every column of names.

    Raises:
      ValueError: if a column is missing or too many, has another shape, or holds
        a number that is no token.
    """
    names = names or {}
    count = len(next(iter(tokens.values()), ()))
    self._check(tokens, names, count)
    for name, rows in tokens.items():
      self._write(name, np.ascontiguousarray(rows, self._dtype).data)
    for name, texts in names.items():
      self._write(name, "".join(f"{text}\n" for text in texts).encode())
    self.num_records += count

  def _write(self, name: str, content: Any) -> None:
    self._hashes[name].update(content)
    self._streams[name].write(content)

  def _check(self, tokens, names, count) -> None:
    """Refuses blocks that do not fit."""
    given = (tokens.keys(), names.keys())
    if given != (self._lengths.keys(), set(self._names)):
      raise ValueError(
        f"expected the columns {sorted(self._lengths)} and the names"
        f" {sorted(self._names)}, got {sorted(tokens)} and {sorted(names)}"
      )
    top = np.iinfo(self._dtype).max
    for name, rows in tokens.items():
      shape, expected = np.shape(rows), (count, self._lengths[name])
      if shape != expected:
        raise ValueError(
          f"expected tokens of shape {expected} in column {name!r}, got {shape}"
        )
      if rows.size and not 0 <= np.min(rows) <= np.max(rows) <= top:
        raise ValueError(
          f"expected tokens from 0 to {top} in column {name!r}, got"
          f" {np.min(rows)} to {np.max(rows)}: state the vocab_size they are of"
        )
    for name, texts in names.items():
      if len(texts) != count or any("\n" in text for text in texts):
        raise ValueError(
          f"expected {count} names without line feeds in column {name!r}, got"
          f" {len(texts)}: give each record one"
        )

  def finish(self) -> dict[str, Any]:
    """Completes the headers, makes the files durable, returns the manifest."""
    for name in self._lengths:
      self._streams[name].seek(0)
      self._streams[name].write(self._header(name))
    for stream in self._streams.values():
      stream.flush()
      os.fsync(stream.fileno())
    digests = {name: hash_.hexdigest() for name, hash_ in self._hashes.items()}
    columns = {
      name: {"length": length, "dtype": self._dtype, "sha256": digests[name]}
      for name, length in self._lengths.items()
    }
    body = {
      "format": _FORMAT,
      "num_records": self.num_records,
      "columns": columns,
      "names": {name: digests[name] for name in self._names},
    }
    return {**body, "digest": _digest(body)}

  def _header(self, name: str) -> bytes:
    """Returns a .npy header, as long for any number of records."""
    shape = (self.num_records, self._lengths[name])
    text = repr({"descr": self._dtype, "fortran_order": False, "shape": shape})
    body = text.ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body


@contextlib.contextmanager
def writing(
  directory: str | os.PathLike,
  lengths: Mapping[str, int],
  *,
  vocab_size: int,
  names: Sequence[str] = (),
  facts: Mapping[str, Any] | None = None,
) -> Iterator[Writer]:
  """Writes a new cache in one pass that holds one block in memory.

  The folder appears when the `with` block ends without an exception, complete;
  until then a hidden one beside it grows. Tokens take two bytes where the
  vocabulary allows it: 8.8 million passages of 384 tokens are 6.8 GB.

  >>> import tempfile
  >>> place = pathlib.Path(tempfile.mkdtemp()) / "cache"
  >>> with writing(place, {"inputs": 3}, vocab_size=100, names=["ids"]) as made:
  ...   made.append({"inputs": np.array([[5, 1, 0]])}, {"ids": ["d1"]})
  >>> load(place).take(np.array([0]))["inputs"]
  array([[5, 1, 0]], dtype=int32)

  Args:
    directory: a folder that does not exist yet.
    lengths: tokens of a record, for each column; at least one column.
    vocab_size: every token is below it.
    names: columns of strings, such as ids.
    facts: noted in the manifest: JSON values that say where records are from.

  Yields:
    The writer.

  Raises:
    ValueError: if the folder exists, or there is no column.
  """
  if not lengths or min(lengths.values()) < 1:
    raise ValueError(
      f"expected columns of at least one token, got lengths={dict(lengths)}"
    )
  _check_columns([*lengths, *names])
  dtype = "<u2" if vocab_size <= _SMALL else "<i4"
  with artifacts.new_folder(directory, "cache") as folder:
    with contextlib.ExitStack() as stack:
      writer = Writer(stack, folder, lengths, names, dtype)
      yield writer
      manifest = {
        **writer.finish(),
        "facts": dict(facts or {}),
        "bytes": {n: (folder / f"{n}.txt").stat().st_size for n in names},
      }
    text = json.dumps(manifest, indent=2)
    artifacts.write_atomically(folder / _MANIFEST, text)


def _check_columns(columns: Sequence[str]) -> None:
  """Refuses names that are no names of files, or of the same file."""
  plain = all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in columns)
  if not plain or len(set(columns)) < len(columns):
    raise ValueError(
      "expected names of files as distinct columns, of lower-case letters,"
      f" digits and _, got {list(columns)}"
    )


def load(directory: str | os.PathLike) -> Cache:
  """Opens a finished cache; tokens are read where they are used.

  Args:
    directory: of a cache that `writing` made.

  Returns:
    The cache.

  Raises:
    ValueError: if there is none, it is of another format, or a file of it is
      shorter or longer than it was.
  """
  directory = pathlib.Path(directory)
  manifest = _manifest(directory)
  try:
    for name, size in manifest.get("bytes", {}).items():
      blocks.check_size(directory / f"{name}.txt", size)
    cache = Cache(
      directory,
      {
        n: blocks.Rows([directory / f"{n}.npy"], dtype=np.int32, mapped=False)
        for n in manifest["columns"]
      },
      {
        n: files.Lines(directory / f"{n}.txt", _name) for n in manifest["names"]
      },
      manifest["digest"],
      manifest["facts"],
    )
    expected = {n: c["length"] for n, c in manifest["columns"].items()}
    num_records = manifest["num_records"]
  except (
    *(OSError, ValueError, EOFError),
    *(LookupError, TypeError, AttributeError),
  ) as error:
    raise ValueError(
      f"{directory}: expected the files that its manifest names, got"
      f" {type(error).__name__} ({error}); write the cache again"
    ) from error
  found = {n: c.shape[1] for n, c in cache.columns.items()}
  counts = {len(c) for c in (*cache.columns.values(), *cache.names.values())}
  if counts != {num_records} or found != expected:
    raise ValueError(
      f"{directory}: expected {num_records} records in every file,"
      f" got {sorted(counts)}; write the cache again"
    )
  return cache


def verify(directory: str | os.PathLike) -> None:
  """Reads a whole cache and compares it with its digest.

  Args:
    directory: of the cache.

  Raises:
    ValueError: if a file is not what was written.
  """
  directory = pathlib.Path(directory)
  manifest = _manifest(directory)
  load(directory)
  found = json.loads(json.dumps(manifest))
  for name, column in found["columns"].items():
    column["sha256"] = _sha256(directory / f"{name}.npy", _HEADER_BYTES)
  for name in found["names"]:
    found["names"][name] = _sha256(directory / f"{name}.txt")
  for name in ("digest", "facts", "bytes"):
    found.pop(name, None)
  if _digest(found) != manifest["digest"]:
    raise ValueError(
      f"{directory}: expected content with the digest of its manifest, got"
      " another: a file was changed or damaged; write the cache again"
    )


def _manifest(directory: pathlib.Path) -> dict[str, Any]:
  path = directory / _MANIFEST
  try:
    manifest = artifacts.unsealed(path.read_bytes())
  except (OSError, ValueError) as error:
    raise ValueError(
      f"{path}: expected the manifest of a token cache, got"
      f" {type(error).__name__}: it was not written to its end, or is elsewhere"
    ) from error
  if manifest.get("format") != _FORMAT:
    raise ValueError(
      f"{path}: expected a token cache of format {_FORMAT}, got another file;"
      " write the cache again"
    )
  return manifest


def _digest(body: Mapping[str, Any]) -> str:
  text = json.dumps(body, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def _sha256(path: pathlib.Path, start: int = 0) -> str:
  with open(path, "rb") as stream:
    stream.seek(start)
    return hashlib.file_digest(stream, "sha256").hexdigest()


def _name(line: bytes) -> str:
  return line[:-1].decode()
