import re

import pytest

from synthq_jax import text_tables


def test_columns_are_aligned_left_but_for_numbers():
  table = text_tables.Table(
    header=("name", "n", "note"),
    rows=(("long one", "1.5", "x"), ("b", "10", "")),
    numeric=("n",),
  )
  assert table.text() == (
    "name        n  note\n--------  ---  ----\nlong one  1.5  x\nb          10"
  )


def test_what_no_terminal_could_show_becomes_a_question_mark():
  table = text_tables.Table(header=("é\n b",), rows=(("…",),))
  assert table.text() == "? b\n---\n?"


@pytest.mark.parametrize(
  "text", ["`a`", "a|b", "*a*", "<a>", "[a](b)", "a\nb", "\\|", "# a"]
)
def test_markdown_cells_stay_one_cell(text):
  table = text_tables.Table(header=("t*", "u"), rows=((text, "v"),))
  title, rule, line = table.markdown().splitlines()
  assert (title, rule) == (r"| t\* | u |", "| --- | --- |")
  assert len(re.split(r"(?<!\\)(?:\\\\)*\|", line)) == 4


def test_no_text_begins_a_list_or_controls_a_terminal():
  for text in ("1. one", "2) two", "- three", "+ four", "---", ". five"):
    escaped = text_tables.escaped(text)
    assert escaped.replace("\\", "") == text and escaped != text
  for text in ("-0.24", "+0.018", "1.5", "-", "3"):
    assert text_tables.escaped(text) == text
  assert text_tables.escaped("a\x00b\x1b[0m\tc") == "a\ufffdb\ufffd\\[0m c"
