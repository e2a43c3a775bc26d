"""Weights that private queries teach, with DP."""

import contextlib
import dataclasses
import math
import types

import jax
import jax.numpy as jnp
import made_up
import numpy as np
import pytest
import tiny_runs

from synthq_jax import optim
from synthq_jax.data import passages
from synthq_jax.privacy import joint
from synthq_jax.privacy import unit as unit_lib
from synthq_jax.retrieval import ranking
from synthq_jax.runtime import results, system_results, workspace
from synthq_jax.runtime import rows as rows_lib
from synthq_jax.runtime import stage as stage_lib
from synthq_jax.stages import (
  _ranking,
  _search,
  learn_to_rank,
)
from synthq_jax.storage import artifacts
from synthq_jax.training import dp_step

RNG = np.random.default_rng(0)
QUERIES, ROOM = 40, 8
NUM_FEATURES = len(ranking.FEATURES)
CLIP = 0.25


RANKED = rows_lib.PUBLIC_ONLY.of_system(rows_lib.RANKED)


def batch(count=QUERIES):
  """Records whose first one has gradients beyond the clip norm."""
  candidate = np.arange(ROOM) < RNG.integers(2, ROOM + 1, size=(count, 1))
  relevant = np.arange(ROOM) == RNG.integers(0, 2, size=(count, 1))
  return {
    "values": RNG.random((count, ROOM, NUM_FEATURES), np.float32),
    "relevant": relevant,
    "candidate": candidate,
  }


def test_one_query_moves_the_sum_by_the_clip_norm_and_no_more():
  size = 40
  weights = RNG.normal(size=NUM_FEATURES).astype(np.float32)
  params, records = {"weights": jnp.asarray(weights)}, batch(size)
  clipped = jax.jit(
    optim.clipped_grad(learn_to_rank.loss_fn, l2_clip_norm=CLIP)
  )
  whole, aux = clipped(params, records)
  assert np.isfinite(aux.norms).all() and (aux.norms > 0).any()
  place = int(np.argmax(aux.norms))
  assert aux.norms[place] > CLIP
  padding = np.arange(size) == place
  less, _ = clipped(params, records, is_padding_example=padding)
  moved = float(jnp.linalg.norm(whole["weights"] - less["weights"]))
  assert moved == pytest.approx(CLIP, rel=1e-3)


def load(root, place, kind=system_results.Ranking):
  return artifacts.load(root / place, kind)


def task_of(root, row="public_only"):
  """What the stage is given for a row of a finished run."""
  return stage_lib.Task(
    result_path=f"learn_to_rank/{row}",
    row=made_up.row(f"ltr_{row}"),
    digest="digest",
    settings=learn_to_rank.Config(batch_size=16, steps=2),
    folders=workspace.Workspace(root, secret_seed=7),
    inputs=inputs_of(root, row),
  )


def inputs_of(root, row="public_only"):
  return learn_to_rank.Inputs(
    prepared=load(root, "private/prepare_data", results.PreparedData),
    retriever=load(root, f"train_retriever/{row}", results.Checkpoint),
    vectors=load(root, f"encode_documents/{row}", system_results.Vectors),
    drop_identical=True,
    left_out=0.0,
  )


def read_train(task, **options):
  inputs = task.inputs
  return _ranking.read_train(
    task.folders,
    inputs.prepared,
    drop_identical=inputs.drop_identical,
    **options,
  )


def records_of(task):
  """The records of all train queries."""
  judged = read_train(task)
  return _ranking.make_records(task, judged, 100, np.arange(len(judged.qrels)))


def without_query(monkeypatch, place):
  """Leaves one train query out of all that is read."""
  right = _ranking._search.read_judged

  def asked(*given):
    judged = right(*given)
    keep = [i for i in range(len(judged.queries)) if i != place]
    return _ranking.select(judged, np.array(keep))

  monkeypatch.setattr(_ranking._search, "read_judged", asked)


@pytest.mark.parametrize("place", [5, -1])
def test_a_query_less_leaves_the_features_of_all_others_as_they_are(
  finished_run, monkeypatch, place
):
  """To the last bit: the sum would move by more than one query's gradient."""
  task = task_of(finished_run.root)
  whole = records_of(task)
  count = len(whole["values"])
  with monkeypatch.context() as patch:
    without_query(patch, place % count)
    less = records_of(task)
  for name, values in whole.items():
    expected = np.delete(values, place % count, axis=0)
    assert expected.tobytes() == less[name].tobytes(), name


