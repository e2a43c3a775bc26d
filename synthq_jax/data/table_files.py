"""Reads rows of tables in the formats of logs: CSV, TSV, JSONL, parquet, Arrow.

Each row is a mapping with its position, "path:number". Text files may be
compressed. The header of a CSV or TSV file determines its separator: the usual one
of its suffix, or else a semicolon, tab, comma or bar. A folder stands for all its
tables, as Hugging Face's `datasets` saves them; a row then has its table's split.
"""

import codecs
import contextlib
import csv
import datetime
import io
import itertools
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib import parse

from synthq_jax import extras
from synthq_jax.data import files, ids, quoting
from synthq_jax.storage import file_lists

__all__ = [
  "SUFFIXES",
  "FileSplit",
  "has_split_column",
  "check",
  "columns",
  "find_log_splits",
  "find_separator",
  "find",
  "get_max_rows",
  "is_json",
  "rows",
  "simplify",
  "splits",
]

_Rows = Iterator[tuple[str, dict[str, Any]]]
_SEP = re.compile(r'"?sep=(.)"?[\r\n]*', re.I)
"""First line by which Excel learns the separator of a CSV."""
_SPLIT = re.compile("train|test|dev|val|eval", re.I)
"""Beginning of a file's name that names a split, and no part of an export."""
_MOST = 1 << 26
"""Most characters of a cell, which may hold a whole document."""
_DESCRIPTIONS = ("dataset_info.json", "dataset_dict.json", "state.json")
_LAKES = ("_delta_log", ".hoodie", "metadata/*.metadata.json")
"""Files that list which files of a folder still count."""


class FileSplit(str):
  """The split of a row that the name of its file or folder gives, not a
  column."""


def rows(path: str | os.PathLike, quotes: str = "auto") -> _Rows:
  """Yields the position of each row, "path:number", and its values by column name.

  Args:
    path: a file of one of `SUFFIXES`, with a header if the format has one; or a
      folder of such files, except hidden ones. A row of a folder gets the key
      "split", if it has none, with a `FileSplit`: the name of the file's top
      folder below `path`, or else the part of the file's name before the first "-"
      or ".". Folders named "data" do not count. A folder named "clicks=0", as Spark
      writes partitions, is a column and its value.
    quotes: the meaning of quotation marks in a TSV file, see `quoting.is_quoted`.

  Raises:
    ValueError: if the file is missing, its format is unknown, its reader is not
      installed or a row is malformed; the message names the position.
  """
  path = pathlib.Path(path)
  if not path.is_dir():
    yield from _read(path, quotes)
    return
  for split, file in _list_tables(path):
    added = {"split": FileSplit(split)} | _read_partition(path, file)
    for where, row in _read(file, quotes):
      yield where, {**added, **row}


def simplify(name: str) -> str:
  """Returns a column's name in lower case, without punctuation and spaces."""
  return re.sub(r"[\W_]", "", name.lower())


def check(path: str | os.PathLike) -> None:
  """Refuses a path that `rows` would refuse by its name; reads no table."""
  path = pathlib.Path(path)
  if path.is_dir():
    next(_list_tables(path))
  else:
    _get_reader(path)


def is_json(path: str | os.PathLike) -> bool:
  """Returns True if a table is JSON lines, by the suffix of its name.

  >>> is_json("log.jsonl.gz"), is_json("log.jsonl.csv"), is_json("log.jsonl.0")
  (True, False, True)
  """
  path = pathlib.PurePath(path)
  suffix = _get_suffix(path)
  return suffix in _JSON if suffix else ".jsonl" in path.name


def find(directory: str | os.PathLike, name: str) -> pathlib.Path:
  """Finds a folder of tables, or else a single table such as NAME.jsonl.

  Args:
    directory: the folder that holds them.
    name: the name of the folder, and of the table without its suffix.

  Returns:
    The path; that of the folder if there is neither.
  """
  folder = pathlib.Path(directory, name)
  tables = [
    p for p in sorted(folder.parent.glob(f"{name}.*")) if _get_suffix(p)
  ]
  return tables[0] if tables and not folder.is_dir() else folder


