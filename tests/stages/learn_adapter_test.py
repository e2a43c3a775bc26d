"""The stage of adapters: its rows, its claim, its search and its export."""

import dataclasses
import functools
import importlib.util
import math
import shutil
import types

import dp_accounting
import jax
import made_up
import numpy as np
import pytest

from synthq_jax.data import passages
from synthq_jax.models.checkpoints import sentence_folders
from synthq_jax.optim import denoising
from synthq_jax.privacy import unit as unit_lib
from synthq_jax.retrieval import encode, index, vector_files
from synthq_jax.runtime import (
  encoder_start,
  results,
  stage,
  system_results,
  workspace,
)
from synthq_jax.stages import (
  _ranking,
  _search,
  direct_dp,
  finetune_dp,
  learn_adapter,
  learn_to_rank,
)
from synthq_jax.storage import array_files, artifacts
from synthq_jax.tools import export

QUERY, DOCUMENT = sentence_folders.QUERY, sentence_folders.DOCUMENT
ROW, BASE = "adapter_eps8", "public_only"


def load(root):
  return artifacts.load(root / "learn_adapter" / ROW, system_results.Adapter)


def task_of(root, config):
  folder = root / "train_retriever" / BASE
  vectors = root / "encode_documents" / BASE
  return stage.Task(
    result_path=f"learn_adapter/{ROW}",
    row=made_up.row(ROW),
    digest="digest",
    settings=config.learn_adapter,
    folders=workspace.Workspace(root, secret_seed=7),
    inputs=learn_adapter.Inputs(
      prepared=artifacts.load(
        root / "private/prepare_data", results.PreparedData
      ),
      retriever=artifacts.load(folder, results.Checkpoint),
      vectors=artifacts.load(vectors, system_results.Vectors),
      drop_identical=True,
      epsilon=8.0,
    ),
  )


def test_an_adapter_is_one_training_and_documents_keep_their_vectors(
  finished_run,
):
  root, made = finished_run.root, load(finished_run.root)
  [release] = made.statement.ledger
  assert release.identifier.startswith("learn_adapter/adapter_eps8")
  assert 7.9 < made.statement.epsilon <= 8.0
  assert made.statement.unit == unit_lib.QUERY
  matrix = np.load(root / made.directory / made.FILE)
  assert 0 < np.abs(matrix - np.eye(len(matrix))).max()
  folders = workspace.Folders(root)
  base = artifacts.load(root / "train_retriever" / BASE, results.Checkpoint)
  assert made.base == base
  ours, theirs = (
    encoder_start.load(folders, one, DOCUMENT)[0] for one in (made, base)
  )
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)
  private = [path.name for path in root.glob("private/learn_adapter/*/*")]
  assert private and all(
    name.startswith(("metrics_", "files")) for name in private
  )


@pytest.mark.parametrize(
  ("epsilon", "compared", "is_private"),
  [(math.inf, False, True), (8.0, False, False), (8.0, True, True)],
)
def test_an_adapter_lies_where_its_noise_and_its_row_let_it(
  finished_run, tmp_path, monkeypatch, epsilon, compared, is_private
):
  """At epsilon infinity a map is the private queries' own."""
  task = task_of(finished_run.copy(tmp_path), finished_run.config)
  task = dataclasses.replace(
    task,
    is_private=compared,
    inputs=dataclasses.replace(task.inputs, epsilon=epsilon),
  )
  fields = {
    "statement": made_up.claim(), "steps": 1, "batch_size": 1,
    "num_parameters": 4, "metrics": "",
  }  # fmt: skip
  trained = {"map": np.zeros((2, 2))}, fields
  monkeypatch.setattr(
    learn_adapter.private_training, "train", lambda *_: trained
  )
  made = learn_adapter.run(task)
  assert results.is_private_path(made.directory) is is_private
  root = task.folders.root
  assert (root / made.directory / made.FILE).exists()
  shared = root / "learn_adapter" / ROW
  assert shared.exists() is not is_private


