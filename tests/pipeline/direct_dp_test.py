"""Direct DP training: what each method trains, claims and refuses."""

import dataclasses
import json

import numpy as np
import pytest
import tiny_runs

from synthq_jax import artifacts
from synthq_jax.data import shipped
from synthq_jax.models import t5_checkpoints
from synthq_jax.pipeline import inputs, plan, results, workspace
from synthq_jax.privacy import sensitivity
from synthq_jax.stages import direct_dp

_EPSILON = 8.0
_BASE = direct_dp.Config(steps=2, batch_size=8, public_negatives=5)
_HEAD = {"projection": True, "trained": "projection/.*"}
_METHODS = (
  dataclasses.replace(_BASE, label="batch"),
  dataclasses.replace(_BASE, label="group", method="group", group_size=4),
  dataclasses.replace(_BASE, label="row", method="row"),
  dataclasses.replace(
    _BASE, label="text", method="row", negatives="batch", unit="query"
  ),
  dataclasses.replace(
    _BASE, label="logit", method="logit", temperature=1.0, **_HEAD
  ),
)


def _lines(count: int) -> list[str]:
  rng = np.random.default_rng(0)
  words = "otter violin glacier saffron turbine lagoon compass".split()
  lines = []
  for number in range(count):
    first, second = rng.choice(words, 2, replace=False)
    document = f"Report {number} is about the {first} and the {second}."
    query = f"report {number} on the {first}"
    lines.append(json.dumps({"query": query, "document": document}))
  return lines


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  folder = tmp_path_factory.mktemp("direct")
  source = folder / "pairs.jsonl"
  source.write_text("\n".join(_lines(60)) + "\n")
  config = tiny_runs.config(
    f"jsonl:{source}",
    direct_dp_methods=_METHODS,
    rows=plan.Rows(bm25=False, public_only=False, original=False, synthetic=()),
  )
  root = folder / "run"
  plan.run(config, root, stages=["evaluate"], progress=False)
  return root


def _made(root, label: str) -> results.Checkpoint:
  place = root / f"train_retriever/direct_dp_{label}_eps8"
  return artifacts.load(place, results.Checkpoint)


def _prepared(root) -> results.PreparedData:
  place = root / results.PRIVATE / "prepare_data"
  return artifacts.load(place, results.PreparedData)


@pytest.mark.parametrize("config", _METHODS, ids=lambda one: one.label)
def test_every_method_trains_to_its_target_and_is_evaluated(finished, config):
  made = _made(finished, config.label)
  assert 0.9 * _EPSILON < made.statement.epsilon <= _EPSILON
  assert made.steps == 2
  place = finished / f"private/evaluate/test/direct_dp_{config.label}_eps8"
  scores = artifacts.load(place, results.Evaluation)
  assert 0 <= scores.measures["nDCG@10"].mean <= 1


def test_noise_is_scaled_to_what_each_method_can_move(finished):
  norm = _BASE.clip_norm
  releases = {
    one.label: _made(finished, one.label).statement.ledger[0]
    for one in _METHODS
  }
  softmax = sensitivity.softmax(
    max_batch_size=releases["logit"].max_batch_size,
    temperature=1.0,
    l2_clip_norm=norm,
    relation="ADD_OR_REMOVE_ONE",
    unit="pair",
  )
  expected = {
    "batch": 2 * norm,
    "group": 2 * norm,
    "row": norm,
    "text": norm,
    "logit": softmax,
  }
  for label, release in releases.items():
    assert release.l2_clip_norm == norm
    assert release.l2_sensitivity == pytest.approx(expected[label], rel=1e-12)


def test_rows_against_their_batch_claim_the_texts_alone(finished):
  claims = {one.label: _made(finished, one.label).statement for one in _METHODS}
  text = claims.pop("text")
  assert text.unit == "query text"
  assert text.relation == "REPLACE_SPECIAL"
  assert text.ledger[0].sampling == "fixed_order"
  assert any("texts of the queries alone" in s for s in text.not_protected)
  for label, claim in claims.items():
    assert claim.unit == "query", label
    assert claim.relation == "ADD_OR_REMOVE_ONE", label
    assert claim.ledger[0].sampling == "poisson", label


def test_a_head_leaves_everything_else_as_it_was(finished):
  start, _ = t5_checkpoints.load(shipped.DIRECTORY)
  trained, _ = t5_checkpoints.load(
    finished / "train_retriever/direct_dp_logit_eps8"
  )
  start, trained = map(t5_checkpoints.flatten, (start, trained))
  kernel = trained.pop("projection/kernel")
  for path, values in trained.items():
    np.testing.assert_array_equal(values, start[path])
  assert _made(finished, "logit").num_parameters == kernel.size
  assert np.abs(kernel - np.eye(len(kernel))).max() > 0


def test_groups_go_by_content_so_that_nobody_moves_who_stays(finished):
  space = workspace.Workspace(finished, 7)
  pairs = inputs.real_pairs(space, _prepared(finished))
  keys = direct_dp.keys(pairs, "pair")
  fewer = {name: np.delete(values, 3, axis=0) for name, values in pairs.items()}
  np.testing.assert_array_equal(
    direct_dp.keys(fewer, "pair"), np.delete(keys, 3)
  )
  assert len(set(keys)) == len(keys)
  other = {**pairs, "rows": pairs["rows"] + 1}
  assert (direct_dp.keys(other, "pair") != keys).all()


def test_a_text_that_becomes_empty_stays_in_the_group_of_its_document(finished):
  space = workspace.Workspace(finished, 7)
  pairs = inputs.real_pairs(space, _prepared(finished))
  empty = {**pairs, "queries": np.zeros_like(pairs["queries"])}
  keys = direct_dp.keys(pairs, "query")
  np.testing.assert_array_equal(direct_dp.keys(empty, "query"), keys)
  assert len(set(keys)) == len(set(pairs["rows"]))


def test_public_negatives_are_drawn_without_the_private_pairs(finished):
  space = workspace.Workspace(finished, 7)
  draw = direct_dp._public_negatives(_METHODS[2], space, _prepared(finished))
  train = finished / "private/prepare_data/train.npz"
  before, kept = draw(3), train.read_bytes()
  train.unlink()
  try:
    draw = direct_dp._public_negatives(_METHODS[2], space, _prepared(finished))
    after = draw(3)
  finally:
    train.write_bytes(kept)
  for name, values in before.items():
    np.testing.assert_array_equal(values, after[name])
  assert len(set(before["public_negative_ids"])) == 5
  assert (draw(4)["public_negative_ids"] != before["public_negative_ids"]).any()
  assert direct_dp._public_negatives(_METHODS[3], space, None) is None


def test_two_methods_need_two_names():
  with pytest.raises(ValueError, match="must have different labels"):
    plan.RunConfig(direct_dp_methods=(_BASE, _BASE))


def test_a_pattern_that_matches_nothing_is_refused(finished):
  space = workspace.Workspace(finished, 7)
  with pytest.raises(ValueError, match="trained must match a parameter"):
    tiny_runs.make(
      direct_dp.STAGE,
      dataclasses.replace(_BASE, trained="projection/.*"),
      space,
      prepared=_prepared(finished),
      encoder=shipped.DIRECTORY,
      epsilon=8.0,
    )
