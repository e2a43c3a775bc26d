"""Fused and expanded rows: what they are made of, and what chose them."""

import collections
import dataclasses
import json
import math
import os
import shutil
import sys
import threading
import time
import types

import made_up
import numpy as np
import pytest
import tiny_runs

from synthq_jax import artifacts
from synthq_jax.data import passages
from synthq_jax.leakage import rerankers
from synthq_jax.pipeline import (
  inputs,
  plan,
  results,
  runner,
  system_results,
  workspace,
)
from synthq_jax.pipeline import queries as queries_lib
from synthq_jax.privacy import statement
from synthq_jax.retrieval import fusion, trec
from synthq_jax.stages import (
  _held_out,
  _search,
  evaluate,
  expand,
  fuse,
  measure_costs,
  rerank,
  stage,
  train_reranker,
)

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


def systems(root, system):
  folders = (root / "private/evaluate/test").glob(f"{system}_*")
  return sorted(one.name.removeprefix(f"{system}_") for one in folders)


def test_a_run_that_is_a_part_of_many_rows_is_read_once(tmp_path, monkeypatch):
  """And again once the file is another one."""
  read, path = [], tmp_path / "run.txt"
  monkeypatch.setattr(
    evaluate.trec, "read_run", lambda one: read.append(one) or one.read_text()
  )
  path.write_text("first")
  assert [evaluate._part(path) for _ in range(3)] == ["first"] * 3
  path.write_text("another")
  assert evaluate._part(path) == "another" and len(read) == 2


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
  monkeypatch.setattr(queries_lib._kept, "most_bytes", 0)
  large = index(["a", "d"], "red apples", "green pears")
  assert index(["a", "d"], "red apples", "green pears") is not large
  assert not len(queries_lib._kept)  # of a large one nothing stays


# In the pipeline.


def test_every_source_of_pairs_has_its_fused_row(finished_run):
  dense = ["original", "public_only", "synthetic_eps8", "untrained"]
  found = systems(finished_run.root, "fused")
  assert set(dense) < set(found)
  assert set(found) - set(dense) == {
    "direct_dp_group_eps8",  # compared, so not scored on the public set
    *(
      one.name.removeprefix("fused_")
      for one in finished_run.root.rglob("evaluate/public/fused_direct_dp*")
    ),
  }
  for row in ("fused synthetic eps8", "expanded public only", "over BM25"):
    assert row in finished_run.report.table
  assert "gain kept" in finished_run.report.table


def test_every_set_of_queries_has_its_expanded_row(finished_run):
  found = systems(finished_run.root, "expanded")
  assert found == ["original", "public_only", "synthetic_eps8"]
  assert not list((finished_run.root / "evaluate").rglob("expanded_*"))


@pytest.mark.parametrize("row", ["synthetic_eps8", "original"])
def test_a_fused_row_is_bm25_and_its_retriever_at_the_chosen_weight(
  finished_run, row
):
  root = finished_run.root
  place = "private/fuse" if row == "original" else "fuse"
  made = load(root, f"{place}/{row}", system_results.Fusion)
  scored = evaluation(root, f"fused_{row}")
  assert scored.system == "fused" and scored.source == row
  lexical, dense, fused = (
    trec.read_run(root / evaluation(root, name).directory / "run.trec")
    for name in ("bm25", row, f"fused_{row}")
  )
  expected = fusion.fuse(made.method, lexical, dense, weight=made.weight)
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
    private = one.retriever == "original"
    assert math.isinf(one.statement.epsilon) == private
  first = made[0]
  best = max(first.scores, key=lambda pair: pair[1])
  assert first.weight <= best[0]


def test_the_weight_of_all_rows_is_searched_for_once(
  finished_run, tmp_path, monkeypatch
):
  root, searched, chosen = (
    finished_run.copy(tmp_path),
    [],
    fuse._held_out.chosen,
  )

  def noted(weight, judged, *args, **named):
    searched.append(judged)
    return chosen(weight, judged, *args, **named)

  monkeypatch.setattr(fuse._held_out, "chosen", noted)
  chooser = fuse.Config(min_queries=5, standard_errors=0.5)
  config = dataclasses.replace(finished_run.config, fuse=chooser)
  plan.run(config, root, stages=["fuse"], progress=False)
  (judged,) = searched
  assert judged is not None
  test_one_public_weight_is_that_of_all_rows(types.SimpleNamespace(root=root))


def test_without_enough_queries_the_weight_is_the_set_one(
  finished_run, tmp_path
):
  root = finished_run.copy(tmp_path)
  config = dataclasses.replace(
    finished_run.config,
    fuse=fuse.Config(held_out=0.2, min_queries=10_000, default_weight=0.35),
  )
  plan.run(config, root, stages=["fuse"], progress=False)
  made = load(root, "fuse/synthetic_eps8", system_results.Fusion)
  assert (made.weight, made.num_queries, made.scores) == (0.35, 0, ())
  assert "for want of queries" in made.chosen_on


