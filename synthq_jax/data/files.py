"""Reads text files line by line, plain or compressed, with clear errors.

Every error names file:line, the expected content and a remedy. Files may be
private, so no error of a line, nor its cause, holds a key, a cell or a byte of it.
The first bytes tell a compression, not the name: a download may lose its suffix,
or keep it after unpacking.
"""

import array
import bz2
import contextlib
import gzip
import io
import itertools
import json
import lzma
import os
import pathlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, AnyStr

from synthq_jax import extras
from synthq_jax.storage import artifacts

__all__ = [
  "BROKEN_GZIP",
  "CONVERT",
  "LONGEST",
  "WIDE",
  "Lines",
  "limit_lines",
  "columns",
  "field",
  "find",
  "get_kind",
  "json_lines",
  "lines",
  "get_max_lines",
  "open_file",
  "splits",
  "state",
  "table",
  "remove_suffix",
  "variants",
  "write_lines",
]

_KINDS = {str: "string", int: "number", float: "number"}
_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes of compressed files."""

BROKEN_GZIP = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
"""Errors that reading raises if a compressed file is truncated or damaged."""

_MAGIC = {
  b"\x1f\x8b": "gzip",
  b"BZh": "bzip2",
  b"\xfd7zXZ\x00": "xz",
  b"\x28\xb5\x2f\xfd": "Zstandard",
  # pzstd begins with a frame that readers skip.
  **{bytes((n, 0x2A, 0x4D, 0x18)): "Zstandard" for n in range(0x50, 0x60)},
}
_BLOCK = (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")  # of bzip2, from its byte 4
_PEEKED = 512
_OTHERS = {
  b"PAR1": "a parquet table: name it .parquet",
  b"ARROW1\0": "an Arrow table: name it .arrow",
  b"PK\3\4": "an archive or a workbook of Excel: unpack it, or save it as CSV",
  b"7z\xbc\xaf": "an archive: unpack it",
  b"\x04\x22\x4d\x18": "LZ4: unpack it (lz4 -d)",
}
LONGEST = 1 << 26
"""Longest line that is read, in bytes or characters."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
WIDE = (
  "expected UTF-8, got zero bytes, as UTF-16 has; convert the file (iconv -f"
  " utf-16 -t utf-8)"
)
"""Message about a text file whose first line holds a zero byte."""
CONVERT = (
  "convert the file (iconv -f windows-1252 -t utf-8, if Windows wrote it)"
)
"""Advice about a text file that is not UTF-8."""
Path = str | os.PathLike


def remove_suffix(name: str) -> str:
  """Removes the suffix of a compression from a file's name.

  >>> remove_suffix("corpus.jsonl.zst"), remove_suffix("corpus.jsonl")
  ('corpus.jsonl', 'corpus.jsonl')
  """
  path = pathlib.PurePath(name)
  packed = path.suffix.lower() in _SUFFIXES and path.name != path.suffix
  return name[: -len(path.suffix)] if packed else name


def variants(name: str) -> tuple[str, ...]:
  """Returns a file's name, plain and with the suffix of each compression.

  >>> variants("test.tsv")[:2]
  ('test.tsv', 'test.tsv.gz')
  """
  return name, *(f"{name}{suffix}" for suffix in _SUFFIXES)


def get_kind(path: Path) -> str:
  """Returns the name of a file's compression, or "" for none."""
  with open(path, "rb") as stream:
    return _find_kind(stream.peek(_PEEKED))


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[Any]:
  """Opens a file for reading bytes, decompressed if its first bytes ask for it.

  Args:
    path: the file.

  Raises:
    ValueError: if the file is no text, or no installed package can decompress it.
  """
  with open(path, "rb") as file:
    start = file.peek(_PEEKED)
    if not (name := _find_kind(start)):
      _refuse_others(path, start)
      yield file
      return
    try:
      with _decompress(path, name, file) as stream:
        _refuse_others(path, stream.peek(_PEEKED))
        yield stream
    except OSError as error:  # bzip2 and zstd raise a bare one
      if type(error) is OSError and error.errno is None:
        raise EOFError("damaged") from None
      raise


