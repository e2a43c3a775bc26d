"""Opens files that gzip, bzip2, xz or Zstandard have compressed, or plain files.

The first bytes tell the compression, not the name: a download may lose its suffix,
or keep it after unpacking. Archives and binary tables are refused.
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
_BLOCK = (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")  # of bzip2, from its byte 4
_OTHERS = {
  b"PAR1": ("a parquet table", "name it .parquet"),
  b"ARROW1\x00": ("an Arrow table", "name it .arrow"),
  b"PK\x03\x04": ("a zip archive", "unpack it"),
  b"7z\xbc\xaf\x27\x1c": ("a 7z archive", "unpack it"),
  b"\x04\x22\x4d\x18": ("LZ4", "unpack it (lz4 -d)"),
}
_PEEKED = 512
_MOST_LAYERS = 2
"""Number of nested compressions that are opened.

Servers compress compressed files again, and a gzip file can contain itself."""


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
    return _find_kind(stream.read(_PEEKED))


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[Any]:
  """Opens a file for reading bytes, decompressed if its first bytes ask for it.

  Args:
    path: the file.

  Raises:
    ValueError: if the file is an archive or a binary table, is compressed more
      than twice, or no installed package can decompress it.
  """
  with contextlib.ExitStack() as stack:
    stream: Any = stack.enter_context(open(path, "rb"))
    is_packed = False
    for _ in range(_MOST_LAYERS + 1):
      with _raise_as_broken(is_packed):
        start = stream.peek(_PEEKED)
      if not (compression := _find_kind(start)):
        break
      is_packed = True
      stream = stack.enter_context(_decompress(path, compression, stream))
    else:
      raise ValueError(
        f"{path}: expected a file compressed once, got {compression} in {compression} in"
        f" {compression}: unpack it"
      )
    _refuse_others(path, start)
    with _raise_as_broken(is_packed):
      yield stream


def _find_kind(start: bytes) -> str:
  for magic, name in _MAGIC.items():
    if start.startswith(magic):
      is_text = name == "bzip2" and not start[4:].startswith(_BLOCK)
      return "" if is_text else name
  return ""


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


@contextlib.contextmanager
def _raise_as_broken(is_packed: bool) -> Iterator[None]:
  """Turns the bare OSError that bzip2 and zstd raise into one of `BROKEN`."""
  try:
    yield
  except OSError as error:
    if is_packed and type(error) is OSError and error.errno is None:
      raise EOFError("damaged") from None
    raise


def _refuse_others(path: Path, start: bytes) -> None:
  """Refuses archives and binary tables; the error names their kind."""
  other = next(
    (x for magic, x in _OTHERS.items() if start.startswith(magic)), ()
  )
  if start[257:262] == b"ustar":
    other = ("a tar archive", "unpack it")
  if other:
    raise ValueError(
      f"{path}: expected text, plain or compressed, got {other[0]}: {other[1]}"
    )
