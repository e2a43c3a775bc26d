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


def test_tasks_read_what_is_written(tmp_path):
  hard_negatives.write(tmp_path / "n.tsv", {"q1": ["d2", "d3"]})
  data = Collection(
    tuple(Document(f"d{i}", "text") for i in (1, 2, 3)),
    (Query("q1", "text"),),
    {"train": {"q1": {"d1": 1}}},
  )
  found = task_sources._negatives(tmp_path / "n.tsv", data)
  assert found == {"q1": ["d2", "d3"]}
