import pytest

from synthq_jax.data import task_sources
from synthq_jax.data.collection import Collection, Document, Query
from synthq_jax.retrieval import hard_negatives

RUN = {
  "q1": {"d3": 1.0, "d1": 4.0, "d2": 3.0, "q1": 2.0},
  "q2": {"d1": 1.0},
  "q3": {"d2": 1.0},
}
QRELS = {"q1": {"d1": 2, "d2": 0}, "q2": {"d1": 1}, "q9": {"d1": 1}}


def test_negatives_are_the_best_that_are_not_relevant():
  assert hard_negatives.mine(RUN, QRELS) == {"q1": ["d2"]}
  assert hard_negatives.mine(RUN, QRELS, per_query=5) == {"q1": ["d2", "d3"]}
  assert hard_negatives.mine(RUN, QRELS, skip=1) == {"q1": ["d3"]}
  assert hard_negatives.mine(RUN, QRELS, skip=2) == {}


@pytest.mark.parametrize("bad", [{"per_query": 0}, {"skip": -1}])
def test_counts_out_of_range_are_refused(bad):
  with pytest.raises(
    ValueError, match="expected per_query >= 1|expected skip >= 0"
  ):
    hard_negatives.mine(RUN, QRELS, **bad)


@pytest.mark.parametrize(
  ("below", "expected"),
  [(None, ["a", "b", "c", "d"]), (1.0, ["c", "d"]), (0.5, ["d"]), (0.1, [])],
)
def test_what_comes_near_to_the_relevant_is_no_negative(below, expected):
  run = {"q": {"a": 9.0, "own": 4.0, "b": 4.0, "c": 3.9, "d": 1.9}}
  found = hard_negatives.mine(run, {"q": {"own": 1}}, per_query=9, below=below)
  assert found.get("q", []) == expected


def test_negative_scores_have_a_guard_too_and_what_is_not_found_has_none():
  run = {"q": {"own": -1.0, "b": -1.05, "c": -1.2}, "lost": {"a": 1.0}}
  qrels = {"q": {"own": 1}, "lost": {"own": 1}}
  found = hard_negatives.mine(run, qrels, per_query=9, below=0.9)
  assert found == {"q": ["c"]}
  with pytest.raises(ValueError, match="below=0"):
    hard_negatives.mine(run, qrels, below=0)


def test_tasks_read_what_is_written(tmp_path):
  hard_negatives.write(tmp_path / "n.tsv", {"q1": ["d2", "d3"]})
  data = Collection(
    tuple(Document(f"d{i}", "text") for i in (1, 2, 3)),
    (Query("q1", "text"),),
    {"train": {"q1": {"d1": 1}}},
  )
  found = task_sources._negatives(tmp_path / "n.tsv", data)
  assert found == {"q1": ["d2", "d3"]}
