import pytest
from hypothesis import given
from hypothesis import strategies as st

from synthq_jax.federated import sentences


@pytest.mark.parametrize(
  "text, expected",
  [
    ("One is here. Two is not.", ["One is here.", "Two is not."]),
    ("Really?! Yes. (It is.) So.", ["Really?!", "Yes.", "(It is.)", "So."]),
    ('He said "no." Then he left.', ['He said "no."', "Then he left."]),
    ("See Dr. Doe, e.g. at 5 p.m. on Monday.", None),
    ("It weighs 2.5 kg. 3 of 4 do.", ["It weighs 2.5 kg.", "3 of 4 do."]),
    ("Take no. 5 of them. She said no. He ran.", None),
    ("Ask Rep. Doe or a rep. Then go.", ["Ask Rep. Doe or a rep.", "Then go."]),
    ("J. R. R. Doe wrote of E. coli, cf. p. 3.", None),
    ("The U.S. Army is large.", None),
    ("It is in the U.S. It grows.", ["It is in the U.S.", "It grows."]),
    ("1. Wash. 2. Rinse well.", ["1. Wash.", "2. Rinse well."]),
    ("Signs: - Fever. - A rash.", ["Signs: - Fever.", "A rash."]),
    ("Signs include - fever - a rash", ["Signs include - fever - a rash"]),
    ("- well-known\n\n* item", ["well-known", "item"]),
    ("a wrapped\nline. Next", ["a wrapped\nline.", "Next"]),
    ("Wait... what? ... Fine.", ["Wait... what?", "Fine."]),
    ("", []),
    (" - ... !", []),
  ],
)
def test_a_sentence_ends_where_a_reader_would_end_it(text, expected):
  if text.startswith("Take no."):  # one word, an abbreviation and a word
    expected = ["Take no. 5 of them.", "She said no.", "He ran."]
  assert sentences.split(text) == ([text] if expected is None else expected)


def test_a_long_sentence_is_cut_before_an_item_then_behind_marks():
  items = "w1 w2 - w3 w4; w5 w6, w7"
  assert sentences.split(items, max_words=4) == ["w1 w2 - w3", "w4; w5 w6, w7"]
  assert sentences.split("a b c - d e f", max_words=4) == ["a b c", "d e f"]
  assert sentences.split("a b c; d, e f", max_words=4) == ["a b c;", "d, e f"]
  assert sentences.split("a b c, d e f", max_words=4) == ["a b c,", "d e f"]
  assert sentences.split("a b c d e f", max_words=4) == ["a b c d", "e f"]


@given(
  st.text(alphabet="aB1.?!-*,;() \n\u201d", max_size=200), st.integers(1, 7)
)
def test_sentences_cover_each_letter_once_in_order(text, max_words):
  places = sentences.spans(text, max_words=max_words)
  flat = [place for pair in places for place in pair]
  assert flat == sorted(flat)
  covered = "".join(text[start:end] for start, end in places)
  letters = [c for c in text if c.isalnum()]
  assert [c for c in covered if c.isalnum()] == letters
  for start, end in places:
    assert text[start:end] == text[start:end].strip()
    assert len(text[start:end].split()) <= max_words


def test_a_limit_below_one_word_is_refused():
  with pytest.raises(ValueError, match="max_words >= 1, got max_words=0"):
    sentences.split("text", max_words=0)
