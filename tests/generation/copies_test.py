"""Runs of words that a query has from its document."""

import time

import hypothesis
import hypothesis.strategies as st
import pytest

from synthq_jax.generation import copies

WORDS = st.lists(st.sampled_from("abc"), max_size=12)


def oracle(query, document):
  """The longest common run, by trying every run of the query."""
  joined = f" {' '.join(document)} "
  runs = [
    end - start
    for start in range(len(query))
    for end in range(start + 1, len(query) + 1)
    if f" {' '.join(query[start:end])} " in joined
  ]
  return max(runs, default=0)


@pytest.mark.parametrize(
  ("query", "document", "length"),
  [
    ("the red apples rot", "all the red apples fall", 3),
    ("red apples", "red pears and green apples", 1),
    ("a b a b c", "a b a b a b c", 5),  # goes back to a shorter run, and on
    ("a a a", "a a b a a a", 3),
    ("kept", "keptword kept", 1),
    ("", "any", 0),
    ("any", "", 0),
  ],
)
def test_the_longest_run_is_exact(query, document, length):
  assert copies.longest_run(query.split(), document.split()) == length


@hypothesis.given(query=WORDS, document=WORDS)
@hypothesis.settings(max_examples=300, deadline=None)
def test_the_longest_run_is_what_trying_all_runs_finds(query, document):
  assert copies.longest_run(query, document) == oracle(query, document)


@pytest.mark.parametrize("period", [1, 2, 1000])
def test_time_is_linear_even_for_text_that_repeats_itself(period):
  count = 30_000  # a table of all pairs would have 9e8 cells
  query = [str(i % period) for i in range(count)]
  document = [str(i % (period + 1)) for i in range(count)]
  began = time.monotonic()
  assert copies.longest_run(query, document) >= 1
  assert time.monotonic() - began < 10


def test_a_copy_has_enough_words_and_is_most_of_the_query():
  document = "Return the sum of two arrays. Both are read once."
  queries = [
    "return the SUM of two arrays",  # all six words
    "return the sum of two lists",  # five of six
    "two arrays",  # all, but short
    "how to return the sum of two arrays",  # six of eight
    "...",  # no words
  ]

  def copied(share, words):
    found = copies.are_copies(
      queries, [document] * 5, share=share, min_words=words
    )
    return found.tolist()

  assert copied(1.0, 3) == [True, False, False, False, False]
  assert copied(1.0, 2) == [True, False, True, False, False]
  assert copied(0.75, 3) == [True, True, False, True, False]
  assert copied(0.76, 6) == [True, False, False, False, False]
  assert copied(0.01, 7) == [False] * 5


def test_a_run_ends_where_the_document_goes_another_way():
  found = copies.are_copies(
    ["one two three four"], ["one two and three four"], share=0.75, min_words=1
  )
  assert found.tolist() == [False]


@pytest.mark.parametrize(
  ("share", "words"), [(0.0, 3), (1.1, 3), (float("nan"), 3), (0.5, 0)]
)
def test_settings_without_meaning_are_refused(share, words):
  with pytest.raises(ValueError, match="share in"):
    copies.are_copies(["a"], ["a"], share=share, min_words=words)


def test_a_query_without_its_document_is_refused():
  with pytest.raises(ValueError):
    copies.are_copies(["a", "b"], ["a"], share=0.5, min_words=1)
