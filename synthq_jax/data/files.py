"""Line-by-line reading of text files, plain or compressed, with clear errors.

Every error says file:line, what was expected and what to do. Files may be private,
so no error of a line, nor its cause, holds a key, a cell or a byte of it.
"""

import array
import codecs
import functools
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, AnyStr

from synthq_jax.data import compression
from synthq_jax.storage import artifacts

__all__ = [
  "BROKEN_GZIP",
  "LONGEST",
  "Lines",
  "bounded",
  "columns",
  "field",
  "find",
  "headed_table",
  "json_lines",
  "lines",
  "most_lines",
  "opened",
  "splits",
  "state",
  "table",
  "undecodable",
  "unsuffixed",
  "write_lines",
]

_KINDS = {str: "string", int: "number", float: "number"}
BROKEN_GZIP = compression.BROKEN
opened = compression.opened
LONGEST = 1 << 26
"""Bytes or characters of a line."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
Path = str | os.PathLike


def find(directory: Path, name: str) -> pathlib.Path:
  """Returns the path of a file in a directory, plain or compressed.

  Args:
    directory: an existing directory.
    name: the file name without .gz, .bz2, .xz or .zst.

  Returns:
    The path of the one that exists.

  Raises:
    ValueError: if none exists, or several do.
  """
  directory = pathlib.Path(directory)
  if not directory.is_dir():
    is_file = directory.is_file()
    raise ValueError(
      f"expected a directory, got {directory}:"
      f" {'a file' if is_file else 'no such directory'};"
      f" {'give the folder that it is in' if is_file else 'check the path'}"
    )
  paths = [directory / each for each in compression.variants(name)]
  found = [path for path in paths if path.is_file()]
  if len(found) == 1:
    return found[0]
  if found:
    raise ValueError(
      f"{directory}: expected one of {' and '.join(path.name for path in found)},"
      " got both; remove the one that is out of date"
    )
  there = ", ".join(sorted(path.name for path in directory.iterdir())[:8])
  raise ValueError(
    f"{directory}: expected a file {name} or {name}.gz, got "
    f"{there or 'an empty directory'}; add it or check the path"
  )


def unsuffixed(name: str, *suffixes: str) -> str | None:
  """Returns `name` without one of the suffixes, or None if it has none.

  >>> unsuffixed("test.tsv.gz", ".tsv", ".tsv.gz")
  'test'
  """
  for suffix in sorted(suffixes, key=len, reverse=True):
    if name.endswith(suffix) and len(name) > len(suffix):
      return name[: -len(suffix)]
  return None


def splits(directory: Path, prefix: str = "") -> list[str]:
  """Returns the splits that a folder has judgements of.

  Args:
    directory: with files PREFIXsplit.tsv, plain or compressed.
    prefix: what stands before the name of a split.

  Returns:
    Their names, sorted.

  Raises:
    ValueError: if there is no such folder, or no such file.
  """
  directory = pathlib.Path(directory)
  if not directory.is_dir():
    raise ValueError(
      f"{directory}: expected a folder with {prefix}SPLIT.tsv files, got none;"
      " add judgements"
    )
  names = sorted(path.name for path in directory.glob(f"{prefix}*"))
  found = {
    unsuffixed(name.removeprefix(prefix), *compression.variants(".tsv"))
    for name in names
    if not name.startswith(".")
  }
  known = sorted(split for split in found if split is not None)
  if not known:
    raise ValueError(
      f"{directory}: expected {prefix}SPLIT.tsv files, got"
      f" {names[:8] or 'none'}; add judgements"
    )
  return known


def state(path: Path) -> tuple[int, int]:
  """Returns when a file was written last and its size, by which another is known."""
  found = os.stat(path)
  return found.st_mtime_ns, found.st_size


def lines(path: Path) -> Iterator[tuple[str, str]]:
  """Yields the lines of a UTF-8 text file that are not blank.

  Whether the file is compressed is seen from its first bytes. A line ends with
  a line feed and nothing else (Unicode has more separators, which text holds).
  A byte order mark before the first line is no part of it, and neither is a
  carriage return at the end of any.

  Args:
    path: the file.

  Yields:
    Where the line stands, as "path:number", and its text without line ends.

  Raises:
    ValueError: if the file is missing, not UTF-8 or not soundly compressed, or a
      line further down begins with a byte order mark.
  """
  number, name = 0, str(path)
  try:
    with opened(path) as stream:
      for number, raw in enumerate(bounded(stream, path), 1):
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
      f"{path}:{number + 1}: expected sound {compression.kind(path)}, got an end"
      f" or an error in the middle ({type(error).__name__}); copy the file again"
    ) from error


def bounded(stream: IO[AnyStr], path: Path) -> Iterator[AnyStr]:
  """Yields the lines of a stream, and refuses one that would fill the memory.

  A megabyte of gzip may hold a line of a gigabyte.

  Args:
    stream: of bytes or text.
    path: the file it reads, for the message.

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


