"""Detects whether the quotation marks of a tab-separated table quote its cells.

csv.writer, pandas and the passages of DPR (psgs_w100.tsv) put a cell with a
quotation mark in quotation marks and double the marks inside. MS MARCO and query
logs write marks as they are, even if they are not balanced. A cell with a mark is

- quoted for sure, if it begins and ends with a mark, doubles the marks between, and
  holds a doubled mark, a tab, or a line break that the columns reveal;
- ambiguous, if it begins with a mark, ends with the next one and holds no other;
- text for sure, in all other cases.

A table is quoted if a cell or the whole header is quoted for sure, and no cell is
text for sure. It is text if cells that are text for sure are at least ten times as
many as cells that are quoted for sure. Any other table with marks is ambiguous, and
is refused when texts are read: the setting `quotes` decides.

Formal guarantee:
  `is_quoted` looks at all rows of a table and returns one bit. Adding or removing a
  row with fewer than ten cells changes the bit for no table that is accepted with
  and without the row. With `quotes` other than "auto" the bit is a constant.
"""

import contextlib
import csv
import functools
import io
import os
import re
from collections.abc import Iterator

from synthq_jax.data import files

__all__ = ["MODES", "check", "is_quoted", "rows"]

MODES = ("auto", "csv", "text")
"""Values of the setting: detect quotation marks, quoted as by csv.writer,
text."""

_CELL = re.compile(r'"([^"]*(?:""[^"]*)*)"(?=\t|\Z)')
_END = re.compile(r'[^"]*(?:""[^"]*)*"(?=\t|\Z)')
_OPEN = re.compile(r'"[^"]*(?:""[^"]*)*\Z')
_WIDEST = 1 << 20
"""Largest number of characters of a cell of several lines."""
_MARGIN = 10


def check(quotes: str) -> None:
  """Refuses a value that is not one of `MODES`."""
  if quotes not in MODES:
    raise ValueError(
      f"expected quotes of {', '.join(MODES)}, got quotes={quotes!r}; choose one"
    )


def is_quoted(
  path: str | os.PathLike, quotes: str = "auto", *, unclear: bool | None = None
) -> bool:
  """Returns True if a tab-separated table quotes its cells.

  The table is read once, line by line.

  Args:
    path: the table, plain or compressed.
    quotes: "csv" or "text" if the answer is known; "auto" detects it.
    unclear: the result for an ambiguous table; None: it is refused.

  Raises:
    ValueError: if the table is ambiguous and refused.
  """
  check(quotes)
  if quotes != "auto":
    return quotes == "csv"
  if not os.path.isfile(path):  # a pipe can be read only once
    return False
  quoted, ambiguous, text = _count_cells(os.fspath(path), files.state(path))
  if text == 0 and (quoted or not ambiguous):
    return quoted > 0
  if text and quoted * _MARGIN <= text:
    return False
  if unclear is not None:
    return unclear
  raise ValueError(
    f"{path}: expected quotation marks that either quote cells in the whole table,"
    " as csv.writer does, or are text, got a table that could be either: say"
    " prepare_data.Config.quotes='csv' or 'text'"
  )


@functools.lru_cache(16)
def _count_cells(path: str, state: tuple[int, int]) -> tuple[int, int, int]:
  """Counts cells that are quoted for sure, ambiguous, and text for sure."""
  del state  # a key of the cache: a changed file is read again
  counts, width, waiting = [0, 0, 0], None, None
  with contextlib.suppress(*files.BROKEN_GZIP), files.open_file(path) as stream:
    for raw in files.limit_lines(stream, path):
      if width is not None and waiting is None and b'"' not in raw:
        continue
      line = raw.decode("utf-8", "replace").rstrip("\r\n")
      if width is None:
        line = line.removeprefix("\ufeff")
        width = line.count("\t") + 1
        cells = [_CELL.fullmatch(cell) for cell in line.split("\t")]
        if all(cells):
          counts[0] += 1
          continue
      waiting = _count_line(line, width, waiting, counts)
  if waiting is not None:
    counts[2] += 1
  return tuple(counts)


def _count_line(
  line: str, width: int, waiting: tuple[int, bool] | None, counts: list[int]
) -> tuple[int, bool] | None:
  """Counts the cells of a line that hold quotation marks.

  Args:
    line: the line, without its end.
    width: number of columns of the table.
    waiting: the state of an open cell that may continue on this line: its number of
      characters so far, and whether the line that opened it has all columns. None
      if no cell is open.
    counts: the counts, which are updated.

  Returns:
    `waiting` for the next line.
  """
  at = 0
  columns = line.count("\t") + 1
  if waiting is not None:
    length, is_whole = waiting
    if is_whole and columns == width or length > _WIDEST:
      counts[2] += 1  # the mark that opened it was text
      return _count_line(line, width, None, counts)
    if match := _END.match(line):
      counts[0] += 1
      at = match.end() + 1
    elif '"' in line.replace('""', ""):
      counts[2] += 1
      return _count_line(line, width, None, counts)
    else:
      return length + len(line), False
  while at <= len(line):
    if match := _CELL.match(line, at):
      is_sure = '""' in match[1] or "\t" in match[1]
      counts[0 if is_sure else 1] += 1
      at = match.end() + 1
      continue
    if line.startswith('"', at) and _OPEN.match(line, at):
      return len(line), columns >= width
    end = line.find("\t", at)
    end = len(line) if end < 0 else end
    counts[2] += '"' in line[at:end]
    at = end + 1
  return None


def rows(
  path: str | os.PathLike, quotes: str = "auto"
) -> Iterator[tuple[str, list[str]]]:
  """Yields the cells of each line of a table without a header.

  In an ambiguous table, quotation marks are text, which leaves the words the same.

  Args:
    path: a tab-separated table, plain or compressed.
    quotes: as in `is_quoted`.

  Raises:
    ValueError: if the table is not UTF-8, or a quoted cell has no end.
  """
  if not is_quoted(path, quotes, unclear=False):
    for where, line in files.lines(path):
      yield where, line.split("\t")
    return
  csv.field_size_limit(files.LONGEST)
  with files.open_file(path) as stream:
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    reader = csv.reader(
      files.limit_lines(text, path), delimiter="\t", strict=True
    )
    try:
      for cells in reader:
        if any(map(str.strip, cells)):
          yield f"{path}:{reader.line_num}", cells
    except (csv.Error, UnicodeDecodeError, *files.BROKEN_GZIP) as error:
      raise ValueError(
        f"{path}:{reader.line_num + 1}: expected quoted cells in UTF-8, got"
        f" {type(error).__name__}; correct the line"
      ) from None
