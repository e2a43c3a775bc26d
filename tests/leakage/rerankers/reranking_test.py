"""The order of candidates, from a reranker that a test can foresee."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax.leakage import rerankers
from synthq_jax.retrieval import trec


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Count:
  """The score is how often the query's letter stands in the document."""

  name: ClassVar[str] = "count"
  padded: ClassVar[tuple[str, ...]] = ("same",)

  def featurize(self, queries, documents):
    same = np.zeros((len(queries), 48), np.int32)
    for row, (query, text) in enumerate(zip(queries, documents, strict=True)):
      same[row, : len(text)] = [1 + (letter == query) for letter in text]
    return {"same": same}

  def score(self, params, batch, *, key=None):
    del key
    return params * jnp.sum(batch["same"] == 2, axis=1)


QUERIES = {"q1": "a", "q2": "b"}
DOCUMENTS = {"d1": "a", "d2": "aab", "d3": "b" * 30, "d10": "ba", "d4": "a"}
CANDIDATES = {
  "q1": {"d4": 9.0, "d3": 8.0, "d2": 7.0, "d10": 6.0, "d1": 5.0},
  "q2": {"d3": 2.0, "d1": 3.0},
}


def rerank(candidates=CANDIDATES, weight=1.0, **options):
  return rerankers.rerank(
    Count(), jnp.float32(weight), candidates, QUERIES, DOCUMENTS, **options
  )


def test_candidates_fall_by_score_and_equals_by_ascending_id():
  run = rerank()
  assert list(run["q1"].items()) == [
    ("d2", 2.0), ("d1", 1.0), ("d10", 1.0), ("d4", 1.0), ("d3", 0.0),
  ]  # fmt: skip
  assert list(run["q2"].items()) == [("d3", 30.0), ("d1", 0.0)]
  assert all(trec.ranking(scores) == list(scores) for scores in run.values())


def test_the_order_of_candidates_and_of_queries_changes_nothing():
  turned = {
    query: dict(reversed(CANDIDATES[query].items())) for query in ("q2", "q1")
  }
  run, other = rerank(), rerank(turned)
  assert {q: list(run[q].items()) for q in run} == {
    q: list(other[q].items()) for q in run
  }


@pytest.mark.parametrize("batch_size", [1, 2, 3, 64])
def test_the_size_of_batches_changes_nothing(batch_size):
  assert rerank(batch_size=batch_size) == rerank()


@pytest.mark.parametrize("batch_size", [3, 64])
def test_real_scores_do_not_depend_on_how_rows_are_batched(
  reranker, make_toy, batch_size
):
  import jax

  params = reranker.init(jax.random.key(0))
  candidates, queries, documents, _ = make_toy(0).collection(3, 5)
  run = rerankers.rerank(reranker, params, candidates, queries, documents)
  other = rerankers.rerank(
    reranker, params, candidates, queries, documents, batch_size=batch_size
  )
  for query in run:
    assert run[query].keys() == other[query].keys() == candidates[query].keys()
    for document, score in run[query].items():
      assert other[query][document] == pytest.approx(score, rel=1e-4, abs=1e-5)


def test_only_the_best_candidates_are_scored():
  run = rerank(depth=2)
  assert {query: set(run[query]) for query in run} == {
    "q1": {"d4", "d3"},
    "q2": {"d1", "d3"},
  }


def test_a_run_survives_its_file(tmp_path):
  run = rerank()
  trec.write_run(tmp_path / "run.trec", run)
  read = trec.read_run(tmp_path / "run.trec")
  assert {q: trec.ranking(read[q]) for q in read} == {
    q: list(run[q]) for q in run
  }


def test_a_query_without_candidates_stays_without():
  assert rerank({"q1": {}, "q2": {"d1": 1.0}}) == {"q1": {}, "q2": {"d1": 0.0}}
  assert rerank({"q1": {}}) == {"q1": {}}


@pytest.mark.parametrize(
  "candidates,message",
  [
    ({"q1": {"d7": 1.0}}, "got none for document 'd7'"),
    ({"q7": {"d1": 1.0}}, "got none for query 'q7'"),
    ({"q1": {"d1": float("nan")}}, "expected finite scores"),
  ],
)
def test_candidates_without_text_or_score_are_refused(candidates, message):
  with pytest.raises(ValueError, match=message):
    rerank(candidates)


def test_scores_that_are_not_finite_are_refused():
  with pytest.raises(ValueError, match="expected finite scores"):
    rerank(weight=float("nan"))


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"depth": 0}])
def test_sizes_below_one_are_refused(options):
  with pytest.raises(ValueError, match="batch_size and depth of at least 1"):
    rerank(**options)
