"""The stage of maps that learn without noise: claims, negatives and shares."""

import dataclasses
import math
import re
import shutil
import types

import made_up
import numpy as np
import pytest
import sentence_folder

from synthq_jax.models import sentence_encoder
from synthq_jax.models.checkpoints import sentence_folders
from synthq_jax.retrieval import encode
from synthq_jax.runtime import (
  encoder_start,
  prepared_files,
  results,
  rows,
  stage,
  system_results,
  workspace,
)
from synthq_jax.stages import _checks, _ranking, learn_adapter, learn_map, plan
from synthq_jax.storage import artifacts
from synthq_jax.tools import cards, export, search
from synthq_jax.training import loop

QUIET = loop.Settings()
SMALL = learn_map.Config(
  steps=3, warmup_steps=1, batch_size=8, candidates=6, pool=8, settings=QUIET
)


def task_of(root, name, config=SMALL):
  """A task of the row `name`, with the untrained encoder as its base."""
  row = made_up.row(name)
  data = artifacts.load(root / "private/prepare_data", results.PreparedData)
  queries = None
  if row != rows.ORIGINAL:
    folder = root / "filter_queries" / row.queries
    queries = artifacts.load(folder, results.SyntheticQueries)
  return stage.Task(
    result_path=f"learn_adapter/{name}",
    row=row,
    digest="digest",
    settings=config,
    folders=workspace.Folders(root),
    inputs=learn_map.Inputs(
      documents=data if queries is None else results.public_documents(data),
      retriever=artifacts.load(
        root / "train_retriever/untrained", results.Checkpoint
      ),
      vectors=artifacts.load(
        root / "encode_documents/untrained", system_results.Vectors
      ),
      synthetic=queries,
      held_out=0.0,
      drop_identical=True,
    ),
  )


def read_matrix(root, made):
  return np.load(root / made.directory / made.FILE)


def test_a_map_of_synthetic_queries_has_their_claim(finished_run, tmp_path):
  root = finished_run.copy(tmp_path)
  made = learn_map.run(task_of(root, "synthetic_eps8"))
  queries = artifacts.load(
    root / "filter_queries/eps8", results.SyntheticQueries
  )
  assert made.statement.ledger == queries.statement.ledger
  assert made.statement.epsilon == queries.statement.epsilon
  assert not results.is_private_path(made.directory)
  assert made.base == made.document_encoder
  public = learn_map.run(task_of(root, "public_only"))
  assert public.statement.is_public


def test_a_map_of_real_queries_stays_private(finished_run, tmp_path):
  root = finished_run.copy(tmp_path)
  made = learn_map.run(task_of(root, "original"))
  assert results.is_private_path(made.directory)
  assert math.isinf(made.statement.epsilon)
  assert not (root / "learn_adapter/original").exists()


def test_a_search_applies_the_map_to_queries_alone(finished_run, tmp_path):
  root = finished_run.copy(tmp_path)
  made = learn_map.run(task_of(root, "synthetic_eps8"))
  folders = workspace.Folders(root)
  tokens = np.array([[5, 6, 1, 0], [9, 1, 0, 0]], np.int32)

  def encode_with(retriever, role):
    params, shape = encoder_start.load(folders, retriever, role)
    return encode.encode(params, shape, tokens, batch_size=2)

  role = sentence_folders.QUERY
  mapped = encode_with(made.base, role) @ read_matrix(root, made)
  mapped /= np.linalg.norm(mapped, axis=1, keepdims=True)
  np.testing.assert_allclose(encode_with(made, role), mapped, atol=1e-6)
  role = sentence_folders.DOCUMENT
  np.testing.assert_array_equal(
    encode_with(made, role), encode_with(made.base, role)
  )


