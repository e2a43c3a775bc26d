"""Rerankers of synthetic queries: rows, weights, and what no score says."""

import dataclasses
import math
import types

import made_up
import numpy as np
import pytest

from synthq_jax import artifacts
from synthq_jax.leakage import rerankers
from synthq_jax.pipeline import export, plan, results, system_results
from synthq_jax.retrieval import trec
from synthq_jax.stages import report, rerank, train_reranker

RECIPE = rerankers.Recipe(steps=2, batch_size=8)
SOURCES = ("original", "public_only", "synthetic_eps8")


def load(root, place, kind):
  return artifacts.load(root / place, kind)


def configured(finished_run, **changes):
  config = finished_run.config
  settings = {
    "rows": dataclasses.replace(config.rows, reranked=True),
    "test_sets": (),
    "train_reranker": train_reranker.Config(
      recipe=RECIPE, document_length=24, query_length=8
    ),
  }
  return dataclasses.replace(config, **(settings | changes))


@pytest.fixture(name="run", scope="module")
def _run(finished_run, tmp_path_factory):
  root = finished_run.copy(tmp_path_factory.mktemp("reranked"))
  plan.run(configured(finished_run), root, stages=["evaluate"], progress=False)
  return root


def test_every_set_of_pairs_has_its_reranked_row(run):
  found = (run / "private/evaluate/test").glob("reranked_*")
  names = sorted(one.name.removeprefix("reranked_") for one in found)
  assert names == sorted(SOURCES)
  assert not (run / "train_reranker/original").exists()
  for name in SOURCES:
    hidden = "private/" if name == "original" else ""
    made = load(run, f"{hidden}rerank/{name}", system_results.Reranking)
    trained = made.reranker
    assert (trained.kind, made.first_stage) == ("KNRM", "bm25")
    assert trained.directory == f"{hidden}train_reranker/{name}"
    assert made.statement.epsilon == trained.statement.epsilon
    assert math.isinf(trained.statement.epsilon) == (name == "original")
    assert made.num_queries >= 5 and len(made.scores) > 1
    assert not list((run / trained.directory).glob("state_*"))


def test_what_nobody_else_loads_is_neither_exported_nor_named_to_be_shipped(
  run, tmp_path
):
  for place in ("train_reranker/synthetic_eps8", "rerank/synthetic_eps8"):
    with pytest.raises(ValueError, match="export train_retriever/synthetic_e"):
      export.run(run / place, tmp_path / "to", format="safetensors")
  made = {
    "reranked_a": load(run, "rerank/synthetic_eps8", system_results.Reranking),
    "a_seed1": load(run, "train_retriever/synthetic_eps8", results.Checkpoint),
    "original": made_up.checkpoint(directory="private/train_retriever/x"),
  }
  systems = {k: types.SimpleNamespace(value=v) for k, v in made.items()}
  assert report._shipped(types.SimpleNamespace(systems=systems)) == ["a"]


def test_the_same_documents_stand_in_another_order(run):
  def read(name):
    folder = run / "private/evaluate/test" / name
    return trec.read_run(folder / "run.trec")

  first, again = read("bm25"), read("reranked_public_only")
  assert {q: set(one) for q, one in first.items()} == {
    q: set(one) for q, one in again.items()
  }


def test_a_fused_first_stage_and_a_set_weight(finished_run, tmp_path):
  run = finished_run.copy(tmp_path)
  config = configured(
    finished_run,
    rerank=rerank.Config(first_stage="fused", weight=1.0, depth=3),
    rows=dataclasses.replace(
      finished_run.config.rows, reranked=True, original=False
    ),
  )
  plan.run(config, run, stages=["evaluate"], progress=False)
  made = load(run, "rerank/synthetic_eps8", system_results.Reranking)
  assert (made.first_stage, made.weight, made.num_queries) == (
    "fused_synthetic_eps8",
    1.0,
    0,
  )
  scored = load(
    run,
    "private/evaluate/test/reranked_synthetic_eps8",
    results.Evaluation,
  )
  assert scored.system == "reranked"
  assert "KNRM over fused_synthetic_eps8" in scored.label


def test_a_fusion_that_is_not_there_is_refused(finished_run):
  with pytest.raises(ValueError, match=r"plan.Rows.fused=False"):
    configured(
      finished_run,
      rows=plan.Rows(reranked=True),
      rerank=rerank.Config(first_stage="fused"),
    )
  with pytest.raises(ValueError, match="Rows.reranked needs the row"):
    plan.Rows(reranked=True, bm25=False)
  with pytest.raises(ValueError, match=r"weight in \[0, 1\]"):
    rerank.Config(weight=2.0)


class _Broken(rerankers.Reranker):
  """Has no number for texts with a certain word."""

  name = "broken"
  padded = ()
  objective = staticmethod(lambda logits: logits.sum())

  def init(self, key):
    return {}

  def featurize(self, queries, documents):
    bad = ["bad" in text for text in documents]
    return {"value": np.where(bad, np.nan, 1.0).astype(np.float32)}

  def logits(self, params, batch, *, key=None):
    return batch["value"][:, None]


def test_a_reranker_without_a_number_says_where():
  queries = {"q 1": "x", "none": "y"}
  texts = {"a b": "fine", "c": "bad one", "": "fine"}
  run = {"q 1": {"a b": 1.0, "c": 0.5}, "none": {}}
  with pytest.raises(
    ValueError, match=r"broken: .* got nan for query 'q 1' and document 'c'"
  ):
    rerankers.rerank(_Broken(), {}, run, queries, texts)
  found = rerankers.rerank(_Broken(), {}, run, queries, texts, depth=1)
  assert found == {"q 1": {"a b": 1.0}, "none": {}}
