"""Opens files that gzip, bzip2, xz or Zstandard have compressed, or plain files.

The first bytes tell the compression, not the name: a download may lose its suffix,
or keep it after unpacking.
"""

import bz2
import contextlib
import gzip
import io
import lzma
import os
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any

from synthq_jax import extras

__all__ = [
  "BROKEN",
  "SUFFIXES",
  "get_kind",
  "open_file",
  "remove_suffix",
  "variants",
]

Path = str | os.PathLike

SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes of compressed files."""

BROKEN = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
"""Errors that reading raises if a compressed file is truncated or damaged."""

_MAGIC = {
  b"\x1f\x8b": "gzip",
  b"BZh": "bzip2",
  b"\xfd7zXZ\x00": "xz",
  b"\x28\xb5\x2f\xfd": "Zstandard",
}


def remove_suffix(name: str) -> str:
  """Removes the suffix of a compression from a file's name.

  >>> remove_suffix("corpus.jsonl.zst"), remove_suffix("corpus.jsonl")
  ('corpus.jsonl', 'corpus.jsonl')
  """
  path = pathlib.PurePath(name)
  packed = path.suffix.lower() in SUFFIXES and path.name != path.suffix
  return name[: -len(path.suffix)] if packed else name


def variants(name: str) -> tuple[str, ...]:
  """Returns a file's name, plain and with the suffix of each compression.

  >>> variants("test.tsv")[:2]
  ('test.tsv', 'test.tsv.gz')
  """
  return name, *(f"{name}{suffix}" for suffix in SUFFIXES)


def get_kind(path: Path) -> str:
  """Returns the name of a file's compression, or "" for none."""
  with open(path, "rb") as stream:
    return _find_kind(stream)


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[Any]:
  """Opens a file for reading bytes, decompressed if its first bytes ask for it.

  Args:
    path: the file.

  Raises:
    ValueError: if no installed package can decompress the file.
  """
  with open(path, "rb") as file:
    if not (name := _find_kind(file)):
      yield file
      return
    try:
      with _decompress(path, name, file) as stream:
        yield stream
    except OSError as error:  # bzip2 and zstd raise a bare one
      if type(error) is OSError and error.errno is None:
        raise EOFError("damaged") from None
      raise


def _find_kind(stream: io.BufferedReader) -> str:
  start = stream.peek(max(map(len, _MAGIC)))
  return next(
    (_MAGIC[magic] for magic in _MAGIC if start.startswith(magic)), ""
  )


def _decompress(path: Path, name: str, stream: Any) -> Any:
  """Returns a stream of the decompressed bytes of a stream."""
  if name == "gzip":
    return gzip.GzipFile(fileobj=stream, mode="rb")
  if name == "bzip2":
    return bz2.BZ2File(stream)
  if name == "xz":
    return lzma.LZMAFile(stream)
  try:
    with extras.required("parquet"):
      import pyarrow as pa
  except extras.MissingExtraError:
    raise ValueError(
      f"{path}: expected a compression that Python supports, got {name}: pip install"
      " 'synthq_jax[parquet]', or unpack it (zstd -d)"
    ) from None
  return io.BufferedReader(pa.CompressedInputStream(stream, "zstd"))