def _find_kind(start: bytes) -> str:
  for magic, name in _MAGIC.items():
    if start.startswith(magic):
      is_text = name == "bzip2" and not start[4:].startswith(_BLOCK)
      return "" if is_text else name
  return ""


def _refuse_others(path: Path, start: bytes) -> None:
  """Refuses what is no text, by the first bytes."""
  others = [
    other for magic, other in _OTHERS.items() if start.startswith(magic)
  ]
  if _find_kind(start):
    others = ["a file that was compressed twice: unpack it once"]
  if start[257:262] == b"ustar":
    others = ["a tar archive: unpack it"]
  if others:
    raise ValueError(
      f"{path}: expected text, plain or compressed, got {others[0]}"
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


def find(directory: Path, name: str) -> pathlib.Path:
  """Finds a file in a directory, plain or compressed.

  Args:
    directory: an existing directory.
    name: the file name without .gz, .bz2, .xz or .zst.

  Returns:
    The path of the existing file.

  Raises:
    ValueError: if no such file exists, or several do.
  """
  directory = pathlib.Path(directory)
  if not directory.is_dir():
    is_file = directory.is_file()
    raise ValueError(
      f"expected a directory, got {directory}:"
      f" {'a file' if is_file else 'no such directory'};"
      f" {'give the folder that holds it' if is_file else 'check the path'}"
    )
  paths = [directory / each for each in variants(name)]
  existing = [path for path in paths if path.is_file()]
  if len(existing) == 1:
    return existing[0]
  if existing:
    raise ValueError(
      f"{directory}: expected one of {' and '.join(path.name for path in existing)},"
      " got both; remove the one that is out of date"
    )
  content = ", ".join(sorted(path.name for path in directory.iterdir())[:8])
  raise ValueError(
    f"{directory}: expected a file {name} or {name}.gz, got "
    f"{content or 'an empty directory'}; add it or check the path"
  )


def splits(directory: Path, prefix: str = "") -> list[str]:
  """Returns the splits for which a folder has judgements.

  Args:
    directory: a folder with files PREFIXsplit.tsv, plain or compressed.
    prefix: the part of a file's name before the split.

  Returns:
    The names of the splits, sorted.

  Raises:
    ValueError: if the folder is missing, or holds no such file.
  """
  directory = pathlib.Path(directory)
  if not directory.is_dir():
    raise ValueError(
      f"{directory}: expected a folder with {prefix}SPLIT.tsv files, got none;"
      " add judgements"
    )
  names = sorted(path.name for path in directory.glob(f"{prefix}*"))
  plain = {remove_suffix(name.removeprefix(prefix)) for name in names}
  tables = [pathlib.PurePath(name) for name in plain if name[:1] != "."]
  splits_ = sorted(path.stem for path in tables if path.suffix == ".tsv")
  if not splits_:
    is_hub = any(".jsonl" in name or ".parquet" in name for name in names)
    raise ValueError(
      f"{directory}: expected {prefix}SPLIT.tsv files, got"
      f" {names[:8] or 'none'}; add judgements"
      + ", or name the set hf:DIR, as mteb's sets are"
      * is_hub
    )
  return splits_


def state(path: Path) -> tuple[int, int]:
  """Returns (mtime in ns, size in bytes), which callers compare to detect a
  change."""
  status = os.stat(path)
  return status.st_mtime_ns, status.st_size


def lines(path: Path) -> Iterator[tuple[str, str]]:
  """Yields the lines of a UTF-8 text file that are not blank.

  The first bytes tell whether the file is compressed. Only a line feed ends a
  line, since texts may hold Unicode's other separators. A byte order mark before
  the first line and carriage returns at the end of lines are dropped.

  Args:
    path: the file.

  Yields:
    The line's position, as "path:number", and its text without line end.

  Raises:
    ValueError: if the file is missing, not UTF-8 or not soundly compressed, or a
      line after the first begins with a byte order mark.
  """
  number, name = 0, str(path)
  try:
    with open_file(path) as stream:
      for number, raw in enumerate(limit_lines(stream, path), 1):
        where = f"{name}:{number}"
        text = _decode(raw, where, first=number == 1)
        if text and not text.isspace():
          yield where, text
  except FileNotFoundError as error:
    raise ValueError(
      f"expected a file, got {path}: no such file; check the path"
    ) from error
  except BROKEN_GZIP as error:
    raise ValueError(
      f"{path}:{number + 1}: expected sound {get_kind(path)}, got an end"
      f" or an error in the middle ({type(error).__name__}); copy the file again"
    ) from error


def limit_lines(stream: IO[AnyStr], path: Path) -> Iterator[AnyStr]:
  """Yields the lines of a stream and refuses one that would fill the memory.

  A megabyte of gzip may hold a line of a gigabyte.

  Args:
    stream: a stream of bytes or text.
    path: the file of the stream, for the message.

  Raises:
    ValueError: at a line above 64 Mi bytes or characters.
  """
  number = 0
  while line := stream.readline(LONGEST + 1):
    number += 1
    if len(line) > LONGEST:
      raise ValueError(
        f"{path}:{number}: expected lines of at most {LONGEST:,} characters,"
        " got a longer one; divide it"
      )
    yield line


def get_max_lines(path: Path) -> int:
  """Returns an upper bound of a file's number of lines, for any kind of line end.

  No line is decoded, so that gigabytes take seconds.

  Args:
    path: the file, plain or compressed.

  Raises:
    OSError: if the file is missing.
    EOFError: if its gzip is not sound; or zlib.error.
  """
  ends = 1
  with open_file(path) as stream:
    while block := stream.read(1 << 20):
      count = block.count
      ends += count(b"\n") + count(b"\r") - count(b"\r\n")
  return ends


def _decode(raw: bytes, where: str, first: bool) -> str:
  """Decodes one line without its line end and the file's byte order mark."""
  if first:
    raw = raw.removeprefix(_BYTE_ORDER_MARK)
  if first and b"\0" in raw:  # would decode as UTF-8, in queries of nothing
    raise ValueError(f"{where}: {WIDE}")
  if raw.startswith(_BYTE_ORDER_MARK):  # else it would become part of an id
    raise ValueError(
      f"{where}: expected a byte order mark at the start of the file only, got"
      " one here; files were put together: remove it"
    )
  try:
    return raw.decode("utf-8").rstrip("\r\n")
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{where}: expected UTF-8, got another byte at position {error.start};"
      f" {CONVERT}"
    ) from None


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields the objects of a JSONL file, each with its position.

  Args:
    path: the file, one JSON object a line, plain or compressed.

  Yields:
    The position, "path:number", and the object.

  Raises:
    ValueError: if a line is not a JSON object, or has a key twice; see also
      `lines`.
  """
  for where, text in lines(path):
    try:
      value = json.loads(text, object_pairs_hook=_make_object)
    except _RepeatedKeyError:
      raise ValueError(
        f"{where}: expected each key once, got one again, of which JSON readers"
        " keep the last; remove one"
      ) from None
    except (ValueError, RecursionError) as error:
      raise ValueError(
        f"{where}: expected one JSON object a line, got other text ({error});"
        " correct or remove the line, or write an object a line (jq -c)"
      ) from None
    if not isinstance(value, dict):
      raise ValueError(
        f"{where}: expected a JSON object, got a {type(value).__name__}; "
        'write {"name": value, ...} a line (a list by jq -c ".[]")'
      )
    if "\\ud" in text or "\\uD" in text:
      _refuse_half_characters(where, value)
    yield where, value


class _RepeatedKeyError(ValueError):
  """A JSON object has a key twice."""


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  value = dict(pairs)
  if len(value) < len(pairs):
    raise _RepeatedKeyError
  return value


def _refuse_half_characters(where: str, value: dict[str, Any]) -> None:
  """Refuses halves of surrogate pairs, which JSON can spell but UTF-8
  cannot."""
  try:
    json.dumps(value, ensure_ascii=False).encode()
  except UnicodeEncodeError:
    raise ValueError(
      f"{where}: expected whole characters, got half of one: the text was cut"
      " inside an emoji or the like; remove the half"
    ) from None


def field(
  where: str, line: Mapping[str, Any], key: str, kind: Any = str, **default: Any
) -> Any:
  """Returns the value under a key of a JSON object after checking its type.

  >>> field("log:1", {"id": 3}, "id", (int, str)), field("", {}, "a", default="")
  (3, '')

  Args:
    where: "path:number", for the message.
    line: the object.
    key: the key.
    kind: a type, or several; a boolean matches none of them.
    **default: `default=VALUE` replaces a missing key or null; without it these are
      refused.

  Raises:
    ValueError: if the value has another type.
  """
  value = line.get(key)
  value = default.get("default") if value is None else value
  if not isinstance(value, kind) or isinstance(value, bool):
    kinds = kind if isinstance(kind, tuple) else (kind,)
    names = " or ".join(_KINDS.get(each, each.__name__) for each in kinds)
    # Texts may be private, and keys are texts if a table has no header.
    shown = "None" if value is None else type(value).__name__
    raise ValueError(
      f'{where}: expected a {names} under "{key}", got {shown} among'
      f" {len(line)} keys; correct the line, or add the header"
    )
  return value


def table(path: Path, columns: int) -> Iterator[tuple[str, list[str]]]:
  """Yields the rows of a tab-separated file, each with its position.

  Args:
    path: the file, plain or compressed.
    columns: number of columns of each row.

  Yields:
    The position, "path:number", and the cells of the row.

  Raises:
    ValueError: if a row has another number of columns; see also `lines`.
  """
  expected = f"{columns} columns separated by tabs, got {{}}"
  yield from _read_cells(path, "\t", columns, expected)


def columns(path: Path, form: str) -> Iterator[tuple[str, list[str]]]:
  """Yields the rows of a file whose columns are separated by white space.

  Args:
    path: the file, plain or compressed.
    form: names of the columns, such as "query Q0 document rank score tag".

  Yields:
    The position, "path:number", and the cells of the row.

  Raises:
    ValueError: if a row has another number of columns; see also `lines`.
  """
  expected = f"{form!r}, got {{}} columns"
  yield from _read_cells(path, None, len(form.split()), expected)


def _read_cells(
  path: Path, separator: str | None, count: int, expected: str
) -> Iterator[tuple[str, list[str]]]:
  """Yields rows of `count` cells; `expected` is the message, with {} for the
  count."""
  for where, text in lines(path):
    cells = text.split(separator)
    if len(cells) != count and "\r" in text:
      raise ValueError(
        f"{where}: expected lines that end with a line feed, got a carriage"
        " return inside one; convert the file (tr '\\r' '\\n')"
      )
    if len(cells) != count:
      raise ValueError(
        f"{where}: expected {expected.format(len(cells))}; correct the line"
      )
    yield where, cells


class Lines(Sequence):
  """Reads single lines of a plain file by position, when they are asked for."""

  def __init__(self, path: Path, read: Callable[[bytes], Any]):
    """Indexes where the lines begin, which reads the file once.

    Args:
      path: the file, not compressed, which must not change.
      read: converts the bytes of a line to an item.
    """
    self._path, self._read = path, read
    with open(path, "rb") as stream:
      lengths = map(len, stream)
      self._starts = array.array("q", itertools.accumulate(lengths, initial=0))
    self._starts.pop()  # the end of the file

  def __len__(self) -> int:
    return len(self._starts)

  def __getitem__(self, position: Any) -> Any:
    """Returns the item of a line, or a list of items for a slice."""
    if isinstance(position, slice):
      return self.at(range(len(self))[position])
    return self.at([position])[0]

  def at(self, positions: Iterable[int]) -> list[Any]:
    """Reads several lines, in the order of `positions`, opening the file
    once."""
    values = []
    with open(self._path, "rb") as stream:
      for position in positions:
        stream.seek(self._starts[position])
        values.append(self._read(stream.readline()))
    return values


def write_lines(path: Path, texts: Iterable[str]) -> None:
  """Writes lines to a plain file, atomically."""
  with artifacts.replacing(path) as stream:
    stream.writelines(f"{text}\n".encode() for text in texts)
