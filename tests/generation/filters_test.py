import pytest

from synthq_jax.generation import filters


def test_each_dropped_query_counts_once_under_its_first_reason():
  queries = ["what is jax", "", "what  is JAX", "lost", "what is jax"]
  kept = filters.keep(
    queries,
    ["d1", "d1", "d1", "d1", "d2"],
    answerable=[True, False, False, False, True],
  )
  assert kept.indices.tolist() == [0, 4]
  assert kept.removed == {"empty": 1, "duplicate": 1, "not found": 1}


def test_a_dropped_query_does_not_make_another_one_a_duplicate():
  kept = filters.keep(["a b", "a b"], ["d", "d"], answerable=[False, True])
  assert kept.indices.tolist() == [1]


def test_blank_queries_are_empty_and_no_queries_are_fine():
  assert filters.keep([" \n\t"], ["d"]).removed["empty"] == 1
  assert filters.keep([], []).indices.tolist() == []


def test_arguments_of_different_lengths_are_refused():
  with pytest.raises(
    ValueError, match="document_ids of one length with the queries, 2, got 1"
  ):
    filters.keep(["a", "b"], ["d"])


def test_a_test_result_for_each_query_is_needed():
  with pytest.raises(ValueError, match="answerable of one length"):
    filters.keep(["a", "b"], ["d", "d"], answerable=[True])
