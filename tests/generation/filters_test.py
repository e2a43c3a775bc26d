import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from synthq_jax.generation import filters


def test_each_dropped_query_counts_once_under_its_first_reason():
  queries = ["what is jax", "", "what  is JAX", "cut in the", "what is jax"]
  documents = ["d1", "d1", "d1", "d1", "d2"]
  kept = filters.keep(
    queries, documents, ended=[True, False, True, False, True]
  )
  assert kept.indices.tolist() == [0, 4]
  assert kept.counts == {
    "kept": 2,
    "empty": 1,
    "truncated": 1,
    "duplicate": 1,
    "copied": 0,
    "not found": 0,
    "round trip": 0,
  }


def test_truncated_queries_stay_when_nobody_says_which_they_are():
  kept = filters.keep(["a", "b"], ["d", "d"])
  assert kept.indices.tolist() == [0, 1]
  assert kept.counts["truncated"] == 0


def test_a_truncated_query_does_not_make_a_complete_one_a_duplicate():
  kept = filters.keep(["a b", "a b"], ["d", "d"], ended=[False, True])
  assert kept.indices.tolist() == [1]


def test_blank_queries_are_empty_and_no_queries_are_fine():
  assert filters.keep([" \n\t"], ["d"]).counts["empty"] == 1
  assert filters.keep([], []).indices.tolist() == []


def test_has_ended_takes_any_leading_axes():
  tokens = np.array([[[5, 1, 0], [5, 6, 7]], [[1, 0, 0], [5, 6, 1]]])
  assert filters.has_ended(tokens, eos=1).tolist() == [
    [True, False],
    [True, True],
  ]


def test_arguments_of_different_lengths_are_refused():
  with pytest.raises(
    ValueError, match="document_ids of one length with the queries, 2, got 1"
  ):
    filters.keep(["a", "b"], ["d"])


def test_what_a_search_engine_does_not_find_goes_last_of_all_reasons():
  kept = filters.keep(
    ["a", "b", "a", ""], ["d"] * 4, answerable=[True, False, False, False]
  )
  assert kept.indices.tolist() == [0]
  assert kept.counts == {
    "kept": 1, "empty": 1, "truncated": 0, "duplicate": 1, "copied": 0,
    "not found": 1, "round trip": 0,
  }  # fmt: skip


def test_reasons_are_tried_in_their_order():
  kept = filters.keep(
    ["a", "a", "b", "c", "d", "e"],
    ["d"] * 6,
    ended=[True, True, False, True, True, True],
    copied=[False, True, True, True, False, False],
    answerable=[True, True, True, False, False, True],
    retrieved=[True, False, False, False, False, False],
  )
  assert kept.indices.tolist() == [0]
  assert kept.counts == {
    "kept": 1, "empty": 0, "truncated": 1, "duplicate": 1, "copied": 1,
    "not found": 1, "round trip": 1,
  }  # fmt: skip


def test_what_stages_took_out_adds_up():
  first = filters.keep(["a", "", "b"], ["d"] * 3, copied=[False, False, True])
  second = filters.keep(["a"], ["d"], retrieved=[False])
  assert filters.removed(first, second) == {
    "empty": 1, "truncated": 0, "duplicate": 0, "copied": 1, "not found": 0,
    "round trip": 1,
  }  # fmt: skip


@pytest.mark.parametrize("name", ["ended", "copied", "answerable", "retrieved"])
def test_a_test_result_for_each_query_is_needed(name):
  with pytest.raises(ValueError, match=f"{name} of one length"):
    filters.keep(["a", "b"], ["d", "d"], **{name: [True]})


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
  assert filters.longest_run(query.split(), document.split()) == length


@hypothesis.given(query=WORDS, document=WORDS)
@hypothesis.settings(max_examples=300, deadline=None)
def test_the_longest_run_is_what_trying_all_runs_finds(query, document):
  assert filters.longest_run(query, document) == oracle(query, document)


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
    found = filters.are_copies(
      queries, [document] * 5, share=share, min_words=words
    )
    return found.tolist()

  assert copied(1.0, 3) == [True, False, False, False, False]
  assert copied(1.0, 2) == [True, False, True, False, False]
  assert copied(0.75, 3) == [True, True, False, True, False]
  assert copied(0.76, 6) == [True, False, False, False, False]
  assert copied(0.01, 7) == [False] * 5


def test_a_run_ends_where_the_document_goes_another_way():
  found = filters.are_copies(
    ["one two three four"], ["one two and three four"], share=0.75, min_words=1
  )
  assert found.tolist() == [False]


@pytest.mark.parametrize(
  ("share", "words"), [(0.0, 3), (1.1, 3), (float("nan"), 3), (0.5, 0)]
)
def test_settings_without_meaning_are_refused(share, words):
  with pytest.raises(ValueError, match="share in|min_words >= 1"):
    filters.are_copies(["a"], ["a"], share=share, min_words=words)


def test_a_query_without_its_document_is_refused():
  with pytest.raises(ValueError):
    filters.are_copies(["a", "b"], ["a"], share=0.5, min_words=1)