def test_records_say_what_is_relevant_of_what_was_found(
  finished_run, monkeypatch
):
  task, right, found = task_of(finished_run.root), _search.make_candidates, {}

  def candidates(judged, *runs):
    found.update(right(judged, *runs))
    return found

  monkeypatch.setattr(_search, "make_candidates", candidates)
  records, qrels = records_of(task), read_train(task).qrels
  assert records["values"].shape[1:] == (200, NUM_FEATURES)
  assert records["relevant"].any()
  assert not (records["relevant"] & ~records["candidate"]).any()
  assert len(found) == len(qrels) == len(records["values"])
  for row, (query, one) in enumerate(found.items()):
    relevant = {i for i, x in enumerate(one.ids) if x in qrels[query]}
    assert relevant == set(np.flatnonzero(records["relevant"][row]))
    assert records["candidate"][row].sum() == len(one.ids)


def test_rows_join_their_retrievers_claim_and_that_of_the_weights(finished_run):
  root, config = finished_run.root, finished_run.config
  public = load(root, "learn_to_rank/public_only")
  assert public.name == "ltr_public_only" and public.weights[0] != 8.0
  [release] = public.statement.ledger
  assert release.identifier.startswith("learn_to_rank/public_only")
  assert public.statement.epsilon <= config.learn_to_rank.epsilon
  assert public.statement.unit == unit_lib.QUERY
  assert release.l2_sensitivity == config.learn_to_rank.clip_norm
  retriever = load(root, "train_retriever/synthetic_eps8", results.Checkpoint)
  row = load(root, "learn_to_rank/synthetic_eps8")
  own = set(row.statement.ledger) - set(retriever.statement.ledger)
  assert len(own) == 1 and set(retriever.statement.ledger) < {
    *row.statement.ledger
  }
  assert retriever.statement.epsilon < row.statement.epsilon < 9
  # Weights beside an adapter count its training, too.
  adapter = load(
    root, "learn_adapter/adapter_eps8", system_results.Adapter
  ).statement
  beside = load(root, "learn_to_rank/adapter_eps8").statement
  assert {*adapter.ledger} < {*beside.ledger} and len(beside.ledger) == 2
  assert 8 < beside.epsilon < 8.5
  both = joint.claim([adapter, beside])
  assert both.epsilon == pytest.approx(beside.epsilon)


def test_what_was_trained_without_privacy_learns_on_what_it_left_out(
  finished_run,
):
  root, config = finished_run.root, finished_run.config
  made = load(root, "private/learn_to_rank/original")
  assert math.isinf(made.statement.epsilon)
  assert not (root / "learn_to_rank/original").exists()
  prepared = load(root, "private/prepare_data", results.PreparedData)
  task = task_of(root)
  held_out = config.learn_to_rank.held_out
  fewer = read_train(task, held_out=held_out, reads_held_out=True)
  assert 0 < made.num_queries == len(fewer.qrels)
  assert made.num_queries < prepared.num_queries["train"] / 4
  # Nobody else leaves queries out for it.
  assert (
    load(root, "learn_to_rank/public_only").num_queries
    == (prepared.num_queries["train"])
  )


def test_rows_that_are_only_compared_and_other_units_are_not_shared(
  finished_run,
):
  root = finished_run.root
  assert not list(root.glob("learn_to_rank/direct_dp_group*"))
  assert list(root.glob("private/learn_to_rank/direct_dp_group*"))
  assert not list(root.rglob("learn_to_rank/direct_dp_text*"))


PLACES = [(False, "{}", False), (True, "{}", True), (False, "private/{}", True)]
"""Whether a row is only compared, where its parts lie, and whether it is private."""


@pytest.mark.parametrize(("compared", "place", "is_private"), PLACES)
def test_weights_lie_where_their_retriever_and_their_row_may(
  compared, place, is_private, tmp_path, monkeypatch
):
  nobody = types.SimpleNamespace(qrels={})  # so nothing is trained
  monkeypatch.setattr(_ranking, "read_train", lambda *_, **__: nobody)
  monkeypatch.setattr(system_results, "read_fingerprint", lambda *_: "trained")
  inputs = learn_to_rank.Inputs(
    prepared=made_up.prepared(),
    vectors=types.SimpleNamespace(vectors="vectors"),
    drop_identical=True,
    retriever=made_up.checkpoint(
      directory=place.format("train_retriever/untrained"),
      statement=made_up.claim(),
    ),
    left_out=0.0,
  )
  task = stage_lib.Task(
    result_path="stage/row", row=RANKED, digest="digest",
    settings=learn_to_rank.Config(), inputs=inputs, is_private=compared,
    folders=workspace.Workspace(tmp_path, secret_seed=7),
  )  # fmt: skip
  made = learn_to_rank.run(task)
  assert results.is_private_path(made.directory) is is_private


