"""What a page of a report consists of, before it becomes HTML or Markdown."""

import dataclasses

__all__ = [
  "Block",
  "Figure",
  "Heading",
  "Page",
  "Paragraph",
  "Preformatted",
  "Section",
  "Table",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paragraph:
  """Running text, plain."""

  text: str
  """The text; whatever looks like markup in it is shown as it is."""
  lead: str = ""
  """Words in bold before the text, or nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heading:
  """A heading inside a section."""

  text: str
  """The words."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
  """A table of cells of plain text."""

  header: tuple[str, ...]
  """One title per column."""
  rows: tuple[tuple[str, ...], ...]
  """Cells; each row as long as the header."""
  numeric: tuple[str, ...] = ()
  """Titles of the columns that are set flush right."""

  def __post_init__(self):
    for row in self.rows:
      if len(row) != len(self.header):
        raise ValueError(
          f"expected {len(self.header)} cells a row, got {len(row)}: {row}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preformatted:
  """Text whose line breaks and spaces count."""

  text: str
  """The text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
  """A drawing."""

  svg: str
  """An <svg> element from `_plots`, the only markup that is not escaped."""
  caption: str
  """What it shows."""


Block = Paragraph | Heading | Table | Preformatted | Figure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
  """A part of a page with a title."""

  title: str
  """Its title, different from every other section's."""
  blocks: tuple[Block, ...]
  """Its content in order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
  """A whole report."""

  title: str
  """The title."""
  banner: str = ""
  """A warning above everything, or nothing."""
  introduction: tuple[Block, ...] = ()
  """What stands before the first section."""
  sections: tuple[Section, ...] = ()
  """The sections in order."""
