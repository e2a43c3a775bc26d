"""Documents in passages: cut, written for, encoded, and found by their best."""

import collections
import dataclasses
import hashlib
import itertools
import json

import numpy as np
import pytest
import random_t5
import small_data
import tiny_runs

from synthq_jax.data import collection, passages, shipped
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.retrieval import (
  fusion,
  index,
  trec,
  vector_files,
)
from synthq_jax.runtime import (
  prepared_files,
  results,
  system_results,
  workspace,
)
from synthq_jax.stages import direct_dp, finetune_dp, fuse, plan, static_encoder
from synthq_jax.storage import artifacts
from synthq_jax.tools import export

LENGTH, STRIDE, NUM, DEPTH = 16, 8, 40, 5
STATIC = static_encoder.Config(dim=4, steps=2, warmup_steps=1, batch_size=8)


# How documents are cut.


@pytest.mark.parametrize("stride", [1, 3, 7, 100])
@pytest.mark.parametrize("words", [0, 1, 6, 7, 8, 13, 14, 15, 50])
@pytest.mark.parametrize("title", [0, 1, 4, 30])
def test_windows_hold_every_token_and_begin_with_the_title(
  title, words, stride
):
  head, text = list(range(1000, 1000 + title)), list(range(10, 10 + words))
  cut = passages.windows(head, text, length=8, stride=stride, eos=1)
  kept = head[:4]
  seen = []
  for row in cut:
    assert len(row) <= 8 and row[-1] == vocabulary_lib.EOS_ID
    assert row[: len(kept)] == kept
    seen.append(row[len(kept) : -1])
  assert set(itertools.chain(*seen)) == set(text)
  assert all(len(part) == 8 - len(kept) - 1 for part in seen[:-1])
  starts = [part[0] for part in seen if part]
  assert set(np.diff(starts)) <= {min(stride, 8 - len(kept) - 1)}
  if len(seen) > 1:  # the one before did not reach the end
    assert seen[-2][-1] < text[-1]


def test_the_shortest_windows_have_room_for_the_text():
  """One token and EOS: the title is left out."""
  eos = vocabulary_lib.EOS_ID
  cut = passages.windows([7, 8], [11, 12], length=2, stride=1, eos=1)
  assert cut == [[11, eos], [12, eos]]
  cut = passages.windows([7, 8], [11, 12], length=3, stride=1, eos=1)
  assert cut == [[7, 11, eos], [7, 12, eos]]


TEXTS = ["short", "a longer text " * 20, "", "end"]
DOCUMENTS = [
  collection.Document(f"d {i}", text, title="The title" * (i % 2))
  for i, text in enumerate(TEXTS)
] + [collection.Document("d 4", "", title="Title alone")]


def write(folder, stride=STRIDE):
  folder.mkdir()
  state = hashlib.sha256()
  written = prepared_files.write_documents(
    iter(DOCUMENTS),
    folder,
    vocabulary_lib.load(shipped.VOCABULARY),
    length=LENGTH,
    stride=stride,
    choose=[3, 1],
    digest=state.update,
  )
  return written, state.hexdigest()


def test_ids_map_back_and_titles_alone_are_one_passage(tmp_path):
  written, _ = write(tmp_path / "a")
  read = prepared_files.read_documents(tmp_path / "a")
  assert read.ids.tolist() == [one.id for one in DOCUMENTS]
  counts = np.bincount(read.owners)
  assert counts[1] > 3 and counts[[0, 2, 3, 4]].tolist() == [1, 1, 1, 1]
  assert not read.are_documents
  assert written.num_passages == len(read.owners) == len(read.tokens)
  assert written.cut == 1 / 5
  first, stop = read.of(np.array([1, 4]))
  assert (first.tolist(), stop.tolist()) == (
    [1, counts[0] + counts[1] + 2],
    [1 + counts[1], len(read.owners)],
  )
  vocabulary = vocabulary_lib.load(shipped.VOCABULARY)
  for row in read.tokens[1 : 1 + counts[1]]:
    text = vocabulary.decode([int(t) for t in row if t > 1])
    assert text.startswith("the title")


@pytest.mark.parametrize("stride", [0, STRIDE])
@pytest.mark.parametrize("chunk", [1, 2])
def test_chunks_change_nothing(tmp_path, monkeypatch, chunk, stride):
  whole = write(tmp_path / "whole", stride)
  monkeypatch.setattr(prepared_files, "_CHUNK", chunk)
  monkeypatch.setattr(prepared_files, "_NAMES", chunk + 1)
  assert write(tmp_path / "parts", stride) == whole
  for path in (p for p in (tmp_path / "whole").rglob("*") if p.is_file()):
    other = tmp_path / "parts" / path.relative_to(tmp_path / "whole")
    assert other.read_bytes() == path.read_bytes(), path.name
  parts = prepared_files.read_documents(tmp_path / "parts")
  monkeypatch.undo()
  read = prepared_files.read_documents(tmp_path / "parts")
  np.testing.assert_array_equal(parts.owners, read.owners)
  np.testing.assert_array_equal(parts.ids, read.ids)


