"""Filters of synthetic queries: what goes, what is counted, what is read."""

import dataclasses
import json
import shutil
import sys

import made_up
import numpy as np
import pytest
import tiny_runs
from finished_runs import NUM_PAIRS

from synthq_jax.privacy import statement
from synthq_jax.runtime import prepared_files, results, workspace
from synthq_jax.stages import filter_queries, plan, train_retriever
from synthq_jax.storage import artifacts

TOP = filter_queries.Config(top_k=1)
ZERO = filter_queries.Config(top_k=0)
PRIVATE_GENERATOR = made_up.claim()


def load(root, stage, kind=results.SyntheticQueries):
  return artifacts.load(root / stage / "public_only", kind)


def prepared(root):
  place = root / results.PRIVATE / "prepare_data"
  return artifacts.load(place, results.PreparedData)


@pytest.fixture(name="hand_made")
def _hand_made(finished_run, tmp_path):
  """Queries with known faults by a DP generator, and no private folder."""
  done = finished_run.root
  documents = results.public_documents(prepared(done))
  root = tmp_path / "shared"
  shutil.copytree(done / "prepare_data", root / "prepare_data")
  read = prepared_files.read_documents(root / "prepare_data")
  ids, tokens = read.ids, read.tokens
  corpus = (root / "prepare_data/corpus.jsonl").read_text().splitlines()
  queries = np.zeros((len(ids), 8), np.int32)
  queries[:, :7], queries[:, 7] = (
    np.asarray(tokens)[:, :7],
    1,
  )  # each like its document
  texts = [f"what was written in report {i}" for i in range(len(ids))]
  texts[9] = json.loads(corpus[9])["text"][20:70]  # copied
  for i in range(20, 30):  # found by the numbers of their documents
    texts[i] = json.loads(corpus[i])["text"][:70]
  lines = [
    json.dumps({"_id": f"s{i}", "text": text, "document": str(ids[i])})
    for i, text in enumerate(texts)
  ]
  place = root / "generate/eps8"
  artifacts.write_atomically(place / "queries.jsonl", "\n".join(lines) + "\n")
  rows = np.arange(len(ids))
  np.savez(place / "tokens.npz", tokens=queries, documents=rows, passages=rows)
  made = dataclasses.replace(
    load(done, "generate"),
    directory="generate/eps8",
    row=made_up.row("synthetic_eps8"),
    statement=statement.inherit(PRIVATE_GENERATOR, "Queries were sampled."),
    removed={"duplicate": 4},
    num_queries=len(ids),
  )
  return root, documents, made


def run(root, documents, made, config=TOP, digest="digest"):
  return tiny_runs.make(
    filter_queries.STAGE,
    config,
    workspace.Folders(root),
    row=made.row,
    name=made.name,
    digest=digest,
    inputs=filter_queries.Inputs(documents=documents, synthetic=made),
  )


def kept_names(root, name="eps8"):
  text = (root / "filter_queries" / name / "queries.jsonl").read_text()
  return [json.loads(line)["_id"] for line in text.splitlines()]


def test_the_time_of_a_filter_is_added_to_that_of_writing(hand_made):
  root, documents, made = hand_made
  slow = dataclasses.replace(made, seconds=1e6)  # what writing took
  kept = run(root, documents, slow)
  assert 1e6 < kept.seconds < 1e6 + 1e4


# In the pipeline.


def test_a_run_trains_and_reports_on_what_the_filter_kept(finished_run):
  root, report = finished_run.root, finished_run.report
  before, after = load(root, "generate"), load(root, "filter_queries")
  assert 0 < after.num_queries < before.num_queries
  written = after.num_documents * after.queries_per_document
  assert after.num_queries + sum(after.removed.values()) == written
  tokens = np.load(root / after.directory / "tokens.npz")["tokens"]
  kept = kept_names(root, "public_only")
  assert len(tokens) == len(kept) == after.num_queries
  page = (root / report.markdown).read_text()
  assert f"{after.removed['not found']:,} (not found)" in page
  assert "rank among the first 119 of the collection" in page
  assert 0 < after.seconds
  assert not list((root / "filter_queries").rglob("state_*"))