def test_an_adapter_starts_from_the_map_of_public_queries(
  finished_run, tmp_path, monkeypatch
):
  root = finished_run.copy(tmp_path)
  config = dataclasses.replace(SMALL, learning_rate=0.1)
  start = learn_map.run(task_of(root, "public_only", config))
  task = task_of(root, "public_only")
  adapter = dataclasses.replace(
    task,
    row=made_up.row("adapter_eps8"),
    result_path="learn_adapter/adapter_eps8",
    settings=finished_run.config.learn_adapter,
    inputs=learn_adapter.Inputs(
      prepared=artifacts.load(
        root / "private/prepare_data", results.PreparedData
      ),
      retriever=task.inputs.retriever,
      vectors=task.inputs.vectors,
      drop_identical=True,
      epsilon=8.0,
      start=start,
    ),
  )
  seen = {}

  def train(task, settings, training):
    seen.update(training.records.make(np.array([1, 3])))
    moved = np.zeros_like(training.params["map"])
    moved[0, 1] = 0.5
    fields = dict.fromkeys(("steps", "batch_size", "num_parameters"), 1)
    return {"map": moved}, {
      **fields, "statement": made_up.claim(), "metrics": ""
    }  # fmt: skip

  monkeypatch.setattr(learn_adapter.private_training, "train", train)
  made = learn_adapter.run(adapter)
  assert made.base == start.base
  learned = np.eye(len(read_matrix(root, made)), dtype=np.float32)
  learned[0, 1] = 0.5
  np.testing.assert_allclose(
    read_matrix(root, made), read_matrix(root, start) @ learned, rtol=1e-6
  )
  judged = _ranking.read_train(
    task.folders, adapter.inputs.prepared, drop_identical=True
  )
  chosen = _ranking.select(judged, np.array([1, 3]))
  asked, other = (
    _ranking.encode_queries(task.folders, retriever, chosen, 16)
    for retriever in (start, start.base)
  )
  np.testing.assert_allclose(seen["queries"], asked, atol=1e-6)
  assert np.abs(asked - other).max() > 1e-3


def test_an_adapter_is_made_again_when_its_start_changes(finished_run):
  prepared = artifacts.load(
    finished_run.root / "private/prepare_data", results.PreparedData
  )
  config = dataclasses.replace(
    finished_run.config,
    rows=plan.Rows(trained_part="query_map", adapted=(8.0,), direct_dp=()),
  )

  def job_of(starts):
    run = types.SimpleNamespace(
      config=config,
      plan=rows.Plan(config=config, stages=plan.STAGES),
      prepared=prepared,
      retrievers={rows.UNTRAINED: stage.Made("encoder", "0")},
      get_vectors=lambda row: stage.Made("vectors", "1"),
      get_results=lambda name: starts if name == "learn_map" else {},
      private_data=lambda row, data: data,
      encoder_data=("2",),
    )
    return learn_adapter.make_job(run, made_up.row("adapter_eps8"))

  original = {rows.ORIGINAL: stage.Made("private", "3")}
  alone = job_of({})
  assert alone.inputs.start is None and alone == job_of(original)
  first, second = (
    job_of({**original, rows.PUBLIC_ONLY: stage.Made("map", digest)})
    for digest in ("4", "5")
  )
  assert first.inputs.start == second.inputs.start == "map"
  assert len({alone.depends, first.depends, second.depends}) == 3
  assert "learn_map" in learn_adapter.STAGE.needs


def test_half_of_a_map_is_half_of_its_way(finished_run, tmp_path):
  root = finished_run.copy(tmp_path)
  changes = []
  for share in (1.0, 0.5):
    config = dataclasses.replace(SMALL, share=share)
    made = learn_map.run(task_of(root, "synthetic_eps8", config))
    matrix = read_matrix(root, made)
    changes.append(matrix - np.eye(len(matrix), dtype=np.float32))
  assert np.abs(changes[0]).max() > 1e-4
  np.testing.assert_allclose(changes[1], changes[0] / 2, atol=1e-7)


def test_no_document_that_shares_a_querys_text_is_a_negative(
  finished_run, monkeypatch
):
  task = task_of(finished_run.root, "synthetic_eps8")
  folder = finished_run.root / task.inputs.synthetic.directory
  own = np.load(folder / "tokens.npz")["documents"]
  second = int(np.flatnonzero(own != own[0])[0])
  texts = [f"text {row}" for row in range(len(own))]
  texts[second] = texts[0]
  monkeypatch.setattr(learn_map.queries_lib, "texts", lambda folder: texts)
  judged = learn_map._read_judged(task)
  both = {str(judged.passages.ids[own[row]]) for row in (0, second)}
  assert set(judged.qrels["s0"]) == set(judged.qrels[f"s{second}"]) == both
  records, vectors = learn_map._read_records(task)
  names = judged.passages.ids[judged.passages.owners]
  is_negative = records["candidate"][0] & ~records["relevant"][0]
  assert not both & set(names[records["rows"][0][is_negative]])
  assert len(vectors) == len(judged.passages.owners)


