"""Fused runs against sums by hand, weights against planted answers."""

import math

import numpy as np
import pytest

from synthq_jax.retrieval import fusion, trec

LEXICAL = {"q": {"a": 9.0, "b": 6.0, "c": 3.0}}
DENSE = {"q": {"c": 0.8, "d": 0.6, "b": 0.4}}


def test_convex_is_the_weighted_mean_of_scores_moved_to_0_and_1():
  found = fusion.fuse(LEXICAL, DENSE, weight=0.25)["q"]
  by_hand = {
    "a": 0.75 * 1.0,
    "b": 0.75 * 0.5 + 0.25 * 0.0,
    "c": 0.75 * 0.0 + 0.25 * 1.0,
    "d": 0.25 * 0.5,
  }
  assert found == pytest.approx(by_hand)
  assert list(found) == ["a", "b", "c", "d"]


def test_queries_without_results_have_a_defined_answer():
  lexical = {"none": {}, "dense": {}, "lexical": {"a b": 2.0, "c": 1.0}}
  dense = {"none": {}, "dense": {"x": 0.1}, "alone": {"y": -0.2, "z": -0.3}}
  found = fusion.fuse(lexical, dense, weight=0.3)
  assert {query: list(ids) for query, ids in found.items()} == {
    "none": [],
    "dense": ["x"],
    "lexical": ["a b", "c"],
    "alone": ["y", "z"],
  }
  assert fusion.fuse({}, {}, weight=0.3) == {}


def test_equal_scores_are_equal_after_a_file_too(tmp_path):
  same = {"q": dict.fromkeys("abc", 7.3)}
  trec.write_run(tmp_path / "run.trec", same)
  again = trec.read_run(tmp_path / "run.trec")
  assert len(set(again["q"].values())) == 3  # what the file is for
  assert fusion.scale(again["q"]) == dict.fromkeys("abc", 1.0)


def test_results_are_cut_at_the_depth():
  found = fusion.fuse(LEXICAL, DENSE, weight=0.25, depth=2)
  assert list(found["q"]) == ["a", "b"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_scores_that_are_no_numbers_are_refused_with_their_document(value):
  with pytest.raises(ValueError, match=r"finite scores, got .* document 'd'"):
    fusion.fuse(LEXICAL, {"q": {"c": 1.0, "d": value}}, weight=0.5)


@pytest.mark.parametrize("weight", [-0.1, math.nan])
def test_a_weight_is_a_share(weight):
  with pytest.raises(ValueError, match=r"a weight in \[0, 1\]"):
    fusion.fuse(LEXICAL, DENSE, weight=weight)


def _planted(best, number=200):
  """Runs in which the right document wins above a weight of each query's own."""
  rng = np.random.default_rng(0)
  lexical, dense, qrels = {}, {}, {}
  for i in range(number):
    query = f"q{i}"
    edge = np.clip(rng.normal(best, 0.05), 0.01, 0.99)  # it wins from there
    lexical[query] = {
      "wrong": 1.0,
      "right": max(0.0, 1 - edge / (1 - edge)),
      "z": 0.0,
    }
    dense[query] = {"right": 1.0, "wrong": 0.0}
    qrels[query] = {"right": 1}
  return lexical, dense, qrels


def choose(*runs, standard_errors=1.0):
  return fusion.choose(*runs, standard_errors=standard_errors, depth=100)


def test_the_weight_that_finds_the_planted_documents_is_chosen():
  choice = choose(*_planted(0.3))
  assert 0.35 <= choice.weight <= 0.5
  scores = dict(choice.scores)
  assert scores[0.0] < scores[0.25] < scores[choice.weight]
  assert list(scores) == list(fusion.WEIGHTS)


def test_what_the_queries_cannot_tell_apart_is_decided_for_bm25():
  lexical, dense, qrels = _planted(0.3)
  equal = {query: {"right": 1.0, "wrong": 0.5} for query in qrels}
  assert choose(equal, dense, qrels).weight == 0
  few = {query: qrels[query] for query in list(qrels)[:3]}
  exact = choose(lexical, dense, qrels, standard_errors=0.0)
  near = choose(lexical, dense, qrels, standard_errors=2.0)
  assert near.weight < exact.weight
  assert choose(lexical, dense, few).weight <= exact.weight


def test_a_choice_without_judgements_is_refused():
  with pytest.raises(ValueError, match="expected judged queries"):
    choose(LEXICAL, DENSE, {})


@pytest.mark.parametrize("dense", [{"q": {1: 0.5}}, {1: {"1": 0.5}}])
def test_ids_that_are_numbers_in_one_run_are_refused(dense):
  """Document 1 of a vector index was another one than BM25's "1"."""
  with pytest.raises(ValueError, match="ids that are texts"):
    fusion.fuse({"q": {"1": 2.0}}, dense, weight=0.5)
