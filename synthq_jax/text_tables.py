"""Formats tables of plain cells as lines of text and as Markdown."""

import dataclasses
import re
from collections.abc import Sequence

__all__ = ["Table", "escaped", "printable", "without_controls"]

_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_LIST = re.compile(r"^(\d*)([.)](?=\s|$)|[-+](?=[\s-]))")
_MARKUP = re.compile(r"([\\`*_\[\]<>#|~$&])")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
  """A table of cells of plain text.

  >>> table = Table(
  ...   header=("row", "n"), rows=(("a|b", "1"), ("c", "12")), numeric=("n",)
  ... )
  >>> print(table.text())
  row   n
  ---  --
  a|b   1
  c    12
  >>> print(table.markdown())
  | row | n |
  | --- | --: |
  | a\\|b | 1 |
  | c | 12 |

  Raises:
    ValueError: if a row is not as long as the header.
  """

  header: tuple[str, ...]
  """One title per column."""
  rows: tuple[tuple[str, ...], ...]
  """Cells of each row; each row is as long as the header."""
  numeric: tuple[str, ...] = ()
  """Titles of the right-aligned columns."""

  def __post_init__(self):
    for row in self.rows:
      if len(row) != len(self.header):
        raise ValueError(
          f"expected {len(self.header)} cells a row, got {len(row)}: {row}"
        )

  def text(self) -> str:
    """Formats header, rule and rows as lines of ASCII.

    Columns are two spaces apart; characters outside ASCII become "?". There is
    no line feed at the end.
    """
    cells = [[_to_ascii(cell) for cell in line] for line in self._list_lines()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [title in self.numeric for title in self.header]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(_align(row, widths, right) for row in cells)

  def markdown(self) -> str:
    """Formats the table in Markdown's pipes and escapes markup in cells.

    There is no line feed at the end.
    """
    header, *rows = [
      [escaped(cell) for cell in line] for line in self._list_lines()
    ]
    rule = ["--:" if title in self.numeric else "---" for title in self.header]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))

  def _list_lines(self) -> tuple[tuple[str, ...], ...]:
    return (self.header, *self.rows)


def _align(
  row: Sequence[str], widths: Sequence[int], right: Sequence[bool]
) -> str:
  padded = (
    cell.rjust(width) if flush else cell.ljust(width)
    for cell, width, flush in zip(row, widths, right, strict=True)
  )
  return "  ".join(padded).rstrip()


def _to_ascii(text: str) -> str:
  return " ".join(text.split()).encode("ascii", "replace").decode()


def printable(text: str) -> str:
  """Puts text on one line and replaces characters that control terminals or
  break XML.

  >>> printable("red\\x1b[0m \\n apple")
  'red\ufffd[0m apple'
  """
  return without_controls(" ".join(text.split()))


def without_controls(text: str) -> str:
  """Replaces control characters, except tabs and line ends, by U+FFFD."""
  return _CONTROLS.sub("\ufffd", text)


def escaped(text: str) -> str:
  """Puts text on one line and escapes Markdown's markup with backslashes."""
  text = _MARKUP.sub(r"\\\1", printable(text))
  return _LIST.sub(r"\1\\\2", text, count=1)