def columns(path: str | os.PathLike) -> tuple[str, list[str]]:
  """Returns the position and the column names of a table's first row.

  It reads only the header of a CSV or TSV file, and only the first file of a
  folder.

  Args:
    path: as in `rows`.

  Returns:
    "path:number" and the names, which are empty for a table without rows.

  Raises:
    ValueError: as in `rows`.
  """
  path, added = pathlib.Path(path), []
  if path.is_dir():
    folder, path = path, next(_list_tables(path))[1]
    added = [*_read_partition(folder, path)]
  read = _get_reader(path)
  if _get_suffix(path) not in _USUAL:
    rows_ = ((where, [*row, *added]) for where, row in read(path))
    return next(rows_, ("", []))
  with _open_text_table(
    path, _USUAL[_get_suffix(path)], csv.QUOTE_MINIMAL
  ) as reader:
    return f"{path}:1", [*_get_names(path, reader), *added]


def find_separator(header: str, usual: str) -> str:
  """Returns the sign that separates the cells of a header.

  Formal guarantee: the sign is a function of the header alone, so of no record.

  >>> find_separator('a;"b, c"', ","), find_separator("a;b,c", ",")
  (';', ',')

  Args:
    header: the first line.
    usual: the sign of the file's suffix, which wins if the header has it.
  """
  outside = re.sub(r'"[^"]*"', "", header)
  if usual in outside:
    return usual
  return max((usual, *";\t,|"), key=outside.count)


def splits(path: str | os.PathLike) -> list[str]:
  """Returns the splits that a folder's files name; none for a file.

  A file without rows counts, too. Raises the errors of `rows`.
  """
  path = pathlib.Path(path)
  return (
    sorted({split for split, _ in _list_tables(path)}) if path.is_dir() else []
  )


def find_log_splits(path: str | os.PathLike) -> list[str]:
  """Finds the splits that a log's files name.

  Names of which none is like a split's, such as data_0 and part of DuckDB and
  Spark, are of parts of one log.

  Args:
    path: as in `rows`, whose errors it raises.
  """
  names = splits(path)
  return names if any(map(_SPLIT.match, names)) else []


def get_max_rows(path: str | os.PathLike) -> int:
  """Returns an upper bound of a table's rows, from its metadata or its lines.

  Args:
    path: as in `rows`.

  Raises:
    Exception: any error of the readers, if the file is no table.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    return sum(get_max_rows(file) for _, file in _list_tables(path))
  suffix = _get_suffix(path)
  if suffix == ".parquet":
    with extras.required("parquet"):
      from pyarrow import parquet

    return parquet.read_metadata(path).num_rows
  if suffix == ".arrow":
    return sum(batch.num_rows for batch in _read_arrow_batches(path))
  return files.get_max_lines(path)


def has_split_column(
  path: str | os.PathLike, named: Sequence[str | None]
) -> bool:
  """Returns True if a column "split" names the split of each row.

  The result depends on which rows have the column, not on the splits they name.

  >>> has_split_column("log", ["train", "train"]), has_split_column("log", [None])
  (True, False)

  Args:
    path: for the message.
    named: each row's value of the column, "" for an empty cell; None if the row has
      no such column.

  Raises:
    ValueError: if only some rows name their split, or a name cannot be a file's.
  """
  names = [x for x in named if x is not None and not isinstance(x, FileSplit)]
  filled = [name for name in names if name and not ids.is_null(name)]
  if names and len(filled) < len(named):
    raise ValueError(
      f'{path}: expected "split" in all lines or in none, got it in some, or NULL:'
      " fill it, or leave the column out"
    )
  if not all(re.fullmatch(r"[\w.-]+", each) for each in names):
    raise ValueError(
      f'{path}: expected names of splits under "split" (letters, digits, ".",'
      ' "_" and "-"), got another; correct them'
    )
  return bool(names)


def _list_tables(path: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
  """Yields the split and the path of each table in a folder."""
  if any(any(at.glob(x)) for at in (path, path.parent) for x in _LAKES):
    raise ValueError(
      f"{path}: expected files whose rows all count, got a table of Delta, Hudi or"
      " Iceberg, whose files hold deleted and replaced rows, too: export its rows"
    )
  paths = [p for p in file_lists.below(path)[::-1] if _get_suffix(p)]
  # A link "latest" to a folder beside it adds no rows.
  once = {(p.parent.resolve(), p.name): p for p in paths}
  paths = sorted(once.values())
  paths = [p for p in paths if not _is_hidden(p.relative_to(path))]
  paths = [p for p in paths if p.name not in _DESCRIPTIONS and _is_saved(p)]
  kinds = {SUFFIXES[_get_suffix(file)]: _get_suffix(file) for file in paths}
  if len(kinds) > 1:
    raise ValueError(
      f"{path}: expected tables of one kind, got"
      f" {' and '.join(sorted(kinds.values()))}: move the other files away"
    )
  if not paths:
    raise ValueError(
      f"{path}: expected tables ({', '.join(SUFFIXES)}) in the folder, got none:"
      " check the path"
    )
  for file in paths:
    below = [
      part
      for part in file.relative_to(path).parts[:-1]
      if part != "data" and "=" not in part
    ]
    yield below[0] if below else re.split(r"[-.]", file.name)[0], file


def _read_partition(
  path: pathlib.Path, file: pathlib.Path
) -> dict[str, str | None]:
  """Returns the columns that a file's folders name, such as "clicks=0"."""
  parts = [part.partition("=") for part in file.relative_to(path).parts[:-1]]
  values = {key: parse.unquote(value) for key, sign, value in parts if sign}
  return {
    key: None if value == "__HIVE_DEFAULT_PARTITION__" else value
    for key, value in values.items()
  }