def most_lines(path: Path) -> int:
  """Returns how many lines a file may have, whichever sign ends them.

  No line is decoded: gigabytes take seconds.

  Args:
    path: the file, plain or compressed.

  Raises:
    OSError: if there is no such file; EOFError or zlib.error if its gzip is not
      sound.
  """
  with opened(path) as stream:
    return 1 + sum(map(_ends, _blocks(stream)))


def undecodable(path: Path) -> int:
  """Returns the number of the first line that is not UTF-8; 0: all are.

  For readers that decode ahead of the line they are at. A line ends with either
  sign, or both.

  Args:
    path: the file, plain or compressed.
  """
  decoder = codecs.getincrementaldecoder("utf-8")()
  number, last = 1, b""
  with opened(path) as stream:
    for block in itertools.chain(_blocks(stream), [b""]):
      try:
        decoder.decode(block, final=not block)
      except UnicodeDecodeError as error:  # it has what was left over, too
        good = error.object[: error.start]
        return number + _ends(last + good) - _ends(last)
      number += _ends(last + block) - _ends(last)
      last = block[-1:]
  return 0


def _blocks(stream: Any) -> Iterator[bytes]:
  return iter(functools.partial(stream.read, 1 << 20), b"")


def _ends(block: bytes) -> int:
  """Counts the ends of lines, whichever sign makes them."""
  count = block.count
  return count(b"\n") + count(b"\r") - count(b"\r\n")


