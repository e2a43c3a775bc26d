"""Defines what a page consists of, before it becomes HTML, Markdown or text."""

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
  """Running text, plain."""

  text: str
  """The text; whatever looks like markup in it is shown as it is."""
  lead: str = ""
  """Words in bold before the text, or nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Items:
  """Short texts, one below the other."""

  texts: tuple[str, ...]
  """The texts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heading:
  """A heading inside a part of a page."""

  text: str
  """The words."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
  """A drawing."""

  svg: str
  """An <svg> element from `plots`, the only markup that is not escaped."""
  caption: str
  """Caption below the drawing."""
  file: str = ""
  """Name of the file beside a Markdown page that `page.write` puts the drawing
  in, e.g. "study.svg"; empty: the drawing is in the HTML page alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alert:
  """A warning in a box: red, or grey where `is_calm`."""

  text: str
  """The text, plain."""
  is_calm: bool = False
  """True for a condition of the whole run that is no danger."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
  """An answer of the first screen."""

  title: str
  """The question in a word: "Ship"."""
  head: str
  """The answer in a few words, in large type."""
  text: str
  """Its numbers and conditions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
  """Answers side by side, one below the other on a narrow screen."""

  tiles: tuple[Tile, ...]
  """From left to right."""


Block = Alert | Paragraph | Items | Heading | Table | Figure | Tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """A part of a page with a title."""

  title: str
  """Its title, different from every other part's."""
  blocks: tuple[Block, ...]
  """Its content in order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
  """A whole report."""

  title: str
  """The title."""
  subtitle: str = ""
  """A line below the title, or nothing."""
  banner: str = ""
  """A warning above everything, or nothing."""
  introduction: tuple[Block, ...] = ()
  """Blocks before the first part."""
  parts: tuple[Part, ...] = ()
  """The parts in order."""
