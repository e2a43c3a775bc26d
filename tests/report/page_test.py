"""Pages: HTML, Markdown and text of the same blocks; what may be shared."""

import dataclasses
import re
import xml.etree.ElementTree

import made_up
import pages
import pytest

from synthq_jax.report import blocks, page, plots, values

TABLE = blocks.Table(
  header=("a|b", "n"), rows=(("<i>x</i>", "1"), ("y & z", "12")), numeric=("n",)
)
PAGE = blocks.Page(
  title="A <title>",
  banner="Keep *this*.",
  introduction=(blocks.Paragraph(text="Hello <b>you</b>."),),
  parts=(
    blocks.Part(
      title="First & last",
      blocks=(
        blocks.Paragraph(lead="Note", text="of `code`"),
        blocks.Heading(text="Inside"),
        TABLE,
        blocks.Items(texts=("one_two", "<three>")),
      ),
    ),
    blocks.Part(
      title="Drawn",
      blocks=(
        blocks.Figure(svg="<svg></svg>", caption="In <HTML>"),
        blocks.Figure(svg="<svg/>", caption="Beside", file="page.svg"),
      ),
    ),
  ),
)


def test_html_is_whole_escaped_and_loads_nothing():
  text = page.html(PAGE)
  parsed = pages.Parser(text)
  assert parsed.texts == [
    *("A <title>", "Keep *this*.", "A <title>", "Hello <b>you</b>."),
    *("First & last", "Drawn"),  # the links
    *("First & last", "Note.", "of `code`", "Inside"),
    *("a|b", "n", "<i>x</i>", "1", "y & z", "12", "one_two", "<three>"),
    *("Drawn", "In <HTML>", "Beside"),
  ]
  assert not parsed.tags & {"script", "link", "img", "b", "i"}
  assert parsed.links == ["#section-1", "#section-2"]
  assert not re.search(r"@import|url\((?!#)", text)
  assert '<td class="number">12</td>' in text and "<svg></svg>" in text
  assert "color-scheme: light dark;" in text


def test_markdown_has_a_blank_line_between_blocks_and_no_markup_of_texts():
  assert page.markdown(PAGE) == (
    "# A \\<title\\>\n\n> **Keep \\*this\\*.**\n\nHello \\<b\\>you\\</b\\>.\n\n"
    "## First \\& last\n\n**Note.** of \\`code\\`\n\n### Inside\n\n"
    "| a\\|b | n |\n| --- | --: |\n| \\<i\\>x\\</i\\> | 1 |\n| y \\& z | 12 |\n\n"
    "- one\\_two\n- \\<three\\>\n\n## Drawn\n\n"
    "(Figure, in the HTML page: In \\<HTML\\>)\n\n![Beside](page.svg)\n"
  )


def test_text_is_for_the_screen():
  content = [block for part in PAGE.parts for block in part.blocks]
  assert page.text(content) == (
    "of `code`\n\nInside\n\n"
    "a|b        n\n--------  --\n<i>x</i>   1\ny & z     12\n\n"
    "one_two\n<three>"
  )


def test_a_page_is_written_with_its_drawings_beside_it(tmp_path):
  page.write(PAGE, tmp_path / "page.md")
  assert (tmp_path / "page.md").read_text() == page.markdown(PAGE)
  assert (tmp_path / "page.svg").read_text() == "<svg/>"


@pytest.mark.parametrize("render", [page.html, page.markdown])
def test_what_is_no_block_is_refused(render):
  odd = blocks.Page(title="", introduction=("words",))
  with pytest.raises(ValueError, match="expected a block of a page, got 'wor"):
    render(odd)


def test_a_table_has_rows_as_long_as_its_header():
  with pytest.raises(ValueError, match="expected 2 cells a row, got 1"):
    blocks.Table(header=("a", "b"), rows=(("1",),))


def test_a_section_without_blocks_is_left_out():
  sections = [
    page.Section("Open", lambda x: [blocks.Paragraph(text=f"public {x}")]),
    page.Section("Empty", lambda x: ()),
  ]
  [part] = page.parts(sections, 1)
  assert part.title == "Open"
  assert part.blocks == (blocks.Paragraph(text="public 1"),)


def test_a_shareable_section_cannot_see_what_is_private():
  names = {
    kind: {field.name for field in dataclasses.fields(kind)}
    for kind in (values.Values, values.Shareable, values.Private)
  }
  own = names[values.Private] - names[values.Values]
  assert {"main", "comparison", "audits", "leakage", "prepared"} <= own
  assert not own & names[values.Shareable]
  greedy = page.Section("x", lambda shown: shown.comparison)
  with pytest.raises(AttributeError, match="no attribute 'comparison'"):
    page.parts([greedy], made_up.shareable_values())


def test_control_characters_stay_out_of_pages_and_drawings():
  drawing = plots.curves({"a\x00b": ([1, 2], [0.1, 0.2])}, label="l\x1b")
  xml.etree.ElementTree.fromstring(drawing)
  one = blocks.Page(
    title="t\x1bt",
    parts=(blocks.Part(title="p", blocks=(blocks.Paragraph(text="x\x00y"),)),),
  )
  made = page.html(one)
  assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", made)
  assert "x\ufffdy" in made and "t\ufffdt" in made
