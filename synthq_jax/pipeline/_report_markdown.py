"""A page as Markdown; what looks like markup in its texts is escaped."""

from synthq_jax.pipeline import _report_blocks as blocks
from synthq_jax.retrieval import text_tables

__all__ = ["render"]


def render(page: blocks.Page) -> str:
  """Returns the page as Markdown with pipe tables; figures are left out."""
  parts = [f"# {text_tables.escaped(page.title)}"]
  if page.banner:
    parts.append(f"> **{text_tables.escaped(page.banner)}**")
  parts += _blocks(page.introduction)
  for section in page.sections:
    parts.append(f"## {text_tables.escaped(section.title)}")
    parts += _blocks(section.blocks)
  return "\n\n".join(parts) + "\n"


def _blocks(content: tuple[blocks.Block, ...]) -> list[str]:
  return [_block(block) for block in content]


def _block(block: blocks.Block) -> str:
  match block:
    case blocks.Paragraph(text=text, lead=lead):
      bold = f"**{text_tables.escaped(lead)}.** " if lead else ""
      return bold + text_tables.escaped(text)
    case blocks.Heading(text=text):
      return f"### {text_tables.escaped(text)}"
    case blocks.Preformatted(text=text):
      # Indented, so that no run of backticks inside can end it.
      return "\n".join(f"    {line}" for line in text.splitlines())
    case blocks.Figure(caption=caption):
      return f"(Figure, in the HTML page: {text_tables.escaped(caption)})"
    case blocks.Table():
      return text_tables.markdown(block.header, block.rows, block.numeric)
  raise ValueError(f"expected a block of a report, got {block!r}")
