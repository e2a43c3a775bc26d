"""Memorisation: hand-computed ranks, scores and offsets."""

import pytest

from synthq_jax.leakage import memorization

RUN = {
  "q1": {"a": 5.0, "b": 4.0, "c": 3.0, "d": 2.0},
  "q2": {"x": 1.0, "y": 0.5},
}


def test_ranks_offsets_and_scores_are_means_over_a_querys_leaks():
  found = memorization.measure(
    RUN, [("q1", "b", "d"), ("q1", "a", "c"), ("q2", "y", "x")]
  )
  assert found.ranks == {"q1": 1.5, "q2": 2.0}
  assert found.offsets == {"q1": 2.0, "q2": -1.0}
  assert found.scores == {"q1": 4.5, "q2": 0.5}


def test_a_document_outside_of_the_top_100_has_rank_101_and_no_score():
  deep = {"q": {f"d{i}": 200.0 - i for i in range(150)}}
  found = memorization.measure(deep, [("q", "d99", "d0")])
  assert found.ranks == {"q": 100.0} and found.offsets == {"q": -99.0}
  found = memorization.measure(deep, [("q", "d100", "d0"), ("q", "d0", "no")])
  assert found.ranks == {"q": (101 + 1) / 2}
  assert found.offsets == {"q": (-100 + 100) / 2}
  assert found.scores == {"q": 200.0}
  nowhere = memorization.measure({}, [("q", "d", "e")])
  assert nowhere.ranks == {"q": 101.0} and nowhere.offsets == {"q": 0.0}
  assert nowhere.scores == {}


def test_the_rank_of_equal_scores_is_that_of_the_run():
  found = memorization.measure({"q": {"b": 1.0, "a": 1.0}}, [("q", "a", "b")])
  assert found.ranks == {"q": 2.0}


def test_no_leaks_are_refused():
  with pytest.raises(ValueError, match="got none"):
    memorization.measure(RUN, [])


def test_repetitions_are_averaged_query_by_query():
  found = memorization.average([{"a": 1.0, "b": 3.0}, {"b": 1.0, "a": 2.0}])
  assert found == {"a": 1.5, "b": 2.0}
  for wrong in ([], [{"a": 1.0}, {"b": 1.0}]):
    with pytest.raises(ValueError, match="same queries"):
      memorization.average(wrong)
