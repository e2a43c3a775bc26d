import numpy as np
import pytest

from synthq_jax.federated import ranking, summaries
from synthq_jax.retrieval import significance


def scores(**ranks):
  return [
    ranking.Scores(
      client=name,
      split="test",
      sentence_ranks=np.array(each, float),
      passage_ranks=np.ones(len(each)),
    )
    for name, each in ranks.items()
  ]


SYSTEM = scores(big=[1, 1, 2, 2, 4, 4], small=[4, np.inf], none=[])


def test_clients_count_alike_in_one_mean_and_questions_in_the_other():
  found = summaries.summarise(SYSTEM, seed=0)
  big, small = 3.5 / 6, 0.125
  assert found.clients["big"].mean == pytest.approx(big)
  assert found.clients["small"].mean == pytest.approx(small)
  assert found.over_clients.mean == pytest.approx((big + small) / 2)
  assert found.over_questions.mean == pytest.approx((6 * big + 2 * small) / 8)
  assert found.num_questions == {"big": 6, "small": 2}
  assert (found.worst, found.left_out) == ("small", ("none",))


def test_intervals_are_those_of_significance_at_the_level_asked_for():
  found = summaries.summarise(
    SYSTEM, "R@1", seed=3, confidence=0.8, samples=500
  )
  values = [1.0, 1.0, 0, 0, 0, 0]
  assert found.clients["big"] == significance.bootstrap_interval(
    values, level=0.8, samples=500, seed=3
  )
  assert found.over_clients == significance.stratified_interval(
    [values, [0, 0]], level=0.8, samples=500, seed=3
  )
  assert found.clients["big"].low < found.clients["big"].high


def test_passages_have_their_own_values():
  found = summaries.summarise(SYSTEM, level="passage", seed=0)
  assert found.over_clients.mean == 1
  assert found.level == "passage"


def test_differences_are_taken_question_by_question():
  # Shuffled values would have the same means and a wider interval.
  better = scores(big=[1, 1, 1, 1, 2, 2], small=[2, 8], none=[])
  found = summaries.difference(better, SYSTEM, seed=0)
  expected = np.array([0, 0, 0.5, 0.5, 0.25, 0.25])
  assert found.clients["big"] == significance.bootstrap_interval(
    expected, seed=0
  )
  assert found.clients["small"].mean == pytest.approx((0.25 + 0.125) / 2)
  assert found.worst == "small"
  equal = summaries.difference(SYSTEM, SYSTEM, seed=0)
  assert equal.over_questions.low == equal.over_questions.high == 0


def test_systems_on_other_questions_are_not_compared():
  with pytest.raises(ValueError, match="the same clients and questions"):
    summaries.difference(SYSTEM, scores(big=[1], small=[1, 1]), seed=0)


def test_a_client_twice_or_no_question_at_all_is_refused():
  with pytest.raises(ValueError, match="each client once, got 6 scores of 3"):
    summaries.summarise([*SYSTEM, *SYSTEM], seed=0)
  with pytest.raises(ValueError, match="a client with questions, got 1"):
    summaries.summarise(scores(none=[]), seed=0)
