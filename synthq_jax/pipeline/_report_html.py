"""A page as one HTML file: no script, no font and no picture from elsewhere."""

import html

from synthq_jax.pipeline import _report_blocks as blocks

__all__ = ["render"]

_STYLE = """
:root {
  color-scheme: light dark;
  --ink: #1c2126; --soft: #5b6670; --line: #dfe3e8; --paper: #ffffff;
  --shade: #f6f7f9; --accent: #0b5cad; --warn: #8f1d14; --warn-paper: #fdecea;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e4e7eb; --soft: #a0aab4; --line: #3a424b; --paper: #16191d;
    --shade: #1f242a; --accent: #7db8f0; --warn: #ffb4aa; --warn-paper: #4a1813;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 60rem;
  background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue",
    Arial, sans-serif;
}
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 1rem; }
h2 {
  font-size: 1.3rem; margin: 2.75rem 0 .75rem; padding-bottom: .3rem;
  border-bottom: 1px solid var(--line);
}
h3 { font-size: 1.05rem; margin: 1.75rem 0 .5rem; }
p { margin: 0 0 .8rem; max-width: 46rem; overflow-wrap: anywhere; }
a { color: var(--accent); }
nav { margin: 1.25rem 0 0; color: var(--soft); }
nav a { margin-right: 1.1rem; white-space: nowrap; text-decoration: none; }
nav a:hover { text-decoration: underline; }
.banner {
  margin: 0 0 1.5rem; padding: .8rem 1rem; border-left: .35rem solid var(--warn);
  background: var(--warn-paper); color: var(--warn); font-weight: 600;
}
.scroll { overflow-x: auto; margin: 0 0 1.2rem; }
table { border-collapse: collapse; font-size: .92rem; line-height: 1.45; }
th, td {
  padding: .4rem .8rem .4rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); overflow-wrap: break-word;
}
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
th:not(:last-child), td:not(:last-child) { padding-right: 1.4rem; }
.number {
  text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums;
}
pre {
  margin: 0 0 1.2rem; padding: .9rem 1rem; overflow-x: auto;
  background: var(--shade); border-radius: .4rem;
  font: .82rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas,
    "DejaVu Sans Mono", monospace;
}
figure { margin: 0 0 1.4rem; }
figure svg {
  display: block; max-width: 100%; height: auto;
  background: #ffffff; border-radius: .4rem;
}
figcaption { margin-top: .5rem; color: var(--soft); font-size: .92rem; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav { display: none; }
  h2, h3 { break-after: avoid; }
  tr, figure { break-inside: avoid; }
}
""".strip()


def render(page: blocks.Page) -> str:
  """Returns a self-contained HTML document, everything but figures escaped."""
  title = html.escape(page.title)
  parts = [
    "<!DOCTYPE html>",
    '<html lang="en">',
    "<head>",
    '<meta charset="utf-8">',
    '<meta name="viewport" content="width=device-width, initial-scale=1">',
    f"<title>{title}</title>",
    f"<style>\n{_STYLE}\n</style>",
    "</head>",
    "<body>",
  ]
  if page.banner:
    parts.append(f'<div class="banner">{html.escape(page.banner)}</div>')
  parts.append(f"<h1>{title}</h1>")
  parts += [_block(block) for block in page.introduction]
  parts.append(_navigation(page.sections))
  for number, section in enumerate(page.sections, 1):
    parts.append(f'<section id="section-{number}">')
    parts.append(f"<h2>{html.escape(section.title)}</h2>")
    parts += [_block(block) for block in section.blocks]
    parts.append("</section>")
  parts += ["</body>", "</html>"]
  return "\n".join(parts) + "\n"


def _navigation(sections: tuple[blocks.Section, ...]) -> str:
  links = [
    f'<a href="#section-{number}">{html.escape(section.title)}</a>'
    for number, section in enumerate(sections, 1)
  ]
  return "\n".join(["<nav>", *links, "</nav>"])


def _block(block: blocks.Block) -> str:
  match block:
    case blocks.Paragraph(text=text, lead=lead):
      bold = f"<strong>{html.escape(lead)}.</strong> " if lead else ""
      return f"<p>{bold}{html.escape(text)}</p>"
    case blocks.Heading(text=text):
      return f"<h3>{html.escape(text)}</h3>"
    case blocks.Preformatted(text=text):
      return f"<pre>{html.escape(text)}</pre>"
    case blocks.Figure(svg=svg, caption=caption):
      words = f"<figcaption>{html.escape(caption)}</figcaption>"
      return f"<figure>\n{svg}\n{words}\n</figure>"
    case blocks.Table():
      return _table(block)
  raise ValueError(f"expected a block of a report, got {block!r}")


def _table(table: blocks.Table) -> str:
  kinds = [
    ' class="number"' if title in table.numeric else ""
    for title in table.header
  ]
  lines = ['<div class="scroll"><table>', "<thead>"]
  lines += [_row("th", table.header, kinds), "</thead>", "<tbody>"]
  lines += [_row("td", row, kinds) for row in table.rows]
  return "\n".join([*lines, "</tbody>", "</table></div>"])


def _row(tag: str, cells: tuple[str, ...], kinds: list[str]) -> str:
  inside = "".join(
    f"<{tag}{kind}>{html.escape(cell)}</{tag}>"
    for cell, kind in zip(cells, kinds, strict=True)
  )
  return f"<tr>{inside}</tr>"