def test_a_query_gets_the_passage_that_has_most_of_it():
  tokens = np.array([[5, 6, 7], [8, 9, 1], [8, 9, 5], [4, 4, 4]])
  read = passages.Passages(np.array(["a", "b"]), tokens, np.array([0, 0, 0, 1]))
  queries = np.array([[9, 8, 1], [7, 7, 1], [9, 5, 8], [2, 2, 1], [5, 1, 0]])
  owners = np.array([0, 0, 0, 0, 1])
  assert passages.best(read, owners, queries).tolist() == [1, 0, 2, 0, 3]
  alone = [
    passages.best(read, owners[i : i + 1], queries[i : i + 1])[0]
    for i in range(5)
  ]
  assert alone == [1, 0, 2, 0, 3]  # no other query moves a record's passage


# How documents are found.


@pytest.mark.parametrize("depth", [1, 3, 5, 100])
def test_a_document_is_found_by_its_best_passage(depth):
  rng = np.random.default_rng(0)
  owners = np.repeat(np.arange(8), [1, 40, 1, 2, 30, 1, 1, 5])
  documents = rng.normal(size=(len(owners), 4)).astype(np.float32)
  documents[owners == 1] *= 5  # one document has all of the best passages
  queries = rng.normal(size=(6, 4)).astype(np.float32)
  scores, found = index.search_documents(
    index.exact(documents), queries, owners, depth
  )
  products = queries.astype(np.float64) @ documents.T.astype(np.float64)
  best = np.stack([products[:, owners == d].max(axis=1) for d in range(8)], 1)
  expected = np.argsort(-best, axis=1)[:, :depth]
  np.testing.assert_array_equal(found, expected)
  np.testing.assert_allclose(
    scores, np.take_along_axis(best, expected, axis=1), rtol=1e-6
  )


def test_passages_that_score_the_same_are_one_document():
  owners = np.array([0, 0, 1])
  documents = np.ones((3, 2), np.float32)
  scores, found = index.search_documents(
    index.exact(documents), documents[:1], owners, 10
  )
  assert found.tolist() == [[0, 1]] and scores.tolist() == [[2.0, 2.0]]


def test_the_text_of_a_query_moves_no_document_of_direct_training(run):
  """Where its unit is the text: the passage that fits best follows from it."""
  space = workspace.Folders(run)
  prepared = artifacts.load(run / "private/prepare_data", results.PreparedData)
  stored = prepared_files.arrays(
    space, prepared, run / "private/prepare_data/train.npz"
  )
  read = prepared_files.document_tokens(space, prepared)
  first, last = read.of(stored["documents"])
  assert (last - first > 1).any()

  # Texts that fit the last passage.
  pairs = {"queries": stored["tokens"], "rows": stored["documents"]}
  pairs |= {"documents": read.tokens[last - 1]}
  records = {
    unit: direct_dp._records(
      direct_dp.Config(unit=unit, method="batch"), pairs, read
    )["documents"]
    for unit in ("query", "pair")
  }
  np.testing.assert_array_equal(records["query"], read.tokens[first])
  np.testing.assert_array_equal(records["pair"], read.tokens[last - 1])


# In the pipeline.


@pytest.fixture(name="run", scope="module")
def _run(tmp_path_factory):
  folder = tmp_path_factory.mktemp("passages")
  source = small_data.write_pairs(folder / "log.jsonl", NUM)
  config = tiny_runs.config(
    source,
    checkpoint=random_t5.save(folder / "t5"),
    static_encoder=STATIC,
    rows=plan.Rows(synthetic=(), direct_dp=(), original=True, fused=True),
    fuse=fuse.Config(min_queries=1, depth=DEPTH),
  )
  config = dataclasses.replace(
    config,
    prepare_data=dataclasses.replace(
      config.prepare_data, passage_stride=STRIDE, test_split="dev+test"
    ),
    generate=dataclasses.replace(
      config.generate, queries_per_document=2, num_documents=30
    ),
  )
  plan.run(config, folder / "run", stages=["evaluate"])
  return folder / "run"


def test_every_passage_is_written_for_as_often(run):
  read = prepared_files.read_documents(run / "prepare_data")
  assert len(read.owners) > 2 * len(read.ids)
  made = artifacts.load(run / "generate/public_only", results.SyntheticQueries)
  with np.load(run / made.directory / "tokens.npz") as stored:
    rows, owners = stored["passages"], stored["documents"]
  np.testing.assert_array_equal(read.owners[rows], owners)
  chosen = np.unique(owners)
  total = made.num_queries + sum(made.removed.values())
  assert total == 2 * np.isin(read.owners, chosen).sum()
  assert made.num_documents == 30
  lines = map(json.loads, (run / made.directory / "queries.jsonl").open())
  assert [line["document"] for line in lines] == read.ids[owners].tolist()
  texts = collections.defaultdict(set)
  with np.load(run / made.directory / "tokens.npz") as stored:
    for row, owner in zip(stored["tokens"], owners, strict=True):
      texts[owner].add(tuple(row))
  assert max(map(len, texts.values())) > 2  # passages draw by themselves


