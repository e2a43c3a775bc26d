"""Defines pages and their blocks, which `page` renders."""

import dataclasses

from synthq_jax import text_tables

__all__ = [
  "Alert",
  "Block",
  "Figure",
  "Heading",
  "Items",
  "Page",
  "Paragraph",
  "Part",
  "Table",
  "Tile",
  "Tiles",
]

Table = text_tables.Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paragraph:
  """A paragraph of plain text."""

  text: str
  """The text; markup in it is escaped."""
  lead: str = ""
  """Words in bold before the text, or ""."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Items:
  """A list of short texts."""

  texts: tuple[str, ...]
  """The texts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heading:
  """A heading inside a part of a page."""

  text: str
  """The words."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
  """A drawing with its caption."""

  svg: str
  """An <svg> element from `plots`, the only markup that is not escaped."""
  caption: str
  """Caption below the drawing."""
  file: str = ""
  """Name of a file such as "study.svg" in the folder of a Markdown page.

  `page.write` writes the drawing to it. If empty, only HTML pages have the drawing.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alert:
  """A warning in a box: red, or grey where `is_calm`."""

  text: str
  """The text, plain."""
  is_calm: bool = False
  """True for a harmless condition of the whole run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
  """An answer on the first screen of a page."""

  title: str
  """The question in one word, such as "Ship"."""
  head: str
  """The answer in a few words, in large type."""
  text: str
  """Numbers and conditions of the answer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
  """Answers side by side, one below the other on a narrow screen."""

  tiles: tuple[Tile, ...]
  """The tiles from left to right."""


Block = Alert | Paragraph | Items | Heading | Table | Figure | Tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """A part of a page with a title."""

  title: str
  """Title, which no other part has."""
  blocks: tuple[Block, ...]
  """Blocks in order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
  """A whole report."""

  title: str
  """The title."""
  subtitle: str = ""
  """A line below the title, or ""."""
  banner: str = ""
  """A warning at the top of the page, or ""."""
  introduction: tuple[Block, ...] = ()
  """Blocks before the first part."""
  parts: tuple[Part, ...] = ()
  """The parts in order."""
