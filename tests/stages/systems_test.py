"""Fused rows: what they are made of, and what chose them."""

import dataclasses
import json
import math
import shutil
import sys

import made_up
import numpy as np
import pytest
import safetensors.numpy
import tiny_runs

from synthq_jax import stages
from synthq_jax.data import passages
from synthq_jax.retrieval import encode, fusion, trec, vector_files
from synthq_jax.runtime import queries as queries_lib
from synthq_jax.runtime import (
  results,
  rows,
  runner,
  stage,
  system_results,
  workspace,
)
from synthq_jax.stages import (
  _search,
  encode_documents,
  evaluate,
  fuse,
  learn_map,
  plan,
)
from synthq_jax.storage import artifacts

PRIVATE_GENERATOR = made_up.claim()
CHOOSER = fuse.Config(min_queries=5)
OPENED = []
STAGE_MAKE = stage.Stage.make
sys.addaudithook(
  lambda event, arguments: event == "open" and OPENED.append(str(arguments[0]))
)  # hooks stay: this one only notes names


def load(root, place, kind):
  return artifacts.load(root / place, kind)


def prepared(root):
  return load(root, "private/prepare_data", results.PreparedData)


def evaluation(root, row):
  return load(root, f"private/evaluate/test/{row}", results.Evaluation)


