"""Hard negatives: whose they are, what the guard takes, what trains with them."""

import dataclasses
import json

import numpy as np
import pytest
import random_t5
import small_data
import tiny_runs

from synthq_jax.data import passages
from synthq_jax.pipeline import plan
from synthq_jax.stages import _mining, train_retriever
from synthq_jax.training import pairs


def collection(owners=(0, 1, 1, 2)):
  tokens = np.arange(4 * len(owners)).reshape(-1, 4) + 5
  ids = np.array([f"d {i}" for i in range(max(owners) + 1)])
  return passages.Passages(ids, tokens, np.array(owners))


RECORDS = {
  "queries": np.array([[13, 14, 1], [13, 14, 1], [5, 6, 1]]),
  "documents": np.zeros((3, 4), int),
  "rows": np.array([0, 2, 1]),
}


def mined(run, **changes):
  settings = {"per_query": 2, "skip": 0, "below": 1.0, "seed": 0} | changes
  return _mining.mined(run, collection(), RECORDS, **settings)


def test_negatives_are_ranked_high_and_never_the_own_document():
  run = {
    "0": {"d 0": 3.0, "d 2": 2.0, "d 1": 1.0},
    "1": {"d 2": 9.0, "d 0": 8.0, "d 1": 1.0},
    "2": {"d 1": 5.0, "d 0": 2.0},
  }
  found = mined(run)
  assert found[:2].tolist() == [[2, 1], [0, 1]]
  assert found[2, 0] == 0
  near = mined(run, per_query=1, below=0.8)
  assert near[:, 0].tolist()[:2] == [2, 1]  # d 0 comes too near in query 1


def test_a_query_whose_document_is_not_found_gets_drawn_ones():
  nothing = mined({"0": {}, "1": {"d 0": 1.0}})
  drawn = np.random.default_rng([0, 7]).integers(3, size=(3, 2))
  own = RECORDS["rows"][:, None]
  assert (drawn == own).any() and not (nothing == own).any()
  np.testing.assert_array_equal(nothing[drawn != own], drawn[drawn != own])
  np.testing.assert_array_equal(nothing, mined({}))


def test_the_passage_most_like_the_query_stands_for_a_document():
  batch = _mining.with_negatives(
    RECORDS, collection(), np.array([[1], [1], [1]])
  )
  assert batch["negatives"].shape == (3, 1, 4)
  taken = batch["negatives"][np.array([0, 2])]
  assert taken.tolist() == [[[13, 14, 15, 16]], [[9, 10, 11, 12]]]
  assert batch["negative_rows"].tolist() == [[1], [1], [1]]


def test_a_retriever_is_trained_with_what_it_mined(tmp_path, monkeypatch):
  miners = ("bm25", "itself")
  source = small_data.write_pairs(tmp_path / "log.jsonl", 60)
  config = tiny_runs.config(
    source,
    checkpoint=random_t5.save(tmp_path / "t5"),
    rows=plan.Rows(synthetic=(), direct_dp=(), original=False),
  )
  config = dataclasses.replace(
    config,
    train_retriever=train_retriever.Config(
      steps=4,
      batch_size=8,
      warmup_steps=1,
      miners=miners,
      hard_negatives=2,
      microbatch_size=4,
    ),
  )
  starts = []
  train = pairs.train

  def watched(*args, first, **options):
    starts.append(first)
    return train(*args, first=first, **options)

  monkeypatch.setattr(pairs, "train", watched)
  root = tmp_path / "run"
  plan.run(config, root, stages=["train_retriever"], progress=False)
  folder = root / "train_retriever/public_only"
  logs = folder.glob("metrics_*.jsonl")
  (last,) = (path for path in logs if ".part_" not in path.name)
  lines = [json.loads(line) for line in last.read_text().splitlines()]
  assert lines[-1]["step"] == 4 / len(miners)
  assert starts == [0, 2][: len(miners)]
  assert len(list(folder.glob("metrics_*.part_*.jsonl"))) == len(miners) - 1
  assert not list((root / "private/train_retriever").rglob("vectors"))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"steps": 30}, "steps must be more than warmup_steps=30 in each of 1"),
    ({"steps": 60, "miners": ("bm25", "itself")}, "in each of 2 parts, got 60"),
    ({"miners": ("tfidf",)}, "miners must be of bm25, itself"),
    ({"mining_below": 1.5}, r"mining_below in \(0, 1\]"),
    ({"hard_negatives": 0}, "hard_negatives must be at least 1"),
    ({"batch_size": 10, "microbatch_size": 4}, "must divide batch_size=10"),
  ],
)
def test_settings_that_mine_nothing_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    train_retriever.Config(**changes)