def test_without_a_filter_the_stage_and_its_traces_are_not_there(
  finished_run, tmp_path
):
  root = finished_run.copy(tmp_path)
  off = dataclasses.replace(
    finished_run.config, filter_queries=filter_queries.Config()
  )
  shutil.rmtree(root / "filter_queries")
  place = root / "generate/public_only"
  before = artifacts.read_fingerprint(place)
  for setting in (off, dataclasses.replace(off, filter_queries=ZERO)):
    plan.run(setting, root, stages=["generate"])
  plan.run(off, root, stages=["filter_queries"])
  assert not (root / "filter_queries").exists()
  assert artifacts.read_fingerprint(place) == before


def test_the_retriever_is_trained_again_when_the_filter_changes(
  finished_run, tmp_path, monkeypatch
):
  root, given = finished_run.copy(tmp_path), []
  trained = load(root, "train_retriever", results.Checkpoint)
  alone = dataclasses.replace(
    finished_run.config,
    rows=dataclasses.replace(
      finished_run.config.rows,
      original=False,
      synthetic=(),
      direct_dp=(),
      ltr=("public_only",),
      compared=(),
    ),
  )

  def noted(task):
    given.append(task.inputs.synthetic.directory)
    return trained

  changed = dataclasses.replace(train_retriever.STAGE, run=noted)
  monkeypatch.setattr(train_retriever, "STAGE", changed)
  for filters in (
    alone.filter_queries,
    filter_queries.Config(top_k=50),
    filter_queries.Config(),
  ):
    changed = dataclasses.replace(alone, filter_queries=filters)
    plan.run(changed, root, stages=["train_retriever"])
  assert given == ["filter_queries/public_only", "generate/public_only"]


# What the filter takes.


def test_queries_that_bm25_does_not_answer_go(hand_made):
  root, documents, made = hand_made
  result = run(root, documents, made)
  names = kept_names(root)
  assert "s9" in names  # its words stand in its own document
  assert "s8" not in names  # it names the number of another one
  assert result.removed["not found"] == NUM_PAIRS - len(names) > NUM_PAIRS / 2
  assert "whose document BM25 does not rank" in result.filters
  assert "retriever" not in result.statement.notes[-1]


def test_positions_that_belong_to_other_queries_are_refused(hand_made):
  root, documents, made = hand_made
  path = root / "generate/eps8/tokens.npz"
  with np.load(path) as stored:
    tokens, owners = stored["tokens"], stored["documents"]
  moved = np.roll(owners, 1)
  np.savez(path, tokens=tokens, documents=moved, passages=moved)
  with pytest.raises(ValueError, match="of the same queries"):
    run(root, documents, made)


def test_a_filter_that_keeps_nothing_advises_a_larger_top_k(hand_made):
  """It advised to train a retriever for longer, where BM25 filtered."""
  root, documents, made = hand_made
  path = root / made.directory / "queries.jsonl"
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  path.write_text(
    "".join(json.dumps({**line, "text": "zzz"}) + "\n" for line in lines)
  )
  told = "left none of the 120 .* larger top_k"
  with pytest.raises(ValueError, match=told) as error:
    run(root, documents, made)
  assert "retriever" not in str(error.value)


def test_a_filter_that_would_keep_all_is_refused(hand_made):
  root, documents, made = hand_made
  with pytest.raises(ValueError, match=f"below {NUM_PAIRS}, the size"):
    run(root, documents, made, filter_queries.Config(top_k=NUM_PAIRS))


# Post-processing.


def test_the_stage_is_given_public_things_and_synthetic_queries_alone(
  finished_run, tmp_path, monkeypatch
):
  root = finished_run.copy(tmp_path)
  config = dataclasses.replace(
    finished_run.config,
    rows=plan.Rows(bm25=False, original=False, synthetic=(), direct_dp=()),
  )
  tasks, done = [], load(root, "filter_queries")

  def noted(task):
    tasks.append(task)
    return done

  changed = dataclasses.replace(filter_queries.STAGE, run=noted)
  monkeypatch.setattr(filter_queries, "STAGE", changed)
  config = dataclasses.replace(config, filter_queries=TOP)
  stages = ["filter_queries"]
  plan.run(config, root, stages=stages)
  (task,) = tasks
  assert type(task.folders) is workspace.Folders  # without the secret
  given = {
    name: type(value).__name__ for name, value in vars(task.inputs).items()
  }
  assert given == {
    "documents": "PublicDocuments",
    "synthetic": "SyntheticQueries",
  }
  fields = {f.name for f in dataclasses.fields(results.PublicDocuments)}
  assert fields == {
    "directory",
    "num_documents",
    "vocabulary",
    "vocab_size",
    "extra_ids",
    "document_length",
    "query_length",
    "passage_stride",
    "num_passages",
    "from_pairs",  # of the source, by its kind alone
    "num_asked",  # 0 unless settings call it public
    "retriever_length",
    "token_ids",  # of the vocabulary
  }
  assert not hasattr(workspace.Folders, "seed")
  assert not hasattr(workspace.Folders, "key")