def test_bm25_is_indexed_once_while_the_collection_is_the_same(
  tmp_path, monkeypatch
):
  corpus = tmp_path / "corpus.jsonl"

  def index(ids, *words):
    lines = [
      {"_id": i, "title": "", "text": w}
      for i, w in zip(ids, words, strict=True)
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    if not corpus.exists() or corpus.read_text() != text:
      corpus.write_text(text)
    return queries_lib.index_of(ids, corpus)

  first = index(["a", "b"], "red apples", "green pears")
  assert index(["a", "b"], "red apples", "green pears") is first
  other = index(["a", "c"], "red apples", "green pears")
  assert other is not first and other.ids == ("a", "c")
  third = index(["a", "c"], "red apples", "blue plums instead")
  assert third.search(["plum"], 1)[1] == [["c"]]
  monkeypatch.setattr(queries_lib._index_cache, "most_bytes", 0)
  large = index(["a", "d"], "red apples", "green pears")
  assert index(["a", "d"], "red apples", "green pears") is not large
  assert not len(queries_lib._index_cache)  # of a large one nothing stays


# In the pipeline.


@pytest.mark.parametrize("row", ["original"])
def test_a_fused_row_is_bm25_and_its_retriever_at_the_chosen_weight(
  finished_run, row
):
  root = finished_run.root
  place = "private/fuse" if row == "original" else "fuse"
  made = load(root, f"{place}/{row}", system_results.Fusion)
  scored = evaluation(root, f"fused_{row}")
  assert scored.row == made.row == made_up.row(f"fused_{row}")
  lexical, dense, fused = (
    trec.read_run(root / evaluation(root, name).directory / "run.trec")
    for name in ("bm25", row, f"fused_{row}")
  )
  expected = fusion.fuse(lexical, dense, weight=made.weight)
  assert {query: list(ids) for query, ids in fused.items()} == {
    query: list(ids) for query, ids in expected.items()
  }
  assert scored.epsilon == evaluation(root, row).epsilon
  assert f"{made.weight:.0%}" in scored.label


def test_one_public_weight_is_that_of_all_rows(finished_run):
  root = finished_run.root
  kept = load(root, "filter_queries/public_only", results.SyntheticQueries)
  places = [*root.glob("fuse/*/"), root / "private/fuse/original"]
  made = [artifacts.load(one, system_results.Fusion) for one in places]
  assert len(made) > 4
  assert len({one.scores for one in made}) == 1
  for one in made:
    assert one.num_queries == min(kept.num_queries, 1000) >= 5
    assert len(one.scores) == len(fusion.WEIGHTS)
    assert "public_only, for the untrained encoder" in one.chosen_on
    assert one.chosen_on in one.statement.notes[-1]
    private = one.retriever == rows.ORIGINAL
    assert math.isinf(one.statement.epsilon) == private
  first = made[0]
  best = max(first.scores, key=lambda pair: pair[1])
  assert first.weight <= best[0]


def test_a_weight_that_is_set_asks_nobody(finished_run, tmp_path):
  root = finished_run.copy(tmp_path)
  few = fuse.Config(min_queries=10_000, default_weight=0.35)
  documents = results.public_documents(prepared(root))
  made = make_fusion(root, documents, chooser=few)
  assert (made.weight, made.num_queries, made.scores) == (0.35, 0, ())
  assert "for want of queries" in made.chosen_on
  for name in ("generate/public_only", "filter_queries/public_only"):
    (root / name / "tokens.npz").unlink()
  made = make_fusion(root, documents, chooser=fuse.Config(weight=0.3))
  assert (made.weight, made.num_queries, made.scores) == (0.3, 0, ())
  assert made.chosen_on == "nothing, it was set"


# Post-processing: what chooses is given no private file.


@pytest.fixture(name="shared")
def _shared(finished_run, tmp_path):
  """What may be shared of a run: a working directory without `private/`."""
  done, root = finished_run.root, tmp_path / "shared"
  folders = ("prepare_data", "generate", "filter_queries", "train_retriever")
  for name in folders:
    shutil.copytree(done / name, root / name)
  shutil.copytree(done / "encode_documents", root / "encode_documents")
  assert not (root / results.PRIVATE).exists()
  return root, results.public_documents(prepared(done))


def make_fusion(
  root,
  documents,
  row="synthetic_eps8",
  chooser=CHOOSER,
  **changes,
):
  untrained = "encode_documents/untrained"
  public = "filter_queries/public_only"
  given = {
    "documents": documents,
    "retriever": load(root, f"train_retriever/{row}", results.Checkpoint),
    "untrained": load(root, "train_retriever/untrained", results.Checkpoint),
    "vectors": load(root, untrained, system_results.Vectors),
    "synthetic": load(root, public, results.SyntheticQueries),
  }
  return tiny_runs.make(
    fuse.STAGE,
    chooser,
    workspace.Folders(root),
    row=made_up.row(f"fused_{row}"),
    name=row,
    inputs=fuse.Inputs(**(given | changes)),
  )


@pytest.fixture(name="encoded")
def _encoded(monkeypatch):
  """Numbers of rows that are encoded from here on."""
  encoded, encode_rows = [], encode.encode

  def count(params, config, rows, **options):
    encoded.append(len(rows))
    return encode_rows(params, config, rows, **options)

  monkeypatch.setattr(encode, "encode", count)
  return encoded


def test_a_longer_log_encodes_no_document_again(shared, encoded):
  """Of millions of documents this takes hours, and none has changed."""
  root, documents = shared
  given = load(root, "train_retriever/untrained", results.Checkpoint)

  def make(digest):
    made = tiny_runs.make(
      encode_documents.STAGE,
      encode_documents.Config(),
      workspace.Folders(root),
      row=made_up.row("untrained"),
      digest=digest,
      inputs=encode_documents.Inputs(documents=documents, retriever=given),
    )
    folder = root / made.vectors
    assert [path.name for path in folder.parent.glob("vectors_*")] == [
      folder.name
    ]
    return np.asarray(
      vector_files.open_vectors(folder, documents.num_documents)
    )

  before = make("a" * 16)
  assert not encoded  # the run of the fixture had encoded them
  np.testing.assert_array_equal(make("b" * 16), before)
  assert not encoded
  # Other weights: all blocks are made anew, whatever was linked.
  path = root / given.directory / "params.safetensors"
  params = safetensors.numpy.load_file(path)
  safetensors.numpy.save_file({k: -v for k, v in params.items()}, path)
  after = make("c" * 16)
  assert sum(encoded) == documents.num_documents
  assert np.abs(after - before).max(axis=1).min() > 0.01


def test_a_set_is_encoded_once_for_an_encoder_and_its_adapters(
  finished_run, tmp_path, encoded
):
  """Of BEIR's sets, each adapter encoded millions of documents again."""
  root = finished_run.copy(tmp_path)
  assert not (root / "private/evaluate/public/documents").exists()
  adapter = load(root, "learn_adapter/adapter_eps8", system_results.Adapter)
  base = root / adapter.base.directory
  kept = {}
  for given in (artifacts.load(base, results.Checkpoint), adapter):
    made = tiny_runs.make(
      evaluate.STAGE,
      finished_run.config.evaluate,
      workspace.Folders(root),
      row=given.row,
      name=f"public/{given.row}",
      inputs=evaluate.Inputs(
        prepared=prepared(root),
        system=given,
        test_set="public",
        parts={},
        retriever=given,
        vectors=None,
        left_out=0.0,
      ),
    )
    kept[str(given.row)] = sum(encoded), made.measures
    del encoded[:]
  (first, _), (second, scores) = kept.values()
  assert first == 2 * second == 2 * made.num_queries  # as many documents
  name = f"evaluate/public/{adapter.row}"
  before = load(finished_run.root, name, results.Evaluation)
  assert scores == before.measures


def opened_in_private(root):
  mine = [name for name in OPENED if name.startswith(str(root))]
  assert len(mine) > 3
  return [name for name in mine if name.startswith(str(root / "private"))]


def test_a_chooser_has_and_opens_nothing_private(finished_run, shared):
  root, documents = shared
  del OPENED[:]
  first = make_fusion(root, documents)
  assert not (root / results.PRIVATE).exists()
  # The same beside private files: none is opened, and nothing changes.
  shutil.copytree(finished_run.root / "private", root / "private")
  del OPENED[:]
  again = make_fusion(root, documents)
  assert not opened_in_private(root)
  assert dataclasses.replace(again, seconds=first.seconds) == first
  retriever = load(root, "train_retriever/synthetic_eps8", results.Checkpoint)
  assert first.statement.ledger == retriever.statement.ledger
  assert first.statement.epsilon == retriever.statement.epsilon


def test_a_chooser_that_looks_at_real_queries_is_caught(
  finished_run, shared, monkeypatch
):
  root, documents = shared
  shutil.copytree(finished_run.root / "private", root / "private")
  right = fuse._read_queries

  def wrong(task):
    np.load(root / "private/prepare_data/dev.npz")
    return right(task)

  monkeypatch.setattr(fuse, "_read_queries", wrong)
  del OPENED[:]
  make_fusion(root, documents)
  assert opened_in_private(root)


def with_maps(config):
  """Settings with which queries teach maps in place of encoders."""
  chosen = dataclasses.replace(
    config.rows, trained_part="query_map", adapted=(), ltr=()
  )
  return dataclasses.replace(config, rows=chosen)


@pytest.mark.parametrize("name", ["train_retriever", "fuse", "learn_map"])
def test_tasks_of_shareable_rows_hold_public_documents_alone(
  finished_run, tmp_path, monkeypatch, name
):
  root, tasks = finished_run.copy(tmp_path), {}
  one = stages.get(name)
  changed = dataclasses.replace(
    one,
    run=lambda task: (
      tasks.update({str(task.row.retriever): task}) or _Stopped()
    ),
  )
  monkeypatch.setattr(
    sys.modules[f"synthq_jax.stages.{name}"], "STAGE", changed
  )
  monkeypatch.setattr(
    type(changed),
    "make",
    lambda self, task, **_: (
      self.run(task) if self is changed else STAGE_MAKE(self, task, **_)
    ),
  )
  for folder in (root / name, root / "private" / name):
    shutil.rmtree(folder, ignore_errors=True)
  config = finished_run.config
  config = with_maps(config) if name == "learn_map" else config
  with pytest.raises(RuntimeError, match="did not save"):
    plan.run(config, root, stages=[name])
  for row, task in tasks.items():
    assert row != "original"
    assert type(task.folders) is workspace.Folders  # without the secret
    assert type(task.inputs.documents) is results.PublicDocuments
    for value in vars(task.inputs).values():
      assert not isinstance(value, results.PreparedData)
  assert tasks


def test_one_row_is_handed_private_queries_where_documents_would_do(
  finished_run, monkeypatch
):
  """PreparedData is a PublicDocuments: types alone would let it in."""
  runs, right = [], runner.Run.survey
  monkeypatch.setattr(
    runner.Run, "survey", lambda self: runs.append(self) or right(self)
  )
  plan.outlook(finished_run.config, finished_run.root, plan.STAGES)
  [run] = runs
  held = {
    (one.name, name, field)
    for one in run.stages
    for name, target in one.plan(run.plan).items()
    for job in [one.job(run, target)]
    if job
    for field, value in (vars(job.inputs) if job.inputs else {}).items()
    if isinstance(value, results.PreparedData) and field != "prepared"
  }
  assert held == {("train_retriever", "original", "documents")}
  run.plan = dataclasses.replace(run.plan, config=with_maps(run.config))
  given = {
    str(row): type(learn_map.make_job(run, row).inputs.documents)
    for row in run.plan.mapped
  }
  assert given.pop("original") is results.PreparedData
  assert set(given.values()) == {results.PublicDocuments}


class _Stopped:
  """No result."""


def test_a_querys_own_document_is_no_result_and_sets_no_scale(tmp_path):
  """As in ArguAna, whose queries are documents: BM25 scores them far above."""
  own = "a long argument about the price of sugar and of salt in winter"
  texts = {
    "d0": own,
    "d1": "the price of sugar",
    "d2": "salt in winter",
    "d3": "coal",
  }
  corpus = tmp_path / "corpus.jsonl"
  lines = [
    {"_id": id_, "title": "", "text": text} for id_, text in texts.items()
  ]
  corpus.write_text("".join(json.dumps(line) + "\n" for line in lines))
  judged = _search.Judged(
    split="test",
    qrels={"d0": {"d1": 1}},
    queries=[own],
    query_tokens=np.zeros((1, 1), np.int32),
    passages=passages.Passages(
      np.array([*texts]), np.zeros((4, 1), np.int32), np.arange(4)
    ),
    corpus=corpus,
  )
  kept = _search.search_lexical(judged, depth=2)["d0"]
  assert [*kept][0] == "d0"
  other = _search.search_lexical(judged._replace(drop_identical=True), depth=2)[
    "d0"
  ]
  assert [*other] == ["d1", "d2"]  # as many as were asked for
  values = fusion.scale(other)
  assert values["d1"] == 1