def test_a_weight_that_is_set_asks_nobody(finished_run, tmp_path):
  root = finished_run.copy(tmp_path)
  for name in ("generate/public_only", "filter_queries/public_only"):
    (root / name / "tokens.npz").unlink()
  documents = results.public_documents(prepared(root))
  made = make_fusion(root, documents, chooser=fuse.Config(weight=0.3))
  assert (made.weight, made.num_queries, made.scores) == (0.3, 0, ())
  assert made.chosen_on == "nothing, it was set"
  with pytest.raises(ValueError, match=r"fuse\.Config\.weight"):
    fuse.Config(weight=1.5)


def test_only_what_chooses_for_rerankers_is_held_out(finished_run, tmp_path):
  space = workspace.Workspace(tmp_path, secret_seed=7)
  for reranked, share in ((False, 0.0), (True, 0.2)):
    config = dataclasses.replace(
      finished_run.config,
      rows=dataclasses.replace(finished_run.config.rows, reranked=reranked),
    )
    assert runner.Run(config, space, ()).held_out == share


@pytest.mark.parametrize(
  ("row", "stage"),
  [
    ({"fused": True}, "fuse"),
    ({"reranked": True}, "rerank"),
    ({"ltr": ("original",)}, "learn_to_rank"),
  ],
)
def test_an_order_of_more_than_is_found_is_refused(finished_run, row, stage):
  config = finished_run.config
  rows = {"fused": False, "reranked": False, "ltr": (), "mapped": ()}
  with pytest.raises(
    ValueError, match=rf"at least {stage}\.Config\.depth, .* 9 and \d+"
  ):
    dataclasses.replace(
      config,
      rows=dataclasses.replace(config.rows, **rows | row),
      evaluate=dataclasses.replace(config.evaluate, depth=9),
    )


def test_a_fusion_without_bm25_is_refused():
  with pytest.raises(ValueError, match=r"Rows\.fused needs the row"):
    plan.Rows(bm25=False, fused=True)


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
    name=row,
    **(given | changes),
  )


def make_expansion(root, documents, config=None, **changes):
  given = {
    "documents": documents,
    "synthetic": load(root, "generate/eps8", results.SyntheticQueries),
  }
  return tiny_runs.make(
    expand.STAGE,
    config or expand.Config(),
    workspace.Folders(root),
    name="synthetic_eps8",
    **(given | changes),
  )


def opened_in_private(root):
  mine = [name for name in OPENED if name.startswith(str(root))]
  assert len(mine) > 3
  return [name for name in mine if name.startswith(str(root / "private"))]


@pytest.mark.parametrize("make", [make_fusion, make_expansion])
def test_a_chooser_has_and_opens_nothing_private(finished_run, shared, make):
  root, documents = shared
  del OPENED[:]
  first = make(root, documents)
  assert not (root / results.PRIVATE).exists()
  # The same beside private files: none is opened, and nothing changes.
  shutil.copytree(finished_run.root / "private", root / "private")
  del OPENED[:]
  again = make(root, documents)
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
  right = _held_out.read

  def wrong(*given, **named):
    np.load(root / "private/prepare_data/dev.npz")
    return right(*given, **named)

  monkeypatch.setattr(_held_out, "read", wrong)
  del OPENED[:]
  make_fusion(root, documents)
  assert opened_in_private(root)


