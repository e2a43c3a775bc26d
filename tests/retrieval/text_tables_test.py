from synthq_jax.retrieval import text_tables


def test_columns_are_aligned_left_but_for_numbers():
  text = text_tables.aligned(
    ("name", "n", "note"), [("long one", "1.5", "x"), ("b", "10", "")], ("n",)
  )
  assert text == (
    "name        n  note\n--------  ---  ----\nlong one  1.5  x\nb          10"
  )


def test_what_no_terminal_could_show_becomes_a_question_mark():
  assert text_tables.aligned(("é\n b",), [("…",)]) == "? b\n---\n?"


def test_what_looks_like_markup_is_shown_as_it_is():
  text = text_tables.markdown(("a*", "b"), [("x|y", "<b>\n_z_")])
  assert text.splitlines() == [
    r"| a\* | b |",
    "| --- | --- |",
    r"| x\|y | \<b\> \_z\_ |",
  ]
