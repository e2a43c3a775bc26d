import math

import pytest

from synthq_jax.data import sentences


def test_a_text_is_split_after_full_stops_that_a_capital_follows():
  parts = ["It is 3.5 m long, e.g. here.", "So:", '"Yes!" no more.']
  assert sentences.split(" ".join(parts)) == parts
  assert sentences.split("Note:\n 'It' is.") == ["Note:", "'It' is."]


def test_words_weigh_the_log_of_their_inverse_frequency():
  texts = [("A cat.", "The cat!"), ("A dog.",), ("A cat and a dog.",)]
  assert sentences.compute_idf(texts) == pytest.approx(
    {
      "a": 0.0,
      "cat": math.log(3 / 2),
      "dog": math.log(3 / 2),
      "the": math.log(3),
      "and": math.log(3),
    }
  )


SENTENCES = (
  "The cat sat on the red mat today.",  # cat, mat, red, the: 4 of 7 words
  "A cat likes a mat that is red.",  # cat, mat, red: 3 of 7 words
  "Dogs run across the wide field every single morning.",  # the: 1 of 9
)
EVEN = dict.fromkeys(" ".join(SENTENCES).lower().replace(".", "").split(), 1.0)


def test_the_telling_sentence_shares_most_weight_with_the_others():
  choose = sentences.choose
  assert choose(SENTENCES, EVEN) == 0
  assert choose(SENTENCES[::-1], EVEN) == 2
  # Without the words cat and mat: 2 of 5 words against 1 of 5 and 1 of 9.
  assert choose(SENTENCES, EVEN | {"cat": 0, "mat": 0}) == 0
  # Without "the": 3 of 6 words against 3 of 7; a heavy "sat" turns that round.
  assert choose(SENTENCES, EVEN | {"the": 0, "sat": 9}) == 1


def test_the_telling_sentence_must_reach_the_share_asked_for():
  choose = sentences.choose
  assert choose(SENTENCES, EVEN, min_share=4 / 7 - 0.001) == 0
  assert choose(SENTENCES, EVEN, min_share=4 / 7 + 0.001) is None
  nothing_shared = EVEN | dict.fromkeys(("cat", "mat", "red", "the"), 0)
  assert choose(SENTENCES, nothing_shared) is None
  assert choose([], {}) is None


def test_the_telling_sentence_reads_like_one():
  choose = sentences.choose
  first, second, third = SENTENCES
  assert choose((first.rstrip("."), second, third), EVEN) == 1
  long = f"{first[:-1]} {'cat mat red ' * 5}."
  assert choose((long, second, third), EVEN) == 1
  assert choose(("Red cat mat.", third, "A red cat has a mat."), EVEN) == 2
  assert choose((first, second), EVEN) is None  # 8 words are no rest