OPENED = []
sys.addaudithook(
  lambda event, arguments: event == "open" and OPENED.append(str(arguments[0]))
)  # hooks stay: this one only notes names


def test_the_stage_opens_nothing_private_for_a_dp_generator(hand_made):
  root, documents, made = hand_made
  del OPENED[:]
  result = run(root, documents, made)  # there is no private folder
  private = root / results.PRIVATE
  assert not private.exists()
  mine = [name for name in OPENED if name.startswith(str(root))]
  assert len(mine) > 10
  assert not [name for name in mine if name.startswith(str(private))]
  assert result.directory == "filter_queries/eps8"


@pytest.fixture(name="poisoned")
def _poisoned(finished_run, hand_made):
  """Queries whose private folder holds real ones, equal to some of them."""
  root, documents, made = hand_made
  private = root / results.PRIVATE
  shutil.copytree(finished_run.root / results.PRIVATE, private)
  lines = (root / made.directory / "queries.jsonl").read_text().splitlines()
  for path in private.rglob("queries.jsonl"):
    path.write_text("\n".join(lines[20:30]) + "\n")
  stored = np.load(root / made.directory / "tokens.npz")
  np.savez(
    private / "prepare_data/train.npz",
    ids=np.array([f"q{i}" for i in range(20, 30)]),
    tokens=stored["tokens"][20:30],
    documents=stored["documents"][20:30],
  )
  return root, documents, made


def check_real_queries_are_not_read(root, documents, made):
  del OPENED[:]
  run(root, documents, made)
  private = str(root / results.PRIVATE)
  assert not [name for name in OPENED if name.startswith(private)]
  assert {f"s{i}" for i in range(20, 30)} <= set(kept_names(root))


def test_real_queries_within_reach_are_not_looked_at(poisoned):
  root, documents, made = poisoned
  check_real_queries_are_not_read(root, documents, made)
  with_them = kept_names(root)
  shutil.rmtree(root / results.PRIVATE)
  run(root, documents, made, digest="without")
  assert kept_names(root) == with_them


@pytest.mark.parametrize("name", ["queries.jsonl", "train.npz"])
def test_a_filter_that_looks_at_real_queries_is_caught(
  poisoned, monkeypatch, name
):
  root, documents, made = poisoned
  right = filter_queries._read_written

  def wrong(folders, ids, synthetic):
    lines, stored = right(folders, ids, synthetic)
    (path,) = folders.private("prepare_data").rglob(name)
    if name == "train.npz":
      real = {tuple(row) for row in np.load(path)["tokens"]}
      found = [tuple(row) in real for row in stored["tokens"]]
    else:
      real = path.read_text()
      found = [line["text"] in real for line in lines]
    rows = np.flatnonzero(~np.array(found))
    return [lines[i] for i in rows], {k: v[rows] for k, v in stored.items()}

  monkeypatch.setattr(filter_queries, "_read_written", wrong)
  with pytest.raises(AssertionError):
    check_real_queries_are_not_read(root, documents, made)
  assert not {f"s{i}" for i in range(20, 30)} & set(kept_names(root))


def test_the_statement_is_the_generators_with_a_note(hand_made):
  root, documents, made = hand_made
  claim = run(root, documents, made).statement
  assert claim.epsilon == PRIVATE_GENERATOR.epsilon > 0
  assert claim.ledger == PRIVATE_GENERATOR.ledger
  assert claim.notes[:-1] == made.statement.notes
  assert "filtered by public rules" in claim.notes[-1]


def test_queries_of_a_generator_without_privacy_stay_private(hand_made):
  root, documents, made = hand_made
  (root / results.PRIVATE).mkdir()
  shutil.move(root / "generate", root / results.PRIVATE / "generate")
  hidden = dataclasses.replace(
    made,
    directory=f"{results.PRIVATE}/generate/eps8",
    statement=statement.non_private("Trained without noise."),
  )
  result = run(root, documents, hidden)
  assert result.directory == f"{results.PRIVATE}/filter_queries/eps8"
  assert not (root / "filter_queries").exists()
  assert result.statement.epsilon == np.inf
