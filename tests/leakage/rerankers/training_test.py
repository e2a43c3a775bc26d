"""The loop around any reranker, and the order of candidates that it scores."""

import dataclasses
import json
import re
from collections import Counter
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax.leakage import rerankers
from synthq_jax.leakage.rerankers import reranker as reranker_lib
from synthq_jax.leakage.rerankers import training
from synthq_jax.retrieval import trec

RECIPE = rerankers.Recipe(steps=8, batch_size=8, learning_rate=1e-2)


class Stop(Exception):
  """Stands for the process being killed."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Linear(reranker_lib.Reranker):
  """Scores by one weight, and notes which rows it was given."""

  seen: list = dataclasses.field(default_factory=list, repr=False)
  name: ClassVar[str] = "linear"
  padded: ClassVar[tuple[str, ...]] = ("tokens",)
  objective = staticmethod(reranker_lib.softmax)

  def init(self, key):
    return {"kernel": jax.random.normal(key, (3, 1)), "bias": jnp.zeros(1)}

  def featurize(self, queries, documents):
    """The number in the document, as often as the query says."""
    rows = zip(queries, documents, strict=True)
    tokens = np.zeros((len(queries), 40), np.int32)
    for row, (query, document) in enumerate(rows):
      tokens[row, : int(query)] = int(document)
    return {"tokens": tokens}

  def logits(self, params, batch, rngs=None):
    del rngs
    tokens = batch["tokens"]
    jax.debug.callback(
      lambda x: self.seen.append(np.asarray(x)), tokens, ordered=True
    )
    inputs = jnp.stack([tokens[:, 0], tokens[:, 1], tokens[:, 2]], axis=1)
    return inputs @ params["kernel"] + params["bias"][None]


def triples(count, length=3):
  return [(str(length), str(2 * n + 1), str(2 * n + 2)) for n in range(count)]


def equal(a, b):
  return all(
    np.asarray(x).tobytes() == np.asarray(y).tobytes()
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )


def batches(recipe, found, folder, seed=0):
  """The rows of every batch of a training."""
  reranker = Linear()
  rerankers.train(reranker, found, recipe=recipe, seed=seed, directory=folder)
  jax.effects_barrier()
  return reranker.seen


def test_relevant_and_other_document_of_a_query_stand_side_by_side(tmp_path):
  for batch in batches(RECIPE, triples(20), tmp_path):
    first = batch[:, 0]
    assert (first[0::2] % 2 == 1).all()
    np.testing.assert_array_equal(first[1::2], first[0::2] + 1)


@pytest.mark.parametrize("count,epochs", [(20, 3), (200, 2)])
def test_every_instance_is_seen_once_in_every_epoch(count, epochs, tmp_path):
  recipe = rerankers.Recipe(epochs=epochs, batch_size=8)
  seen = np.concatenate(batches(recipe, triples(count), tmp_path))[0::2, 0]
  assert len(seen) == count * epochs
  assert set(Counter(seen.tolist()).values()) == {epochs}
  assert seen.tolist() != sorted(seen.tolist())


def test_another_seed_is_another_order(tmp_path):
  one, other = (
    np.concatenate(batches(RECIPE, triples(40), tmp_path / f"{seed}", seed))
    for seed in (0, 1)
  )
  assert one[:, 0].tolist() != other[:, 0].tolist()


def test_batches_of_short_texts_are_narrow(tmp_path):
  found = triples(32, length=3) + triples(32, length=40)
  recipe = rerankers.Recipe(batch_size=8)
  widths = Counter(batch.shape[1] for batch in batches(recipe, found, tmp_path))
  assert widths == {16: 8, 40: 8}


def test_a_resumed_training_equals_an_uninterrupted_one(
  make_reranker, make_toy, tmp_path, monkeypatch
):
  reranker = make_reranker("Duet")  # it has dropout, so keys matter
  found = make_toy(0).triples(20)
  step, now = training._step, {"stop": None, "count": 0}

  def counted(*args, **options):
    if now["count"] == now["stop"]:
      raise Stop
    now["count"] += 1
    return step(*args, **options)

  def run(folder):
    return rerankers.train(
      reranker, found, recipe=RECIPE, seed=3, directory=folder
    )

  whole = run(tmp_path / "whole")
  settings = training.loop.Settings
  monkeypatch.setattr(
    training.loop, "Settings", lambda **o: settings(save_seconds=0.0, **o)
  )
  monkeypatch.setattr(training, "_step", counted)
  for stop in (1, 4, 7):
    now["stop"] = stop
    with pytest.raises(Stop):
      run(tmp_path / "cut")
  now["stop"] = None
  assert equal(run(tmp_path / "cut"), whole)
  assert now["count"] == RECIPE.steps
  lines = [
    (tmp_path / name / "metrics.jsonl").read_text() for name in ("cut", "whole")
  ]
  assert lines[0] == lines[1]
  assert json.loads(lines[0].splitlines()[-1])["step"] == RECIPE.steps


def test_a_step_is_adam_on_the_clipped_gradient(
  make_reranker, make_toy, tmp_path
):
  reranker = make_reranker("KNRM")
  found = make_toy(0).triples(4)
  recipe = rerankers.Recipe(
    steps=1, batch_size=8, learning_rate=0.25, warmup=0.0
  )
  params = rerankers.train(
    reranker, found, recipe=recipe, seed=0, directory=tmp_path
  )
  before = reranker.init(jax.random.fold_in(jax.random.key(0), 0))
  moved = np.asarray(params["weights"] - before["weights"])
  # Adam's first step has the length of the learning rate in every coordinate
  # with a gradient well above its epsilon.
  np.testing.assert_allclose(np.abs(moved).max(), 0.25, rtol=1e-3)


def test_nothing_to_train_on_is_refused(tmp_path):
  with pytest.raises(ValueError, match="triples to train on, got none"):
    rerankers.train(Linear(), [], recipe=RECIPE, seed=0, directory=tmp_path)


@pytest.mark.parametrize(
  "fields,message",
  [
    ({"batch_size": 7}, "even batch_size of at least 2"),
    ({"batch_size": 0}, "even batch_size of at least 2"),
    ({"epochs": 0}, "epochs=0"),
    ({"steps": 0}, "steps=0"),
    ({"warmup": 1.0}, "warmup in [0, 1), got warmup=1.0"),
    ({"learning_rate": 0.0}, "learning_rate=0.0"),
  ],
)
def test_recipes_out_of_range_are_refused(fields, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    rerankers.Recipe(**fields)


class Count:
  """The score is how often the query's letter stands in the document."""

  name: ClassVar[str] = "count"
  padded: ClassVar[tuple[str, ...]] = ("same",)

  def featurize(self, queries, documents):
    same = np.zeros((len(queries), 48), np.int32)
    for row, (query, text) in enumerate(zip(queries, documents, strict=True)):
      same[row, : len(text)] = [1 + (letter == query) for letter in text]
    return {"same": same}

  def score(self, params, batch):
    return params * jnp.sum(batch["same"] == 2, axis=1)


QUERIES = {"q1": "a", "q2": "b"}
DOCUMENTS = {"d1": "a", "d2": "aab", "d3": "b" * 30, "d10": "ba", "d4": "a"}
CANDIDATES = {
  "q1": {"d4": 9.0, "d3": 8.0, "d2": 7.0, "d10": 6.0, "d1": 5.0},
  "q2": {"d3": 2.0, "d1": 3.0},
}


def rerank(candidates=CANDIDATES, weight=1.0):
  return rerankers.rerank(
    Count(), jnp.float32(weight), candidates, QUERIES, DOCUMENTS
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


def test_the_size_of_batches_changes_nothing(monkeypatch):
  whole = rerank()
  monkeypatch.setattr(training, "_ROWS", 3)
  assert rerank() == whole


def test_a_query_without_candidates_stays_without():
  assert rerank({"q1": {}, "q2": {"d1": 1.0}}) == {"q1": {}, "q2": {"d1": 0.0}}
  assert rerank({"q1": {}}) == {"q1": {}}


def test_scores_that_are_not_finite_are_refused():
  with pytest.raises(ValueError, match="expected finite scores"):
    rerank(weight=float("nan"))
