"""Tells tab-separated tables with quoted cells from those whose quotes are text.

csv.writer, pandas and the passages of DPR (psgs_w100.tsv) put a cell with a
quotation mark in quotation marks, and double those inside. MS MARCO and query
logs write marks as they are, also where none closes. A cell that holds a mark is

- quoted for sure, if it begins with one, ends with one and doubles all between,
  of which there is one, or a tab, or a line break that the columns show;
- either, if it begins with a mark, ends with the next one and holds no other;
- text for sure, in all other cases.

A table is quoted if a cell or the whole header is so for sure, and none is text for
sure; else it is text, if cells that are text for sure are ten times as many as
those that are quoted for sure. A table in between, or with cells alone that are
either, is refused where texts are read: `quotes` says what it is.

Formal guarantee:
  `is_quoted` looks at all rows of a table and returns one bit. A row with fewer than
  ten cells, more or less, changes it for no table that is accepted with and without
  the row. With `quotes` other than "auto" it is a constant.
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
"""What a setting may say of quotation marks: found out, as csv.writer, text."""

_CELL = re.compile(r'"([^"]*(?:""[^"]*)*)"(?=\t|\Z)')
_END = re.compile(r'[^"]*(?:""[^"]*)*"(?=\t|\Z)')
_OPEN = re.compile(r'"[^"]*(?:""[^"]*)*\Z')
_WIDEST = 1 << 20
"""Characters of a cell of several lines that are looked at."""
_MARGIN = 10


def check(quotes: str) -> None:
  """Refuses what is not one of `MODES`."""
  if quotes not in MODES:
    raise ValueError(
      f"expected quotes of {', '.join(MODES)}, got quotes={quotes!r}; choose one"
    )


def is_quoted(
  path: str | os.PathLike, quotes: str = "auto", *, unclear: bool | None = None
) -> bool:
  """Returns whether a tab-separated table quotes its cells.

  The table is read once, line by line.

  Args:
    path: the table, plain or gzipped.
    quotes: "csv" or "text" where that is known; "auto" looks.
    unclear: what holds for a table that could be either; None: it is refused.

  Raises:
    ValueError: if it could be either and is refused.
  """
  check(quotes)
  if quotes != "auto":
    return quotes == "csv"
  if not os.path.isfile(path):  # a pipe can be read only once
    return False
  quoted, either, text = _counts(os.fspath(path), files.state(path))
  if text == 0 and (quoted or not either):
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
def _counts(path: str, state: tuple[int, int]) -> tuple[int, int, int]:
  """Counts cells that are quoted for sure, either, and text for sure."""
  del state  # tells a changed file from the one that was looked at
  found, width, waiting = [0, 0, 0], None, None
  with contextlib.suppress(*files.BROKEN_GZIP), files.opened(path) as stream:
    for raw in files.bounded(stream, path):
      if width is not None and waiting is None and b'"' not in raw:
        continue
      line = raw.decode("utf-8", "replace").rstrip("\r\n")
      if width is None:
        line = line.removeprefix("\ufeff")
        width = line.count("\t") + 1
        cells = [_CELL.fullmatch(cell) for cell in line.split("\t")]
        if all(cells):
          found[0] += 1
          continue
      waiting = _look(line, width, waiting, found)
  if waiting is not None:
    found[2] += 1
  return tuple(found)


def _look(
  line: str, width: int, waiting: tuple[int, bool] | None, found: list[int]
) -> tuple[int, bool] | None:
  """Counts the cells of a line that hold quotation marks.

  Args:
    line: without its end.
    width: columns of the table.
    waiting: characters so far of a cell that may have several lines, and whether
      its lines have all columns without it; None: there is none.
    found: the counts, which are added to.

  Returns:
    `waiting` of the next line.
  """
  at = 0
  columns = line.count("\t") + 1
  if waiting is not None:
    length, is_whole = waiting
    if is_whole and columns == width or length > _WIDEST:
      found[2] += 1  # the mark that opened it was text
      return _look(line, width, None, found)
    if match := _END.match(line):
      found[0] += 1
      at = match.end() + 1
    elif '"' in line.replace('""', ""):
      found[2] += 1
      return _look(line, width, None, found)
    else:
      return length + len(line), False
  while at <= len(line):
    if match := _CELL.match(line, at):
      is_sure = '""' in match[1] or "\t" in match[1]
      found[0 if is_sure else 1] += 1
      at = match.end() + 1
      continue
    if line.startswith('"', at) and _OPEN.match(line, at):
      return len(line), columns >= width
    end = line.find("\t", at)
    end = len(line) if end < 0 else end
    found[2] += '"' in line[at:end]
    at = end + 1
  return None


def rows(
  path: str | os.PathLike, quotes: str = "auto"
) -> Iterator[tuple[str, list[str]]]:
  """Yields the cells of each line of a table without a header.

  Where its quotation marks could be either, they are text: words are the same.

  Args:
    path: tab-separated, plain or gzipped.
    quotes: as in `is_quoted`.

  Raises:
    ValueError: if it is no UTF-8, or a quoted cell has no end.
  """
  if not is_quoted(path, quotes, unclear=False):
    for where, line in files.lines(path):
      yield where, line.split("\t")
    return
  csv.field_size_limit(files.LONGEST)
  with files.opened(path) as stream:
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    reader = csv.reader(files.bounded(text, path), delimiter="\t", strict=True)
    try:
      for cells in reader:
        if any(map(str.strip, cells)):
          yield f"{path}:{reader.line_num}", cells
    except (csv.Error, UnicodeDecodeError, *files.BROKEN_GZIP) as error:
      raise ValueError(
        f"{path}:{reader.line_num + 1}: expected quoted cells in UTF-8, got"
        f" {type(error).__name__}; correct the line"
      ) from None
