"""Tables of plain cells as lines of text and as Markdown."""

import re
from collections.abc import Sequence

__all__ = ["aligned", "escaped", "markdown"]

_MARKUP = re.compile(r"([\\`*_\[\]<>#|~$&])")


def aligned(
  header: Sequence[str],
  rows: Sequence[Sequence[str]],
  numeric: Sequence[str] = (),
) -> str:
  """Returns a table as lines of ASCII, columns two spaces apart.

  >>> print(aligned(("row", "n"), [("a", "1"), ("b", "12")], ("n",)))
  row   n
  ---  --
  a     1
  b    12

  Args:
    header: one title per column.
    rows: cells, each row as long as the header; characters outside ASCII
      become "?".
    numeric: titles of the columns that are set flush right.

  Returns:
    Header, rule and rows, without a line feed at the end.
  """
  cells = [[_ascii(cell) for cell in line] for line in (header, *rows)]
  widths = [
    max(len(cell) for cell in column) for column in zip(*cells, strict=True)
  ]
  right = [title in numeric for title in header]
  cells.insert(1, ["-" * width for width in widths])
  return "\n".join(_aligned_row(row, widths, right) for row in cells)


def _aligned_row(
  row: Sequence[str], widths: Sequence[int], right: Sequence[bool]
) -> str:
  padded = (
    cell.rjust(width) if flush else cell.ljust(width)
    for cell, width, flush in zip(row, widths, right, strict=True)
  )
  return "  ".join(padded).rstrip()


def _ascii(text: str) -> str:
  return " ".join(text.split()).encode("ascii", "replace").decode()


def markdown(
  header: Sequence[str],
  rows: Sequence[Sequence[str]],
  numeric: Sequence[str] = (),
) -> str:
  """Returns a table in Markdown's pipes; what looks like markup is escaped.

  >>> print(markdown(("row", "n"), [("a|b", "1")], ("n",)))
  | row | n |
  | --- | --: |
  | a\\|b | 1 |

  Args:
    header: one title per column.
    rows: cells, each row as long as the header.
    numeric: titles of the columns that are set flush right.

  Returns:
    Header, rule and rows, without a line feed at the end.
  """
  rule = ["--:" if title in numeric else "---" for title in header]
  plain = [[escaped(cell) for cell in line] for line in (header, *rows)]
  lines = [plain[0], rule, *plain[1:]]
  return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def escaped(text: str) -> str:
  """Puts text on one line and a backslash before what Markdown would read."""
  return _MARKUP.sub(r"\\\1", " ".join(text.split()))
