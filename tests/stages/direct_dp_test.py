"""Direct DP training: what each method trains, claims and refuses."""

import dataclasses
import types

import finished_runs
import made_up
import numpy as np
import pytest
import random_t5
import small_data
import tiny_runs

from synthq_jax import stages
from synthq_jax.data import shipped
from synthq_jax.models import t5_checkpoints
from synthq_jax.privacy import sensitivity
from synthq_jax.privacy import unit as unit_lib
from synthq_jax.runtime import (
  encoder_start,
  private_training,
  results,
  stage,
  training_pairs,
  workspace,
)
from synthq_jax.stages import direct_dp, plan, static_encoder
from synthq_jax.storage import artifacts
from synthq_jax.training import mesh as mesh_lib

_EPSILON = 8.0
_METHODS = finished_runs.DIRECT_METHODS
_BASE = _METHODS["direct_dp"]


def _made(run, name: str) -> results.Checkpoint:
  place = run.root / f"train_retriever/{name}_eps8"
  if name == "direct_dp_group":  # only compared
    place = run.root / results.PRIVATE / f"train_retriever/{name}_eps8"
  return artifacts.load(place, results.Checkpoint)


def _prepared(run) -> results.PreparedData:
  place = run.root / results.PRIVATE / "prepare_data"
  return artifacts.load(place, results.PreparedData)


@pytest.mark.parametrize("name", _METHODS)
def test_every_method_trains_to_its_target_and_is_evaluated(finished_run, name):
  made = _made(finished_run, name)
  assert 0.9 * _EPSILON < made.statement.epsilon <= _EPSILON
  assert made.steps == 2
  place = finished_run.root / f"private/evaluate/test/{name}_eps8"
  scores = artifacts.load(place, results.Evaluation)
  assert 0 <= scores.measures["nDCG@10"].mean <= 1


def test_noise_is_scaled_to_what_each_method_can_move(finished_run):
  norm = _BASE.clip_norm
  releases = {
    name: _made(finished_run, name).statement.ledger[0] for name in _METHODS
  }
  softmax = sensitivity.softmax(
    max_batch_size=releases["direct_dp_logit"].max_batch_size,
    temperature=1.0,
    l2_clip_norm=norm,
    relation="ADD_OR_REMOVE_ONE",
    unit="pair",
  )
  expected = {
    "direct_dp": 2 * norm,
    "direct_dp_example": norm
    * (2 * releases["direct_dp_example"].max_batch_size - 1),
    "direct_dp_group": 2 * norm,
    "direct_dp_row": norm,
    "direct_dp_text": norm,
    "direct_dp_logit": softmax,
  }
  for name, release in releases.items():
    assert release.l2_clip_norm == norm
    assert release.l2_sensitivity == pytest.approx(expected[name], rel=1e-12)


def test_rows_against_their_batch_claim_the_texts_alone(finished_run):
  claims = {name: _made(finished_run, name).statement for name in _METHODS}
  text = claims.pop("direct_dp_text")
  assert text.unit == unit_lib.QUERY_TEXT
  assert text.relation == "REPLACE_SPECIAL"
  assert text.ledger[0].sampling == "fixed_order"
  assert "texts_alone" in text.not_protected
  for name, claim in claims.items():
    assert claim.unit == unit_lib.QUERY, name
    assert claim.relation == "ADD_OR_REMOVE_ONE", name
    assert claim.ledger[0].sampling == "poisson", name


def test_a_head_leaves_everything_else_as_it_was(finished_run):
  start, _ = t5_checkpoints.load(finished_run.config.checkpoint)
  trained, _ = t5_checkpoints.load(
    finished_run.root / "train_retriever/direct_dp_logit_eps8"
  )
  start, trained = map(t5_checkpoints.flatten, (start, trained))
  kernel = trained.pop("projection/kernel")
  for path, values in trained.items():
    np.testing.assert_array_equal(values, start[path])
  assert _made(finished_run, "direct_dp_logit").num_parameters == kernel.size
  assert np.abs(kernel - np.eye(len(kernel))).max() > 0


@pytest.fixture(name="pairs")
def _pairs(finished_run):
  space = workspace.Workspace(finished_run.root, 7)
  return training_pairs.read_real(space, _prepared(finished_run))


def test_groups_go_by_content_so_that_nobody_moves_who_stays(pairs):
  keys = direct_dp.make_keys(pairs, "pair")
  fewer = {name: np.delete(values, 3, axis=0) for name, values in pairs.items()}
  np.testing.assert_array_equal(
    direct_dp.make_keys(fewer, "pair"), np.delete(keys, 3)
  )
  assert len(set(keys)) == len(keys)
  other = {**pairs, "rows": pairs["rows"] + 1}
  assert (direct_dp.make_keys(other, "pair") != keys).all()


def test_a_text_that_becomes_empty_stays_in_the_group_of_its_document(pairs):
  empty = {**pairs, "queries": np.zeros_like(pairs["queries"])}
  keys = direct_dp.make_keys(pairs, "query")
  np.testing.assert_array_equal(direct_dp.make_keys(empty, "query"), keys)
  assert len(set(keys)) == len(set(pairs["rows"]))


def read(space, prepared):
  return encoder_start.open_passages(space, prepared, None)


def test_public_negatives_are_drawn_without_the_private_pairs(
  finished_run, tmp_path
):
  row, text = _METHODS["direct_dp_row"], _METHODS["direct_dp_text"]
  prepared, root = _prepared(finished_run), finished_run.copy(tmp_path)
  space = workspace.Workspace(root, 7)
  draw = direct_dp._public_negatives(row, read(space, prepared))
  before = draw(3)
  (root / "private/prepare_data/train.npz").unlink()
  after = direct_dp._public_negatives(row, read(space, prepared))(3)
  for name, values in before.items():
    np.testing.assert_array_equal(values, after[name])
  assert len(set(before["public_negative_ids"])) == 5
  assert (draw(4)["public_negative_ids"] != before["public_negative_ids"]).any()
  assert direct_dp._public_negatives(text, None) is None