def test_a_query_vector_that_is_no_number_stops_nobody(
  finished_run, monkeypatch
):
  task = task_of(finished_run.root)
  whole, right = records_of(task), _ranking.encode_queries

  def broken(*given):
    vectors = right(*given).copy()
    vectors[2, 0] = np.nan
    return vectors

  monkeypatch.setattr(_ranking, "encode_queries", broken)
  found = None
  with contextlib.suppress(ValueError):
    found = records_of(task)
  assert found is not None, "one query stops all"
  others = np.arange(len(found["values"])) != 2
  assert np.isfinite(found["values"]).all()
  for name, values in found.items():
    assert values[others].tobytes() == whole[name][others].tobytes(), name


def test_a_query_vector_that_is_no_number_ends_no_search(tmp_path, monkeypatch):
  """Scores of a row are released; that there are some would tell of one query."""
  vectors = np.eye(4, dtype=np.float32)
  monkeypatch.setattr(_search, "open_vectors", lambda *_: vectors)
  judged = _search.Judged(
    split="test",
    qrels={f"q{i}": {"d0": 1} for i in range(3)},
    queries=["a"] * 3,
    query_tokens=np.zeros((3, 2), np.int32),
    passages=passages.Passages(
      np.array([f"d{i}" for i in range(4)]), vectors, np.arange(4)
    ),
    corpus=tmp_path,
  )
  asked = vectors[[2, 1, 3]]
  whole = _search.search_nearest(judged, tmp_path, asked, 2)
  for bad in (np.nan, np.inf):
    broken = np.where(np.arange(3)[:, None] == 1, bad, asked)
    found = None
    with contextlib.suppress(ValueError):
      found = _search.search_nearest(judged, tmp_path, broken, 2)
    assert found is not None, "one query stops all"
    assert (found["q0"], found["q2"]) == (whole["q0"], whole["q2"])
    assert set(found["q1"].values()) == {0.0}


def test_two_secrets_have_weights_of_their_own(finished_run, tmp_path):
  root = finished_run.copy(tmp_path)
  weights = []
  for secret in (1, 2):
    made = tiny_runs.make(
      learn_to_rank.STAGE,
      learn_to_rank.Config(batch_size=30, steps=2),
      workspace.Workspace(root, secret_seed=secret),
      row=RANKED,
      name="public_only",
      digest=f"digest{secret}",
      inputs=inputs_of(root),
    )
    weights.append(np.array(made.weights))
  assert (weights[0] != weights[1]).all()


def learned(root):
  return load(root, "learn_to_rank/public_only")


def again(root, **settings):
  """Makes the weights of a copied run once more."""
  return tiny_runs.make(
    learn_to_rank.STAGE,
    learn_to_rank.Config(steps=2, **settings),
    workspace.Workspace(root, secret_seed=1),
    row=RANKED,
    name="public_only",
    digest="another",
    inputs=inputs_of(root),
  )


def test_only_queries_that_a_step_draws_are_searched_for(
  finished_run, tmp_path, monkeypatch
):
  root, right = finished_run.copy(tmp_path), _ranking.make_records
  prepared = load(root, "private/prepare_data", results.PreparedData)
  count = prepared.num_queries["train"]
  before, searched = {*learned(root).statement.ledger}, []

  def records(task, judged, depth, rows):
    searched.append(rows)
    return right(task, judged, depth, rows)

  monkeypatch.setattr(_ranking, "make_records", records)
  made = again(root, batch_size=2)
  [rows] = searched
  assert 0 < len(rows) < count / 2
  # The claim, and whatever is shown, is of all of them: how many and which were
  # searched for follows from the secret.
  [release] = {*made.statement.ledger} - before
  assert release.num_examples == made.num_queries == count
  assert release.expected_batch_size == 2
  # It learns what it would have learned if all had been.
  monkeypatch.setattr(dp_step, "_compute_records", _all_made)
  eager = again(root, batch_size=2)
  assert len(searched[-1]) == count
  assert eager.weights == made.weights


def _all_made(training, mechanism):
  """Makes all records before the first step, drawn or not."""
  del mechanism
  records = training.records.make(np.arange(training.num_records))
  return dataclasses.replace(training, records=records), None