def test_what_a_query_learns_of_depends_on_it_alone(finished_run):
  root, config = finished_run.root, finished_run.config
  task = task_of(root, config)
  judged = _ranking.read_train(
    task.folders, task.inputs.prepared, drop_identical=True
  )
  vectors = np.asarray(
    vector_files.open_vectors(
      root / task.inputs.vectors.vectors, len(judged.passages.owners)
    )
  )
  built = index.exact(vectors)

  def records(rows):
    chosen = _ranking.select(judged, np.array(rows))
    asked = _ranking.encode_queries(
      task.folders, task.inputs.retriever, chosen, 16
    )
    return _ranking.make_map_records(
      chosen,
      asked,
      built,
      candidates=config.learn_adapter.candidates,
      most_relevant=config.learn_adapter.most_relevant,
    )

  whole, fewer = records([0, 1, 2, 3, 4]), records([1, 3])
  for name, values in fewer.items():
    assert values.tobytes() == whole[name][[1, 3]].tobytes(), name
  assert whole["relevant"].any(axis=1).all()


def test_an_adapter_that_lies_elsewhere_is_refused_in_one_line(
  finished_run, tmp_path
):
  moved = tmp_path / "moved"
  shutil.copytree(finished_run.root / "learn_adapter" / ROW, moved)
  for form in ("sentence-transformers", "map"):
    with pytest.raises(ValueError, match="expected the result in its run"):
      export.run(moved, tmp_path / form, format=form)


@pytest.mark.slow
def test_sentence_transformers_gives_the_vectors_of_an_export(
  finished_run, tmp_path
):
  if importlib.util.find_spec("sentence_transformers") is None:
    pytest.skip("needs sentence-transformers")
  import sentence_transformers

  root = finished_run.root
  place = root / "learn_adapter" / ROW
  said = export.run(place, tmp_path / "out", format="sentence-transformers")
  assert "epsilon = 8" in said
  theirs = sentence_transformers.SentenceTransformer(
    str(tmp_path / "out"), device="cpu"
  )
  folders, made = workspace.Folders(root), load(root)
  prepared = artifacts.load(root / "private/prepare_data", results.PreparedData)
  folder = root / prepared.private_directory
  judged = _search.read_judged(
    folders, prepared, folder, "train", folder / "train.npz"
  )
  params, shape = encoder_start.load(folders, made, QUERY)
  ours = encode.encode(params, shape, judged.query_tokens[:5])
  np.testing.assert_allclose(
    theirs.encode_query(judged.queries[:5]), ours, atol=1e-5
  )
  params, shape = encoder_start.load(folders, made, DOCUMENT)
  ours = encode.encode(params, shape, judged.passages.tokens[:5])
  texts = [*map(str, sentence_texts(root, prepared))][:5]
  np.testing.assert_allclose(theirs.encode_document(texts), ours, atol=1e-5)


def sentence_texts(root, prepared):
  from synthq_jax.runtime import prepared_files

  return prepared_files.document_texts(
    prepared_files.corpus(workspace.Folders(root), prepared)
  )


def test_a_pool_is_public():
  """One query moves the sum by the clip norm, whatever pool its batch brings."""
  generator = np.random.default_rng(0)
  vectors = generator.normal(size=(30, 6)).astype(np.float32)
  vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
  config = learn_adapter.Config(clip_norm=0.01, pool=5, microbatch_size=None)
  grad_fn = learn_adapter.PooledGrad(vectors, config)
  batch = {
    "queries": vectors[:8],
    "rows": np.arange(24, dtype=np.int32).reshape(8, 3) % 30,
    "relevant": np.tile([True, False, False], (8, 1)),
    "candidate": np.ones((8, 3), bool),
    "left_out": np.array([[1, 16], *[[-1, -1]] * 7], np.int32),
    "pool": np.array([1, 4, 9, 16, 25], np.int32),
  }
  params = {"map": 0.1 * np.ones((6, 6), np.float32)}
  whole, aux = grad_fn(params, batch)
  is_cut = np.asarray(aux.norms) > config.clip_norm
  assert is_cut.sum() == 7  # the first query is its own document
  relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
  assert grad_fn.sensitivity(relation) == config.clip_norm
  for place in range(8):
    is_padding = np.arange(8) == place
    less, _ = grad_fn(params, batch, is_padding_example=is_padding)
    moved = np.linalg.norm(whole["map"] - less["map"])
    assert moved <= 1.001 * config.clip_norm
    assert not is_cut[place] or moved >= 0.999 * config.clip_norm
    other = {k: np.array(v) for k, v in batch.items()}
    other["rows"][place] = [29, 28, 27]
    there, _ = grad_fn(params, other, is_padding_example=is_padding)
    np.testing.assert_array_equal(there["map"], less["map"])


