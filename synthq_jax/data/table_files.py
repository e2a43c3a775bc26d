"""Reads rows of tables as logs come: CSV, TSV, JSONL, parquet, Arrow.

Each row is a mapping with the name of the place where it stands, whatever the
file; those of text may be compressed. The header of a CSV or TSV file says what
separates its cells: without the sign of its suffix, a semicolon, tab, comma or bar. A folder stands for all tables in it, as
Hugging Face's `datasets` saves them; a row then has the split it lies in.
"""

import contextlib
import csv
import io
import itertools
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from synthq_jax import extras
from synthq_jax.data import compression, files, quoting

__all__ = [
  "SUFFIXES",
  "OfFile",
  "by_column",
  "check",
  "columns",
  "find_separator",
  "most_rows",
  "rows",
  "splits",
]

_Rows = Iterator[tuple[str, dict[str, Any]]]
_MOST = 1 << 26
"""Characters of a cell: a document may stand in one."""
_DESCRIPTIONS = ("dataset_info.json", "dataset_dict.json", "state.json")


class OfFile(str):
  """The split of a row whose file or folder names it, and no column."""


def rows(path: str | os.PathLike, quotes: str = "auto") -> _Rows:
  """Yields where each row stands, and its values by the name of their column.

  Args:
    path: a file of one of `SUFFIXES`, with a header where the format has one;
      or a folder of such files, but for hidden ones. There a row gets the key
      "split", if it has none, an `OfFile`: the name of the file's folder below
      `path`, if it is not "data", or what stands before the first "-" of the
      file's name.
    quotes: what quotation marks of a TSV file are, see `quoting.is_quoted`.

  Raises:
    ValueError: if there is no such file, its kind is not known, what reads it is
      not installed or a row is malformed; the message says where.
  """
  path = pathlib.Path(path)
  if not path.is_dir():
    yield from _read(path, quotes)
    return
  for split, file in _tables(path):
    for where, row in _read(file, quotes):
      yield where, {"split": OfFile(split), **row}


def check(path: str | os.PathLike) -> None:
  """Refuses what `rows` would by its name alone; nothing is read."""
  path = pathlib.Path(path)
  if path.is_dir():
    next(_tables(path))
  else:
    _reader(path)


def columns(path: str | os.PathLike) -> tuple[str, list[str]]:
  """Returns the place and the names of the columns of a table's first row.

  Of a CSV or TSV file it reads the header alone; of a folder, the first file.

  Args:
    path: as in `rows`.

  Returns:
    "path:number" and the names; none for a table without a row.

  Raises:
    ValueError: as in `rows`.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    path = next(_tables(path))[1]
  read = _reader(path)
  if _suffix(path) not in _USUAL:
    return next(((where, list(row)) for where, row in read(path)), ("", []))
  with _text_rows(path, _USUAL[_suffix(path)], csv.QUOTE_MINIMAL) as reader:
    return f"{path}:1", list(reader.fieldnames or ())


def find_separator(header: str, usual: str) -> str:
  """Returns the sign that separates the cells of a header.

  Formal guarantee: a function of the header alone, so of no record.

  >>> find_separator('a;"b, c"', ","), find_separator("a;b,c", ",")
  (';', ',')

  Args:
    header: the first line.
    usual: the sign of the file's suffix, which wins where it is there.
  """
  outside = re.sub(r'"[^"]*"', "", header)
  if usual in outside:
    return usual
  return max((usual, *";\t,|"), key=outside.count)


def splits(path: str | os.PathLike) -> list[str]:
  """Returns the splits that a folder's files name, also those without a row.

  They are none for a file. Errors are those of `rows`.
  """
  path = pathlib.Path(path)
  return sorted({split for split, _ in _tables(path)}) if path.is_dir() else []


def most_rows(path: str | os.PathLike) -> int:
  """Returns how many rows a table may have: what its file says, else its lines.

  Args:
    path: as in `rows`.

  Raises:
    Exception: what the readers of files raise, where it is no table.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    return sum(most_rows(file) for _, file in _tables(path))
  suffix = _suffix(path)
  if suffix == ".parquet":
    with extras.required("parquet"):
      from pyarrow import parquet

    return parquet.read_metadata(path).num_rows
  if suffix == ".arrow":
    return sum(batch.num_rows for batch in _arrow_batches(path))
  return files.most_lines(path)


