"""Renders pages as HTML, Markdown and text, and chooses what may be shared.

A section says what it needs, by the names of its builder's parameters, and whether
it may be shared; what says nothing is private. A page that is shared is built from
sections that say so and from values that were let through for it, so that a section
cannot see more.
"""

import dataclasses
import functools
import inspect
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from synthq_jax import extras, text_tables
from synthq_jax.report import blocks
from synthq_jax.storage import artifacts

with extras.required("run"):
  import jinja2

__all__ = ["Section", "html", "markdown", "parts", "text", "write"]


@dataclasses.dataclass(frozen=True)
class Section:
  """A part of a page that is yet to be built.

  Formal guarantee:
    A section with `shareable` is a function of the values it needs alone;
    whether these may be shared is decided where they are handed over.
  """

  name: str
  """The title of the part."""
  build: Callable[..., Sequence[blocks.Block]]
  """Returns the content, given the values that its parameters name; nothing: the
  part is left out."""
  shareable: bool = False
  """Whether it stands on the page that is shared, else on the private one."""


def parts(
  sections: Iterable[Section],
  values: Mapping[str, Any],
  *,
  shareable: bool = False,
) -> tuple[blocks.Part, ...]:
  """Builds the sections of one page.

  Args:
    sections: of both pages, in order.
    values: what they may see, by name. For a page that is shared: nothing that
      must stay private, since no section filters it.
    shareable: whether the page is the one that is shared.

  Returns:
    A part for each section of the page that has content.

  Raises:
    ValueError: if a section needs what is not there.
  """
  built = []
  for section in sections:
    if section.shareable != shareable:
      continue
    needs = inspect.signature(section.build).parameters
    missing = [name for name in needs if name not in values]
    if missing:
      raise ValueError(
        f"section {section.name!r}: expected values of {sorted(values)}, got"
        f" needs={missing}: hand them over, or mark the section private"
      )
    content = section.build(**{name: values[name] for name in needs})
    if content:
      built.append(blocks.Part(title=section.name, blocks=tuple(content)))
  return tuple(built)


def html(page: blocks.Page) -> str:
  """Returns one HTML document; everything but drawings is escaped.

  It holds no script, and loads no font and no picture from elsewhere.

  Args:
    page: what to render.
  """
  made = _environment().get_template("page.html").render(page=page)
  return text_tables.without_controls(made)


def markdown(page: blocks.Page) -> str:
  """Returns the page as Markdown; what looks like markup is escaped.

  Args:
    page: what to render; of drawings the captions, and links to files.
  """
  return _environment().get_template("page.md").render(page=page)


def text(content: Iterable[blocks.Block]) -> str:
  """Returns blocks for the screen: tables are aligned, drawings left out.

  Args:
    content: what to show; leads of paragraphs are left out, too.
  """
  shown = []
  for block in content:
    match block:
      case blocks.Table():
        shown.append(block.text())
      case blocks.Items(texts=texts):
        shown.append("\n".join(texts))
      case blocks.Alert(text=words):
        shown.append(f"WARNING: {words}")
      case blocks.Paragraph(text=words) | blocks.Heading(text=words):
        shown.append(words.rstrip())
  return "\n\n".join(shown)


def write(page: blocks.Page, path: pathlib.Path) -> None:
  """Writes a page as Markdown, and its drawings into files beside it.

  Args:
    page: what to write.
    path: of the Markdown file.
  """
  content = [*page.introduction, *(b for p in page.parts for b in p.blocks)]
  for block in content:
    if isinstance(block, blocks.Figure) and block.file:
      artifacts.write_atomically(path.with_name(block.file), block.svg)
  artifacts.write_atomically(path, markdown(page))


@functools.cache
def _environment() -> jinja2.Environment:
  environment = jinja2.Environment(
    loader=jinja2.PackageLoader("synthq_jax", "report/templates"),
    autoescape=jinja2.select_autoescape(["html"]),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
  )
  environment.filters["kind"] = _kind
  environment.filters["plain"] = text_tables.escaped
  return environment


def _kind(block: blocks.Block) -> str:
  if not isinstance(block, blocks.Block):
    raise ValueError(f"expected a block of a page, got {block!r}")
  return type(block).__name__