@pytest.mark.parametrize("stage", [finetune_dp, direct_dp, learn_to_rank])
def test_an_optimizer_that_discards_its_start_is_for_the_map_alone(stage):
  """Its first step threw the pretrained parameters away, without a word."""
  with pytest.raises(
    ValueError, match="optimizer must be one of dp_adam, dp_ada"
  ):
    stage.Config(optimizer="dp_dual_averaging")
  assert learn_adapter.Config().optimizer == "dp_dual_averaging"


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 0, 1, 2]])
def test_a_querys_own_document_is_no_candidate(order):
  """It stayed, or another document stood twice in its place."""
  ids = ["d0", "d1", "d2", "q1"]
  judged = types.SimpleNamespace(
    qrels={"q1": {"d0": 1}},
    drop_identical=True,
    passages=passages.Passages(
      array_files.as_texts(ids), np.ones((4, 2), np.int32), np.arange(4)
    ),
  )
  found = types.SimpleNamespace(
    search=lambda vectors, depth: (None, np.array([order]))
  )
  made = _ranking.make_map_records(
    judged, np.zeros((1, 2)), found, candidates=4, most_relevant=1
  )
  chosen = made["rows"][0][made["candidate"][0]].tolist()
  assert chosen == [0, 1, 2]


def _get(value, *args, **named):
  """Stands for a function that reads `value`."""
  del args, named
  return value


@pytest.mark.parametrize("said", [1.0, 0.9], ids=["claimed", "a tenth less"])
def test_the_noise_of_a_map_is_what_its_claim_says(tmp_path, monkeypatch, said):
  """Queries of length 0 teach nothing: the map is noise, if nothing denoises it."""
  dim, count = 160, 30
  documents = np.eye(count, dim, dtype=np.float32)
  ids = [f"d{number}" for number in range(count)]
  judged = _search.Judged(
    split="train",
    qrels={f"q{number}": {f"d{number}": 1} for number in range(count)},
    queries=ids,
    query_tokens=np.ones((count, 2), np.int32),
    passages=passages.Passages(
      array_files.as_texts(ids), np.ones((count, 2), np.int32), np.arange(count)
    ),
    corpus=tmp_path,
  )
  for module, name, value in (
    (_ranking, "read_train", judged),
    (_ranking, "encode_queries", np.zeros((count, dim), np.float32)),
    (_search, "open_vectors", documents),
  ):
    monkeypatch.setattr(module, name, functools.partial(_get, value))
  monkeypatch.setattr(denoising, "denoise", lambda matrix, noise_std: matrix)
  config = learn_adapter.Config(
    steps=3, batch_size=count, pool=8, microbatch_size=8
  )
  moved = learn_adapter.PooledGrad.sensitivity
  monkeypatch.setattr(
    learn_adapter.PooledGrad,
    "sensitivity",
    lambda *arguments: said * moved(*arguments),
  )
  task = stage.Task(
    result_path=f"learn_adapter/{ROW}",
    row=made_up.row(ROW),
    digest="digest",
    settings=config,
    folders=workspace.Workspace(tmp_path, secret_seed=7),
    inputs=learn_adapter.Inputs(
      prepared=made_up.prepared(num_queries={"train": count}),
      retriever=made_up.checkpoint(),
      vectors=types.SimpleNamespace(vectors="vectors"),
      drop_identical=True,
      epsilon=8.0,
    ),
  )
  params, fields = learn_adapter._learn(task)
  [release] = fields["statement"].ledger
  expected = release.noise_multiplier * config.clip_norm / count
  expected *= config.learning_rate * math.sqrt(config.steps)
  ratio = np.std(np.asarray(params["map"])) / expected
  assert ratio == pytest.approx(said, rel=0.02)
