"""Builds pages from sections, and renders them as HTML, Markdown and text.

A section's builder takes the values of its page. The shareable page has sections
that take the values selected for it (`values.Shareable`), so none can see more.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from synthq_jax import extras, text_tables
from synthq_jax.report import blocks
from synthq_jax.storage import artifacts

with extras.required("run"):
  import jinja2

__all__ = ["Section", "html", "markdown", "parts", "text", "write"]


_Values = TypeVar("_Values")
_Seen = TypeVar("_Seen", contravariant=True)


@dataclasses.dataclass(frozen=True)
class Section(Generic[_Seen]):
  """A part of a page before it is built.

  Formal guarantee:
    A section is a function of its values alone. The caller of `parts` decides
    whether these may be shared.
  """

  name: str
  """Title of the part."""
  build: Callable[[_Seen], Sequence[blocks.Block]]
  """Returns the blocks of the part from the values of its page.

  Without blocks the part is left out.
  """


def parts(
  sections: Iterable[Section[_Values]], values: _Values
) -> tuple[blocks.Part, ...]:
  """Builds the sections of one page.

  Args:
    sections: sections of the page, in order.
    values: values of the page. For the shareable page they must hold nothing
      private, since sections filter nothing.

  Returns:
    The parts of the page in order; sections without blocks are left out.
  """
  return tuple(
    blocks.Part(title=section.name, blocks=tuple(content))
    for section in sections
    if (content := section.build(values))
  )


def html(page: blocks.Page) -> str:
  """Renders a page as one HTML document; all text is escaped, drawings are not.

  The document has no script, and loads no font and no picture from elsewhere.

  Args:
    page: the page to render.
  """
  document = _make_environment().get_template("page.html").render(page=page)
  return text_tables.without_controls(document)


def markdown(page: blocks.Page) -> str:
  """Renders a page as Markdown; text that looks like markup is escaped.

  Args:
    page: the page to render. A drawing becomes its caption and, if it has a file,
      a link to that.
  """
  return _make_environment().get_template("page.md").render(page=page)


def text(content: Iterable[blocks.Block]) -> str:
  """Renders blocks for the screen, without drawings and leads of paragraphs.

  Args:
    content: the blocks, in order.
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
  """Writes a page as Markdown, and its drawings into files of the same folder.

  Args:
    page: the page to write.
    path: path of the Markdown file.
  """
  content = [*page.introduction, *(b for p in page.parts for b in p.blocks)]
  for block in content:
    if isinstance(block, blocks.Figure) and block.file:
      artifacts.write_atomically(path.with_name(block.file), block.svg)
  artifacts.write_atomically(path, markdown(page))


@functools.cache
def _make_environment() -> jinja2.Environment:
  environment = jinja2.Environment(
    loader=jinja2.PackageLoader("synthq_jax", "report/templates"),
    autoescape=jinja2.select_autoescape(["html"]),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
  )
  environment.filters["kind"] = _get_kind
  environment.filters["plain"] = text_tables.escaped
  return environment


def _get_kind(block: blocks.Block) -> str:
  if not isinstance(block, blocks.Block):
    raise ValueError(f"expected a block of a page, got {block!r}")
  return type(block).__name__