def test_retrievers_may_read_more_than_generators(tmp_path):
  source = small_data.write_pairs(tmp_path / "log.jsonl", NUM)
  rows = plan.Rows(original=False, direct_dp=())
  config = tiny_runs.config(
    source,
    checkpoint=random_t5.save(tmp_path / "t5"),
    static_encoder=STATIC,
    rows=rows,
  )
  runs = {}
  for length, stage in ((0, "generate"), (40, "train_retriever")):
    changed = dataclasses.replace(config.prepare_data, retriever_length=length)
    own = dataclasses.replace(rows, synthetic=(), untrained=False)
    runs[length] = tmp_path / f"run{length}"
    plan.run(
      dataclasses.replace(
        config, prepare_data=changed, rows=own, secret_seed=3
      ),
      runs[length],
      stages=[stage],
    )

  def written(name):
    return [(run / name).read_bytes() for run in runs.values()]

  shorter, longer = (
    finetune_dp._read_records(
      config.finetune_dp,
      workspace.Workspace(run, 3),
      artifacts.load(run / "private/prepare_data", results.PreparedData),
    )
    for run in runs.values()
  )
  assert shorter.keys() == longer.keys()
  for name in shorter:
    np.testing.assert_array_equal(shorter[name], longer[name])
  shorter, longer = written("generate/public_only/queries.jsonl")
  assert shorter == longer
  to = tmp_path / "to"
  export.run(
    runs[40] / "train_retriever/public_only", to, format="sentence-transformers"
  )
  told = json.loads((to / "tokenizer_config.json").read_text())
  assert told["model_max_length"] == 40
  columns = [
    prepared_files.read_documents(run / "prepare_data").tokens.shape[1]
    for run in runs.values()
  ]
  assert columns == [config.prepare_data.document_length, 40]


def test_every_passage_is_encoded_and_documents_are_found(run):
  read = prepared_files.read_documents(run / "prepare_data")
  made = artifacts.load(
    run / "encode_documents/untrained", system_results.Vectors
  )
  vectors = vector_files.open_vectors(run / made.vectors, len(read.owners))
  assert np.isfinite(np.asarray(vectors)).all()
  for name in ("untrained", "original", "bm25", "fused_public_only"):
    found = trec.read_run(run / f"private/evaluate/test/{name}/run.trec")
    assert set().union(*found.values()) <= set(read.ids.tolist())
    if name in ("untrained", "original"):
      assert {len(one) for one in found.values()} == {len(read.ids)}


def test_as_many_are_fused_where_it_is_scored_as_where_the_weight_was_chosen(
  run,
):
  made = artifacts.load(run / "fuse/public_only", system_results.Fusion)
  assert made.depth == DEPTH
  lexical, dense, fused = (
    trec.read_run(run / f"private/evaluate/test/{name}/run.trec")
    for name in ("bm25", "public_only", "fused_public_only")
  )
  assert max(map(len, dense.values())) > 2 * DEPTH
  parts = (trec.first(found, DEPTH) for found in (lexical, dense))
  expected = fusion.fuse(*parts, weight=made.weight)
  assert {q: [*found] for q, found in fused.items()} == {
    q: [*found] for q, found in expected.items()
  }


def test_the_card_of_an_export_says_how_documents_were_read(run, tmp_path):
  made = run / "train_retriever/untrained"
  export.run(made, tmp_path / "to", format="sentence-transformers")
  card = (tmp_path / "to/README.md").read_text()
  assert "read in passages" in card and f"every {STRIDE} tokens" in card


def test_real_pairs_are_trained_with_a_passage_of_their_document(run):
  read = prepared_files.read_documents(run / "prepare_data")
  with np.load(run / "private/prepare_data/train.npz") as stored:
    np.testing.assert_array_equal(
      read.owners[stored["passages"]], stored["documents"]
    )
    np.testing.assert_array_equal(
      passages.best(read, stored["documents"], stored["tokens"]),
      stored["passages"],
    )


def test_an_id_of_2000_characters_widens_no_other_in_memory(tmp_path):
  names = [f"d{k}" for k in range(300)] + ["x" * 2000]
  prepared_files.write_documents(
    (collection.Document(name, "text") for name in names),
    tmp_path,
    vocabulary_lib.load(shipped.VOCABULARY),
    length=LENGTH,
  )
  read = prepared_files.read_documents(tmp_path)
  assert read.ids.tolist() == names
  assert read.ids.nbytes < 10_000  # 2.4 MB as rows of one width