def _decode(raw: bytes, where: str, first: bool) -> str:
  """Decodes one line, without its end and a byte order mark."""
  if first:
    raw = raw.removeprefix(_BYTE_ORDER_MARK)
  if raw.startswith(_BYTE_ORDER_MARK):  # it would become part of an id
    raise ValueError(
      f"{where}: expected a byte order mark at the start of the file only, got"
      " one here; files were put together: remove it"
    )
  try:
    return raw.decode("utf-8").rstrip("\r\n")
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{where}: expected UTF-8, got another byte at position {error.start};"
      " convert the file (iconv -t utf-8)"
    ) from None


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields the objects of a JSONL file, each with its "path:number".

  Args:
    path: the file, one JSON object a line, plain or compressed.

  Yields:
    Where the object stands, and the object.

  Raises:
    ValueError: if a line is not a JSON object; see also `lines`.
  """
  for where, text in lines(path):
    try:
      value = json.loads(text)
    except (ValueError, RecursionError) as error:
      raise ValueError(
        f"{where}: expected one JSON object a line, got other text ({error});"
        " correct or remove the line"
      ) from None
    if not isinstance(value, dict):
      raise ValueError(
        f"{where}: expected a JSON object, got a {type(value).__name__}; "
        'write {"name": value, ...}'
      )
    if "\\ud" in text or "\\uD" in text:
      _refuse_half_characters(where, value)
    yield where, value


def _refuse_half_characters(where: str, value: dict[str, Any]) -> None:
  """Refuses halves of surrogate pairs, which JSON can spell and UTF-8 not."""
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
  """Returns what stands under a key of a JSON object, if it is of its kind.

  >>> field("log:1", {"id": 3}, "id", (int, str)), field("", {}, "a", default="")
  (3, '')

  Args:
    where: "path:number", for the message.
    line: the object.
    key: its key.
    kind: a type, or several; a boolean is of none.
    **default: what stands for a missing key or null; without it that is refused.

  Raises:
    ValueError: if something else stands there.
  """
  value = line.get(key)
  value = default.get("default") if value is None else value
  if not isinstance(value, kind) or isinstance(value, bool):
    kinds = kind if isinstance(kind, tuple) else (kind,)
    names = " or ".join(_KINDS.get(each, each.__name__) for each in kinds)
    # Texts may be private, and keys are texts where a table has no header.
    shown = "None" if value is None else type(value).__name__
    raise ValueError(
      f'{where}: expected a {names} under "{key}", got {shown} among'
      f" {len(line)} keys; correct the line, or add the header"
    )
  return value


def table(path: Path, columns: int) -> Iterator[tuple[str, list[str]]]:
  """Yields the rows of a tab-separated file, each with its "path:number".

  Args:
    path: the file, plain or compressed.
    columns: how many columns each row has.

  Yields:
    Where the row stands, and its cells.

  Raises:
    ValueError: if a row has another number of columns; see also `lines`.
  """
  said = f"{columns} columns separated by tabs, got {{}}"
  yield from _cells(path, "\t", columns, said)


def columns(path: Path, form: str) -> Iterator[tuple[str, list[str]]]:
  """Yields the rows of a file whose columns are separated by white space.

  Args:
    path: the file, plain or compressed.
    form: names of the columns, such as "query Q0 document rank score tag".

  Yields:
    Where the row stands, and its cells.

  Raises:
    ValueError: if a row has another number of columns; see also `lines`.
  """
  said = f"{form!r}, got {{}} columns"
  yield from _cells(path, None, len(form.split()), said)


def _cells(
  path: Path, separator: str | None, number: int, said: str
) -> Iterator[tuple[str, list[str]]]:
  """Yields rows of so many cells; `said` has a place for another number."""
  for where, text in lines(path):
    cells = text.split(separator)
    if len(cells) != number:
      raise ValueError(
        f"{where}: expected {said.format(len(cells))}; correct the line"
      )
    yield where, cells


def headed_table(
  path: Path, header: Sequence[str]
) -> Iterator[tuple[str, list[str]]]:
  """Yields the rows of a `table` below its header.

  Args:
    path: as in `table`.
    header: what its first row must be.

  Raises:
    ValueError: if the header is missing; see also `table`.
  """
  rows = table(path, columns=len(header))
  where, first = next(rows, (f"{path}:1", []))
  if first != list(header):
    raise ValueError(
      f"{where}: expected the header {' '.join(header)} separated by tabs, "
      "got another line; add it"
    )
  yield from rows


class Lines(Sequence):
  """Lines of a plain file by position, read when they are asked for."""

  def __init__(self, path: Path, read: Callable[[bytes], Any]):
    """Finds where the lines begin, which reads the file once.

    Args:
      path: the file, not gzipped; nothing may change it.
      read: makes what is returned out of a line.
    """
    self._path, self._read = path, read
    with open(path, "rb") as stream:
      lengths = map(len, stream)
      self._starts = array.array("q", itertools.accumulate(lengths, initial=0))
    self._starts.pop()  # the end of the file

  def __len__(self) -> int:
    return len(self._starts)

  def __getitem__(self, position: Any) -> Any:
    """Returns what `read` makes of a line, or of each line of a slice."""
    if isinstance(position, slice):
      return self.at(range(len(self))[position])
    return self.at([position])[0]

  def at(self, positions: Iterable[int]) -> list[Any]:
    """Reads several lines, in this order, in one opening of the file."""
    values = []
    with open(self._path, "rb") as stream:
      for position in positions:
        stream.seek(self._starts[position])
        values.append(self._read(stream.readline()))
    return values


def write_lines(path: Path, texts: Iterable[str]) -> None:
  """Writes lines to a plain file, which appears only when it is complete."""
  with artifacts.replacing(path) as stream:
    stream.writelines(f"{text}\n".encode() for text in texts)
