"""A page as Markdown; what looks like markup in its texts is escaped."""

import re

from synthq_jax.pipeline import _report_blocks as blocks

__all__ = ["render"]

_MARKUP = re.compile(r"([\\`*_\[\]<>#|~$&])")


def render(page: blocks.Page) -> str:
  """Returns the page as Markdown with pipe tables; figures are left out."""
  parts = [f"# {_escaped(page.title)}"]
  if page.banner:
    parts.append(f"> **{_escaped(page.banner)}**")
  parts += _blocks(page.introduction)
  for section in page.sections:
    parts.append(f"## {_escaped(section.title)}")
    parts += _blocks(section.blocks)
  return "\n\n".join(parts) + "\n"


def _blocks(content: tuple[blocks.Block, ...]) -> list[str]:
  return [_block(block) for block in content]


def _block(block: blocks.Block) -> str:
  match block:
    case blocks.Paragraph(text=text, lead=lead):
      bold = f"**{_escaped(lead)}.** " if lead else ""
      return bold + _escaped(text)
    case blocks.Heading(text=text):
      return f"### {_escaped(text)}"
    case blocks.Preformatted(text=text):
      # Indented, so that no run of backticks inside can end it.
      return "\n".join(f"    {line}" for line in text.splitlines())
    case blocks.Figure(caption=caption):
      return f"(Figure, in the HTML page: {_escaped(caption)})"
    case blocks.Table():
      return _table(block)
  raise ValueError(f"expected a block of a report, got {block!r}")


def _table(table: blocks.Table) -> str:
  rule = ["--:" if title in table.numeric else "---" for title in table.header]
  escaped = [[_escaped(cell) for cell in row] for row in table.rows]
  header = [_escaped(title) for title in table.header]
  return "\n".join(
    f"| {' | '.join(cells)} |" for cells in (header, rule, *escaped)
  )


def _escaped(text: str) -> str:
  """Puts text on one line and a backslash before what Markdown would read."""
  return _MARKUP.sub(r"\\\1", " ".join(text.split()))