def test_all_judged_documents_of_a_real_query_are_relevant(finished_run):
  """The arrays keep one document of each; the others were hard negatives."""
  task = task_of(finished_run.root, "original")
  folder = finished_run.root / "private/prepare_data"
  written = prepared_files.read_qrels(folder, "train")
  judged = learn_map._read_judged(task)
  assert judged.qrels == {query: written[query] for query in judged.qrels}
  assert judged.drop_identical
  half = dataclasses.replace(task.inputs, held_out=0.5)
  fewer = learn_map._read_judged(dataclasses.replace(task, inputs=half))
  assert 0 < len(fewer.qrels) < len(judged.qrels)
  assert set(fewer.qrels) < set(judged.qrels)


def make_problem(dim=6, number=40):
  """Queries of one rotation of their documents: a map that exists."""
  generator = np.random.default_rng(0)
  vectors = generator.normal(size=(number, dim)).astype(np.float32)
  vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
  rotation, _ = np.linalg.qr(generator.normal(size=(dim, dim)))
  queries = vectors @ rotation.astype(np.float32)
  all_rows = np.tile(np.arange(number, dtype=np.int32), (number, 1))
  records = {
    "queries": queries,
    "rows": all_rows,
    "relevant": np.eye(number, dtype=bool),
    "candidate": np.ones((number, number), bool),
    "left_out": np.full((number, 1), -1, np.int32),
  }
  return records, vectors


@pytest.mark.parametrize("pool", [0, 10])
def test_a_map_that_exists_is_learned(tmp_path, pool):
  records, vectors = make_problem()
  config = dataclasses.replace(
    SMALL, steps=150, batch_size=40, learning_rate=0.05, pool=pool
  )
  params = learn_map._learn(
    config, records, vectors, loop.Files.below(tmp_path, "test")
  )
  moved = records["queries"] @ (np.eye(6) + np.asarray(params["map"]))
  best = np.argmax(moved @ vectors.T, axis=1)
  before = np.argmax(records["queries"] @ vectors.T, axis=1)
  assert np.mean(before == np.arange(40)) < 0.3
  assert np.mean(best == np.arange(40)) > 0.9


def test_a_training_that_stopped_goes_on_to_the_same_map(tmp_path):
  records, vectors = make_problem()
  config = dataclasses.replace(SMALL, steps=6)

  def learn(folder):
    files = loop.Files.below(folder, "test")
    return np.asarray(learn_map._learn(config, records, vectors, files)["map"])

  whole = learn(tmp_path / "whole")
  seen = []

  def stop(self, step, total):
    if step == 4 and not seen:
      seen.append(step)
      raise KeyboardInterrupt
    return rows_of(self, step, total)

  rows_of = learn_map.Config.rows
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(learn_map.Config, "rows", stop)
    saving = dataclasses.replace(
      config, settings=dataclasses.replace(QUIET, save_seconds=0.0)
    )
    files = loop.Files.below(tmp_path / "stopped", "test")
    with pytest.raises(KeyboardInterrupt):
      learn_map._learn(saving, records, vectors, files)
  assert seen
  np.testing.assert_array_equal(learn(tmp_path / "stopped"), whole)


def plan_of(**fields):
  config = plan.RunConfig(rows=plan.Rows(**fields))
  return rows.Plan(config=config, stages=("evaluate", "report"))


def test_the_plan_trains_encoders_or_maps_but_never_both():
  planned = plan_of(
    trained_part="query_map", direct_dp=(), synthetic=(3.0, 8.0)
  )
  names = [str(row) for row in planned.mapped]
  assert names == [
    "public_only",
    "synthetic_eps3",
    "synthetic_eps8",
    "original",
  ]
  assert planned.trained == planned.encoded == (rows.UNTRAINED,)
  assert planned.retrievers == (rows.UNTRAINED, *planned.mapped)
  usual = plan_of(direct_dp=(), synthetic=(3.0, 8.0))
  assert usual.mapped == () and usual.trained == planned.retrievers


def test_private_adapters_beside_maps_stand_on_the_public_encoder():
  chosen = plan.Rows(trained_part="query_map", adapted=(1.0,))
  assert chosen.adapter_base == rows.UNTRAINED
  assert plan.Rows(adapted=(1.0,)).adapter_base == rows.PUBLIC_ONLY