def by_column(path: str | os.PathLike, named: Sequence[str | None]) -> bool:
  """Says whether a column "split" names the split of each row.

  A function of which rows have the column, not of the splits that they name.

  >>> by_column("log", ["train", "train"]), by_column("log", [None])
  (True, False)

  Args:
    path: for the message.
    named: what stands in the column in each row, "" for nothing; None where the
      row has no such column.

  Raises:
    ValueError: if some rows name their split and some do not, or one is no name
      for a file.
  """
  own = [x for x in named if x is not None and not isinstance(x, OfFile)]
  if own and not (len(own) == len(named) and all(own)):
    raise ValueError(
      f'{path}: expected "split" in all lines or in none, got it in some: fill'
      " it, or leave the column out"
    )
  if not all(re.fullmatch(r"[\w.-]+", each) for each in own):
    raise ValueError(
      f'{path}: expected names of splits under "split" (letters, digits, ".",'
      ' "_" and "-"), got another; correct them'
    )
  return bool(own)


def _tables(path: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
  """Yields the split and the path of each table in a folder."""
  found = [p for p in sorted(path.rglob("*")) if _suffix(p) and p.is_file()]
  found = [p for p in found if not _is_hidden(p.relative_to(path))]
  found = [p for p in found if p.name not in _DESCRIPTIONS and _is_saved(p)]
  kinds = {SUFFIXES[_suffix(file)]: _suffix(file) for file in found}
  if len(kinds) > 1:
    raise ValueError(
      f"{path}: expected tables of one kind, got"
      f" {' and '.join(sorted(kinds.values()))}: move away what is not to be"
      " read"
    )
  if not found:
    raise ValueError(
      f"{path}: expected tables ({', '.join(SUFFIXES)}) in the folder, got none:"
      " check the path"
    )
  for file in found:
    below = [
      part for part in file.relative_to(path).parts[:-1] if part != "data"
    ]
    yield below[0] if below else re.split(r"[-.]", file.name)[0], file


def _is_hidden(below: pathlib.Path) -> bool:
  """Says whether a file is a copy that an editor or a system keeps."""
  return any(part.startswith(".") for part in below.parts)


def _is_saved(file: pathlib.Path) -> bool:
  """Says whether an Arrow file belongs to the set that its folder describes.

  What `datasets` computed of a saved set lies beside it, as cache-*.arrow.
  """
  state = file.with_name("state.json")
  if file.suffix != ".arrow" or not state.is_file():
    return True
  try:
    saved = json.loads(state.read_bytes())["_data_files"]
    return file.name in {each["filename"] for each in saved}
  except (ValueError, LookupError, TypeError, RecursionError):
    raise ValueError(
      f"{state}: expected the names of a saved set's files under"
      ' "_data_files", got something else: save the set again'
    ) from None


def _suffix(path: pathlib.Path) -> str:
  """Returns the suffix that says how a file is read, or ""."""
  suffix = pathlib.Path(compression.unpacked(path.name)).suffix.lower()
  return suffix if suffix in SUFFIXES else ""


def _reader(path: pathlib.Path) -> Callable[[pathlib.Path], _Rows]:
  suffix = _suffix(path)
  if not path.is_file():
    raise ValueError(f"expected a table, got {path}: no such file")
  if not suffix:
    raise ValueError(
      f"{path}: expected a table ({', '.join(SUFFIXES)}), got another suffix:"
      " rename or convert it"
    )
  return SUFFIXES[suffix]


def _read(path: pathlib.Path, quotes: str) -> _Rows:
  read = _reader(path)
  if read is _TABBED and quoting.is_quoted(path, quotes):
    read = _separated("\t", csv.QUOTE_MINIMAL)
  return read(path)


def _separated(usual: str, marks: int) -> Callable[[pathlib.Path], _Rows]:
  def read(path: pathlib.Path) -> _Rows:
    with _text_rows(path, usual, marks) as reader:
      names = reader.fieldnames or ()
      if len({*names}) < len(names):  # the last would win
        raise ValueError(
          f"{path}:{reader.line_num}: expected each column once in the header,"
          " got one again; rename or remove it"
        )
      for row in reader:
        where = f"{path}:{reader.line_num}"
        if None in row or None in row.values():
          raise ValueError(
            f"{where}: expected {len(reader.fieldnames)} cells, as the header"
            " has, got another number; correct the line"
          )
        yield where, row

  return read


@contextlib.contextmanager
def _text_rows(
  path: pathlib.Path, usual: str, marks: int
) -> Iterator[csv.DictReader]:
  """Opens a table of text; explains what csv and the encoding refuse.

  Args:
    path: the table, plain or compressed.
    usual: what separates cells, unless the header shows another sign.
    marks: what quotation marks are where the usual sign separates; elsewhere they
      quote.
  """
  csv.field_size_limit(_MOST)
  with files.opened(path) as stream:
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    reader = None
    try:
      lines = files.bounded(text, path)
      header = next(lines, "")
      sign = find_separator(header, usual)
      reader = csv.DictReader(
        itertools.chain([header] if header else [], lines),
        delimiter=sign,
        quoting=marks if sign == usual else csv.QUOTE_MINIMAL,
        strict=True,
      )
      yield reader
    except UnicodeDecodeError:  # of text that was read ahead
      raise ValueError(
        f"{path}:{files.undecodable(path)}: expected UTF-8, got another byte;"
        " convert the file (iconv -t utf-8)"
      ) from None
    except (csv.Error, *files.BROKEN_GZIP) as error:
      number = reader.line_num + 1 if reader else 1
      raise ValueError(
        f"{path}:{number}: expected a table in UTF-8 with a"
        f" header, got {type(error).__name__}; correct the line"
      ) from None


def _parquet(path: pathlib.Path) -> _Rows:
  with extras.required("parquet"):
    from pyarrow import parquet

  with _explained(path), parquet.ParquetFile(path) as file:
    yield from _of_batches(path, file.iter_batches())


def _arrow(path: pathlib.Path) -> _Rows:
  with _explained(path):
    yield from _of_batches(path, _arrow_batches(path))


def _arrow_batches(path: pathlib.Path) -> Iterator[Any]:
  """Reads Arrow's stream format, in which `datasets` saves, or its files."""
  with extras.required("parquet"):
    from pyarrow import ipc

  with open(path, "rb") as stream:
    is_file = stream.read(6) == b"ARROW1"
    stream.seek(0)
    if not is_file:
      yield from ipc.open_stream(stream)
      return
    opened = ipc.open_file(stream)
    yield from map(opened.get_batch, range(opened.num_record_batches))


@contextlib.contextmanager
def _explained(path: pathlib.Path) -> Iterator[None]:
  """Says which file is no table."""
  try:
    yield
  except Exception as error:
    is_of_system = isinstance(error, OSError) and error.errno is not None
    is_of_arrow = "Arrow" in type(error).__name__
    if is_of_system or not (
      is_of_arrow or isinstance(error, (OSError, ValueError))
    ):
      raise
    raise ValueError(
      f"{path}: expected a table, got a damaged file ({type(error).__name__}):"
      " copy it again"
    ) from None


def _of_batches(path: pathlib.Path, batches: Any) -> _Rows:
  number = 0
  for batch in batches:
    for row in batch.to_pylist():
      number += 1
      yield f"{path}:{number}", row


_USUAL = {".csv": ",", ".tsv": "\t"}
"""Usual separators by the suffix of the file."""
_TABBED = _separated("\t", csv.QUOTE_NONE)

SUFFIXES: dict[str, Callable[[pathlib.Path], _Rows]] = {
  ".jsonl": files.json_lines,
  ".json": files.json_lines,
  ".csv": _separated(",", csv.QUOTE_MINIMAL),
  ".tsv": _TABBED,
  ".parquet": _parquet,
  ".arrow": _arrow,
}
"""How a file is read, by its suffix without that of a compression."""