@pytest.mark.parametrize(
  "name", ["train_retriever", "fuse", "expand", "train_reranker", "rerank"]
)
def test_tasks_of_shareable_rows_hold_public_documents_alone(
  finished_run, tmp_path, monkeypatch, name
):
  root, tasks = finished_run.copy(tmp_path), {}
  config = dataclasses.replace(
    finished_run.config,
    rows=dataclasses.replace(finished_run.config.rows, reranked=True),
    rerank=rerank.Config(weight=0.5),  # else retrievers leave queries out
    train_reranker=train_reranker.Config(
      recipe=rerankers.Recipe(steps=1, batch_size=8),
      document_length=24,
      query_length=8,
    ),
  )
  one = stage.get(name)
  changed = dataclasses.replace(
    one, run=lambda task: tasks.update({task.name: task}) or _Stopped()
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
  with pytest.raises(RuntimeError, match="did not save"):
    plan.run(config, root, stages=[name], progress=False)
  for row, task in tasks.items():
    assert row != "original"
    assert type(task.folders) is workspace.Folders  # without the secret
    assert type(task.inputs["documents"]) is results.PublicDocuments
    for value in task.inputs.values():
      assert not isinstance(value, results.PreparedData)
  assert tasks


class _Stopped:
  """No result."""


def test_a_statement_is_that_of_the_queries(shared):
  root, documents = shared
  made = load(root, "generate/eps8", results.SyntheticQueries)
  claimed = statement.inherit(PRIVATE_GENERATOR, "Queries were sampled.")
  made = dataclasses.replace(made, statement=claimed)
  result = make_expansion(root, documents, synthetic=made)
  assert result.statement.ledger == PRIVATE_GENERATOR.ledger
  assert "post-processing" in result.statement.notes[-1]
  assert result.directory == "expand/synthetic_eps8"


def test_real_queries_expand_in_the_private_folder_alone(finished_run):
  root = finished_run.root
  made = load(root, "private/expand/original", system_results.Expansion)
  assert made.statement.epsilon == math.inf
  assert not (root / "expand/original").exists()
  lines = (root / made.directory / made.FILE).read_text().splitlines()
  read = {line["_id"]: line["queries"] for line in map(json.loads, lines)}
  folder = root / "private/prepare_data"
  texts = {
    line["_id"]: line["text"]
    for line in map(json.loads, (folder / "queries.jsonl").open())
  }
  with np.load(folder / "train.npz") as stored:
    ids = inputs.read_documents(root / "prepare_data").ids
    for name, row in zip(stored["ids"], stored["documents"], strict=True):
      assert read[str(ids[row])].count(texts[str(name)]) == 2  # repeat=2


# Expansion.


def test_how_many_and_how_often_are_choices(shared):
  root, documents = shared
  folder = root / "generate/eps8"
  written = collections.defaultdict(list)
  for line in map(json.loads, (folder / "queries.jsonl").open()):
    written[line["document"]].append(line["text"])
  for most, repeat in ((None, 1), (1, 3)):
    config = expand.Config(queries_per_document=most, repeat=repeat)
    made = make_expansion(root, documents, config)
    lines = map(json.loads, (root / made.directory / made.FILE).open())
    read = {line["_id"]: line["queries"] for line in lines}
    assert read == {
      id_: texts[:most] * repeat for id_, texts in written.items()
    }
    assert made.num_documents == len(read)
    assert made.num_queries == sum(len(t[:most]) for t in written.values())


def test_a_document_out_of_order_is_refused(tmp_path):
  lines = [{"_id": f"d {i}", "title": "", "text": "x"} for i in range(3)]
  write = artifacts.write_atomically
  write(tmp_path / "corpus", "".join(json.dumps(x) + "\n" for x in lines))
  added = [{"_id": "d 2", "queries": ["b"]}, {"_id": "d 1", "queries": ["a"]}]
  write(tmp_path / "added", "".join(json.dumps(x) + "\n" for x in added))
  with pytest.raises(ValueError, match=r"order of the collection, got 'd 1'"):
    list(inputs.expanded(tmp_path / "corpus", tmp_path / "added"))


# What a query costs.


def test_every_system_is_timed_and_what_it_holds_is_added_up(finished_run):
  root = finished_run.root
  made = load(root, "private/measure_costs", system_results.Costs)
  rows = {one.name: one for one in made.rows}
  fused, dense = rows["fused_synthetic_eps8"], rows["synthetic_eps8"]
  assert fused.index_bytes == dense.index_bytes + rows["bm25"].index_bytes
  assert rows["untrained (HNSW)"].index_bytes > rows["untrained"].index_bytes
  size = load(
    root, "encode_documents/synthetic_eps8", system_results.Vectors
  ).num_bytes
  assert 0.9 * size < dense.index_bytes <= size  # less the header
  for name, one in rows.items():
    assert 0 < one.p50 <= one.p95
    has_vectors = not name.startswith(("bm25", "expanded"))
    assert (one.encode_seconds is not None) == has_vectors
  page = (root / finished_run.report.private_html).read_text()
  assert "p95 (ms)" in page
  assert "p95 (ms)" not in (root / finished_run.report.html).read_text()


@pytest.mark.skipif(
  not hasattr(os, "sched_getaffinity"), reason="cores cannot be chosen here"
)
def test_threads_that_were_started_on_one_core_have_all_afterwards():
  cores = os.sched_getaffinity(0)
  is_over, found = threading.Event(), []

  def watch():
    found.append(os.sched_getaffinity(0))
    is_over.wait()
    found.append(os.sched_getaffinity(0))

  thread = threading.Thread(target=watch)
  with measure_costs._one_core():
    thread.start()
    while not found:
      time.sleep(0.01)
  is_over.set()
  thread.join()
  assert found == [{min(cores)}, cores]


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
  kept = _search.lexical(judged, depth=2)["d0"]
  assert [*kept][0] == "d0"
  other = _search.lexical(judged._replace(drop_identical=True), depth=2)["d0"]
  assert [*other] == ["d1", "d2"]  # as many as were asked for
  values = fusion.Convex(lexical_floor=0.0).values(other, dense=False)
  assert values["d1"] == 1