@pytest.mark.parametrize(
  ("fields", "text"),
  [
    ({"trained_part": "map"}, "trained_part must be one of encoder, query_map"),
    ({"trained_part": "query_map", "untrained": False}, "set it"),
  ],
)
def test_rows_without_a_base_are_refused(fields, text):
  with pytest.raises(ValueError, match=text):
    plan.Rows(**fields)


def test_a_search_reads_maps_where_adapters_lie(finished_run, tmp_path):
  root = finished_run.copy(tmp_path)
  made = learn_map.run(task_of(root, "synthetic_eps8"))
  folder = root / made.directory
  artifacts.save(folder, made, "digest", folders=[folder])
  # Settings changed in between leave both; the encoder of old was searched.
  with pytest.raises(
    ValueError, match="got two, of different settings: delete"
  ):
    search.open_run(str(root), "synthetic_eps8")
  shutil.rmtree(root / "train_retriever/synthetic_eps8")
  known = search.read_systems(workspace.Folders(root), private=False)
  assert known[made.row] == made


def test_an_encoder_with_routes_is_refused_before_any_training(tmp_path):
  """A run failed after fine-tuning: no retriever can be saved with a Router."""
  folder = sentence_folder.save(tmp_path / "model", "some words")
  config = plan.RunConfig(encoder=encoder_start.EncoderStart(folder=folder))
  _checks.check_checkpoints(config, ["train_retriever"])
  matrix = np.eye(sentence_folder.DIM, dtype=np.float32)
  sentence_encoder.add_query_map(folder, matrix)  # as in an exported adapter
  with pytest.raises(ValueError, match="got a Router: train another start"):
    _checks.check_checkpoints(config, ["train_retriever"])


@pytest.mark.parametrize(
  ("name", "origin"),
  [
    (
      "synthetic_eps8",
      "synthetic queries, written by a T5 that was fine-tuned",
    ),
    ("public_only", "queries of a public T5, none of them private"),
    ("adapter_eps8", "private queries with differential privacy"),
    ("synthetic_inf", "queries that carry no guarantee"),
  ],
)
def test_a_card_says_which_queries_a_map_learned_from(
  finished_run, name, origin
):
  """It said "private queries with differential privacy" of each."""
  made = artifacts.load(
    finished_run.root / "learn_adapter/adapter_eps8", system_results.Adapter
  )
  made = dataclasses.replace(made, row=made_up.row(name))
  for render in (cards.render_map, cards.render_adapter):
    card = render(made, sentence_folders.TextSettings())
    assert f"learned from {origin}" in " ".join(card.split())


def test_a_card_of_a_map_names_the_texts_whose_vectors_it_fits(finished_run):
  """E5's prompts and a shorter length were in the run alone."""
  made = artifacts.load(
    finished_run.root / "learn_adapter/adapter_eps8", system_results.Adapter
  )
  texts = sentence_folders.TextSettings(
    query_prompt="query: ",
    document_prompt="passage: ",
    max_length=128,
    query_length=64,
  )
  for render in (cards.render_map, cards.render_adapter):
    card = render(made, texts)
    assert "at most 128 tokens of a document and 64 of a query" in card
    assert "'query: ' before queries and 'passage: ' before documents" in card


def test_the_code_of_a_maps_card_takes_one_vector_and_many(
  finished_run, tmp_path
):
  to = tmp_path / "map"
  export.run(finished_run.root / "learn_adapter/adapter_eps8", to, format="map")
  [code] = re.findall(
    "```python\n(.*?)```", (to / "README.md").read_text(), re.S
  )
  names: dict = {}
  exec(code.replace("FOLDER", str(to)), names)  # noqa: S102
  matrix = names["matrix"]
  vectors = np.random.default_rng(0).normal(size=(3, len(matrix)))
  moved = names["apply"](vectors.astype(np.float16))
  expected = vectors @ np.load(
    finished_run.root / "learn_adapter/adapter_eps8/map.npy"
  )
  expected /= np.linalg.norm(expected, axis=1, keepdims=True)
  np.testing.assert_allclose(moved, expected, atol=1e-3)
  assert (to / export.CLAIM).exists()
  one = names["apply"](vectors[1].astype(np.float16))
  np.testing.assert_allclose(one, moved[1], rtol=1e-5)
  # Of a query without a known word, among static vectors; it was nan.
  assert not names["apply"](np.zeros((1, len(matrix)), np.float32)).any()
