"""Opens compressed files: gzip, bzip2, xz and Zstandard, by their first bytes.

Names do not count: a download may lose its suffix, or keep it unpacked. What is
no text but an archive or a binary table is refused by its kind.
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

__all__ = ["BROKEN", "SUFFIXES", "kind", "opened", "unpacked", "variants"]

Path = str | os.PathLike

SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
"""What compressed files are named with."""

BROKEN = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
"""What reading raises where a compressed file is cut or damaged."""

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
"""Servers compress what is compressed once more; gzip can hold itself forever."""


def unpacked(name: str) -> str:
  """Returns the name of a file without the suffix of its compression.

  >>> unpacked("corpus.jsonl.zst"), unpacked("corpus.jsonl")
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


def kind(path: Path) -> str:
  """Returns the name of a file's compression, or "" for none."""
  with open(path, "rb") as stream:
    return _kind(stream.read(_PEEKED))


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
  """Opens a file for bytes, unpacked where its first bytes say so.

  Args:
    path: the file.

  Raises:
    ValueError: if it is an archive or a binary table, packed more than twice, or
      packed by what nothing installed unpacks.
  """
  with contextlib.ExitStack() as stack:
    stream: Any = stack.enter_context(open(path, "rb"))
    is_packed = False
    for _ in range(_MOST_LAYERS + 1):
      with _as_broken(is_packed):
        start = stream.peek(_PEEKED)
      if not (found := _kind(start)):
        break
      is_packed = True
      stream = stack.enter_context(_unpacking(path, found, stream))
    else:
      raise ValueError(
        f"{path}: expected a file compressed once, got {found} in {found} in"
        f" {found}: unpack it"
      )
    _refuse_others(path, start)
    with _as_broken(is_packed):
      yield stream


def _kind(start: bytes) -> str:
  for magic, name in _MAGIC.items():
    if start.startswith(magic):
      is_text = name == "bzip2" and not start[4:].startswith(_BLOCK)
      return "" if is_text else name
  return ""


def _unpacking(path: Path, name: str, stream: Any) -> Any:
  """Returns a stream of what one compressed stream holds."""
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
      f"{path}: expected what Python unpacks by itself, got {name}: pip install"
      " 'synthq_jax[parquet]', or unpack it (zstd -d)"
    ) from None
  return io.BufferedReader(pa.CompressedInputStream(stream, "zstd"))


@contextlib.contextmanager
def _as_broken(is_packed: bool) -> Iterator[None]:
  """Makes one of `BROKEN` of the bare OSError that bzip2 and zstd raise."""
  try:
    yield
  except OSError as error:
    if is_packed and type(error) is OSError and error.errno is None:
      raise EOFError("damaged") from None
    raise


def _refuse_others(path: Path, start: bytes) -> None:
  """Refuses what no reader of text reads, by its name."""
  found = next(
    (x for magic, x in _OTHERS.items() if start.startswith(magic)), ()
  )
  if start[257:262] == b"ustar":
    found = ("a tar archive", "unpack it")
  if found:
    raise ValueError(
      f"{path}: expected text, plain or compressed, got {found[0]}: {found[1]}"
    )