def a_run(folder, **changes):
  """Settings of a small run with static vectors."""
  return tiny_runs.config(
    small_data.write_pairs(folder / "log.jsonl", 40),
    checkpoint=str(random_t5.save(folder / "t5")),
    static_encoder=static_encoder.Config(
      dim=6, steps=2, warmup_steps=1, batch_size=8
    ),
    rows=plan.Rows(synthetic=(), original=True, direct_dp=(_EPSILON,)),
    direct_dp=direct_dp.Config(
      **{"method": "row", "public_negatives": 8, "steps": 2, **changes}
    ),
  )


@pytest.mark.parametrize("part", ["example", "row", "logit on a head"])
def test_all_devices_train_the_checkpoint_that_one_does(part, tmp_path):
  """The stage as it is run: one device, and a mesh of eight."""
  changes = {
    "example": {"method": "example", "gradients": "all"},
    "row": {},
    "logit on a head": {
      "method": "logit", "temperature": 1.0, "trained": "projection/.*",
      "projection": True,
    },
  }[part]  # fmt: skip
  found, mechanisms = [], []
  for shape in (mesh_lib.Shape(data=1), mesh_lib.Shape(data=4, fsdp=2)):
    config = a_run(
      tmp_path, **{"batch_size": 10, "mesh": shape, "clip_norm": 1.0, **changes}
    )
    root = tmp_path / f"run_{shape.fsdp}"
    plan.run(config, root, stages=["direct_dp"])
    place = root / "train_retriever/direct_dp_eps8"
    params, _ = t5_checkpoints.load(place)
    found.append(t5_checkpoints.flatten(params))
    mechanisms.append(artifacts.load(place, results.Checkpoint).statement)
  one, many = found
  for path, values in one.items():
    scale = np.abs(values).max()
    np.testing.assert_allclose(many[path], values, rtol=0, atol=1e-6 * scale)
  ledgers = [claim.ledger[0] for claim in mechanisms]
  assert ledgers[0].l2_sensitivity == ledgers[1].l2_sensitivity
  assert ledgers[0].max_batch_size == ledgers[1].max_batch_size


def test_public_queries_are_written_by_a_public_checkpoint_alone(
  finished_run, tmp_path
):
  # Else what follows from them would be called public.
  made = finished_run.root / "train_retriever/direct_dp_eps8"
  claim = artifacts.load(made, results.Checkpoint).statement
  config = a_run(tmp_path, batch_size=8)
  t5_checkpoints.save_claim(tmp_path / "t5", claim)
  with pytest.raises(ValueError, match="expected a public checkpoint"):
    plan.run(config, tmp_path / "run", stages=["generate"])
  assert not (tmp_path / "run/generate/public_only/result.json").exists()


@pytest.mark.parametrize("most", [0, 4])
def test_noise_is_for_all_pairs_of_a_user_where_users_are_the_unit(
  most, tmp_path, monkeypatch
):
  """Nothing is trained; what is promised is asked for."""

  class Asked(Exception):  # noqa: N818
    """What a training was to promise."""

  def train(task, settings, training):
    raise Asked(
      private_training.make_claim(
        settings,
        task.folders,
        task.inputs.prepared,
        training.num_records,
        l2_clip_norm=1.0,
      )
    )

  records = {"queries": np.zeros((90, 3)), "documents": np.zeros((90, 3))}
  monkeypatch.setattr(private_training, "train", train)
  start = encoder_start.EncoderStart
  monkeypatch.setattr(start, "load_public", lambda *_: ({}, None))
  monkeypatch.setattr(encoder_start, "open_passages", lambda *_: None)
  monkeypatch.setattr(training_pairs, "read_real", lambda *_: None)
  selected = types.SimpleNamespace(select=lambda params: params)
  monkeypatch.setattr(direct_dp.encoders, "of", lambda _: selected)
  monkeypatch.setattr(direct_dp, "_split", lambda *_: ({}, {}))
  monkeypatch.setattr(direct_dp, "_records", lambda *_: records)
  fields = {"num_queries": {"train": 90}}
  if most:
    fields |= {"unit": unit_lib.user(most), "num_users": {"train": 30}}
  task = stage.Task(
    result_path="direct_dp/direct_dp_eps8",
    digest="digest",
    settings=direct_dp.Config(batch_size=8, steps=3),
    folders=workspace.Workspace(tmp_path, secret_seed=1),
    inputs=direct_dp.Inputs(
      prepared=made_up.prepared(**fields),
      encoder=start(folder=str(tmp_path)),
      epsilon=8.0,
    ),
  )
  with pytest.raises(Asked) as found:
    direct_dp.run(task)
  [promise] = found.value.args
  assert promise.sampler.group_size == max(most, 1)
  assert promise.sampler.units == (30 if most else 90)


def test_direct_training_needs_no_queries():
  assert "generate" not in stages.with_needs(["direct_dp"])
  assert "direct_dp" not in stages.with_needs(["train_retriever"])


def test_a_pattern_that_matches_nothing_is_refused(finished_run):
  space = workspace.Workspace(finished_run.root, 7)
  with pytest.raises(ValueError, match="trained must match a parameter"):
    tiny_runs.make(
      direct_dp.STAGE,
      dataclasses.replace(_BASE, trained="projection/.*"),
      space,
      inputs=direct_dp.Inputs(
        prepared=_prepared(finished_run),
        encoder=encoder_start.EncoderStart(folder=str(shipped.DIRECTORY)),
        epsilon=8.0,
      ),
    )