def _is_hidden(below: pathlib.Path) -> bool:
  """Returns True for a hidden file, or one of a job of Spark that failed."""
  return any(part[0] == "." or part == "_temporary" for part in below.parts)


def _is_saved(file: pathlib.Path) -> bool:
  """Returns True if an Arrow file is listed in its folder's state.json, if any.

  The folder of a saved set also holds caches of `datasets`, cache-*.arrow.
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


def _get_suffix(path: pathlib.PurePath) -> str:
  """Returns the suffix that selects a file's reader; "" if there is no
  reader."""
  suffix = pathlib.Path(files.remove_suffix(path.name)).suffix.lower()
  return suffix if suffix in SUFFIXES else ""


def _get_reader(path: pathlib.Path) -> Callable[[pathlib.Path], _Rows]:
  suffix = _get_suffix(path)
  if not path.is_file():
    raise ValueError(f"expected a table, got {path}: no such file")
  if not suffix:
    raise ValueError(
      f"{path}: expected a table ({', '.join(SUFFIXES)}), got another suffix:"
      " rename or convert it"
    )
  return SUFFIXES[suffix]


def _read(path: pathlib.Path, quotes: str) -> _Rows:
  read = _get_reader(path)
  if read is _TABBED and quoting.is_quoted(path, quotes):
    read = _make_text_reader("\t", csv.QUOTE_MINIMAL)
  return read(path)


def _make_text_reader(
  usual: str, marks: int
) -> Callable[[pathlib.Path], _Rows]:
  def read(path: pathlib.Path) -> _Rows:
    with _open_text_table(path, usual, marks) as reader:
      names = _get_names(path, reader)
      for row in reader:
        where = f"{path}:{reader.line_num}"
        if None in row or None in row.values():
          raise ValueError(
            f"{where}: expected {len(reader.fieldnames)} cells, as the header"
            " has, got another number; correct the line"
          )
        if len(names) > 1 and names == [*row.values()]:
          raise ValueError(
            f"{where}: expected the header in the first line only, got it again:"
            " files were put together; remove it"
          )
        yield where, row

  return read


def _get_names(path: pathlib.Path, reader: csv.DictReader) -> list[str]:
  """Returns the names in a header, which must differ."""
  names = [*(reader.fieldnames or ())]
  _check_distinct(f"{path}:{reader.line_num}", names)
  return names


class _HeaderError(ValueError):
  """A table is sound, but its header is not."""


def _check_distinct(where: str, names: Sequence[str]) -> None:
  """Refuses names of which a mapping would keep the last."""
  if len({*names}) < len(names):
    raise _HeaderError(
      f"{where}: expected each column once in the header, got one again; rename"
      " or remove it"
    )


@contextlib.contextmanager
def _open_text_table(
  path: pathlib.Path, usual: str, marks: int
) -> Iterator[csv.DictReader]:
  """Opens a table of text and turns errors of csv and encoding into ValueErrors.

  Args:
    path: the table, plain or compressed.
    usual: the separator of cells, unless the header shows another sign.
    marks: csv's constant for quotation marks, for tables with the usual separator;
      with another separator they quote cells.
  """
  csv.field_size_limit(_MOST)
  with files.open_file(path) as stream:
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    reader = None
    try:
      lines = files.limit_lines(text, path)
      header = next(lines, "")
      if "\0" in header:
        raise ValueError(f"{path}:1: {files.WIDE}")
      if match := _SEP.fullmatch(header):
        raise ValueError(
          f"{path}:1: expected the header, got the line sep={match[1]} that only"
          " Excel reads; remove it (sed -i 1d)"
        )
      sign = find_separator(header, usual)
      reader = csv.DictReader(
        itertools.chain([header] if header else [], lines),
        delimiter=sign,
        quoting=marks if sign == usual else csv.QUOTE_MINIMAL,
        strict=True,
      )
      yield reader
    except UnicodeDecodeError:  # the decoder reads ahead of the current row
      with files.open_file(path) as again:
        if again.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
          raise ValueError(f"{path}:1: {files.WIDE}") from None
      raise ValueError(
        f"{path}: expected UTF-8, got another byte; {files.CONVERT}"
      ) from None
    except (csv.Error, *files.BROKEN_GZIP) as error:
      number = reader.line_num + 1 if reader else 1
      is_quoted = isinstance(error, csv.Error)
      marks = " (marks in a cell are doubled; in Spark, option('escape', '\"'))"
      raise ValueError(
        f"{path}:{number}: expected a table in UTF-8 with a header, got"
        f" {type(error).__name__}; correct the line{marks * is_quoted}"
      ) from None


def _read_parquet(path: pathlib.Path) -> _Rows:
  with extras.required("parquet"):
    from pyarrow import parquet

  with _explain_errors(path), parquet.ParquetFile(path) as file:
    yield from _yield_rows(path, file.iter_batches())


def _read_arrow(path: pathlib.Path) -> _Rows:
  with _explain_errors(path):
    yield from _yield_rows(path, _read_arrow_batches(path))


def _read_arrow_batches(path: pathlib.Path) -> Iterator[Any]:
  """Reads Arrow's stream format, which `datasets` saves, or its file format."""
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
def _explain_errors(path: pathlib.Path) -> Iterator[None]:
  """Turns errors of a damaged table into a ValueError that names the file."""
  try:
    yield
  except _HeaderError:
    raise
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


def _yield_rows(path: pathlib.Path, batches: Any) -> _Rows:
  """Yields rows; a time, which no reader asks for, is any: Python has fewer."""
  with extras.required("parquet"):
    from pyarrow import types

  number = 0
  for batch in batches:
    _check_distinct(str(path), batch.schema.names)
    times = {x.name for x in batch.schema if types.is_temporal(x.type)}
    rest = [name for name in batch.schema.names if name not in times]
    unread = dict.fromkeys(times, datetime.datetime.min)
    for row in batch.select(rest).to_pylist():
      number += 1
      yield f"{path}:{number}", row | unread


_JSON = (".jsonl", ".ndjson", ".json")
_USUAL = {".csv": ",", ".tsv": "\t"}
"""Usual separators by suffix."""
_TABBED = _make_text_reader("\t", csv.QUOTE_NONE)

SUFFIXES: dict[str, Callable[[pathlib.Path], _Rows]] = {
  **dict.fromkeys(_JSON, files.json_lines),
  ".csv": _make_text_reader(",", csv.QUOTE_MINIMAL),
  ".tsv": _TABBED,
  ".parquet": _read_parquet,
  ".arrow": _read_arrow,
}
"""Readers by the suffix of a file, without the suffix of a compression."""
