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
  """A list of short texts, one below the other."""

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
  """What it shows."""
  file: str = ""
  """Name of the file beside a Markdown page that `page.write` puts the drawing
  in, e.g. "study.svg"; empty: the drawing is in the HTML page alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alert:
  """What a reader must not miss, in red."""

  text: str
  """The text, plain."""


Block = Alert | Paragraph | Items | Heading | Table | Figure


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
  banner: str = ""
  """A warning above everything, or nothing."""
  introduction: tuple[Block, ...] = ()
  """What stands before the first part."""
  parts: tuple[Part, ...] = ()
  """The parts in order."""
