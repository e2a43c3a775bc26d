"""Builds pages from sections, and renders them as HTML, Markdown and text.

The parameter names of a section's builder select the values that it gets. A section
is private unless it is marked shareable. The shareable page is built from shareable
sections, and from values that were selected for it, so no section can see more.
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
  """A part of a page before it is built.

  Formal guarantee:
    A section with `shareable` is a function of its values alone. The caller of
    `parts` decides whether these may be shared.
  """

  name: str
  """Title of the part."""
  build: Callable[..., Sequence[blocks.Block]]
  """Returns the blocks of the part from the values that its parameters name.

  Without blocks the part is left out.
  """
  shareable: bool = False
  """True for a part of the shareable page, False for one of the private page."""


def parts(
  sections: Iterable[Section],
  values: Mapping[str, Any],
  *,
  shareable: bool = False,
) -> tuple[blocks.Part, ...]:
  """Builds the sections of one page.

  Args:
    sections: sections of both pages, in order.
    values: values by parameter name. For the shareable page they must hold
      nothing private, since sections filter nothing.
    shareable: whether to build the shareable page, else the private one.

  Returns:
    The parts of the page in order; sections without blocks are left out.

  Raises:
    ValueError: if a section needs a value that is missing.
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
