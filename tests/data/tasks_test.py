"""SeqIO tasks over small folders, read as T5X would read them."""

import json
import pathlib
import shutil

import numpy as np
import pytest
import small_vocabularies

from synthq_jax.data import (
  beir_sets,
  shipped,
  sources,
  tasks,
)
from synthq_jax.data import vocabulary as vocabulary_lib

DOCUMENTS = {
  "d1": ("Apple", "A red fruit that grows on trees."),
  "d2": ("", "  Pears are green, and they are fruit as well. "),
  "d3": ("Sea “water”", "Water with salt in it."),
  "d4": ("River", "Water that flows to the sea. " * 40),
}
QUERIES = {"q1": "which fruit is red", "q2": "green fruit", "q3": "salt water"}
QRELS = {
  "train": [("q1", "d1", 1), ("q2", "d2", 2), ("q2", "d1", 0), ("q3", "d4", 1)],
  "test": [("q3", "d3", 1)],
}
LENGTHS = {"inputs": 24, "targets": 12}
PAIR_LENGTHS = {"inputs": 12, "targets": 24}


def jsonl(path: pathlib.Path, rows) -> None:
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def vocabulary():
  return vocabulary_lib.load(shipped.VOCABULARY, extra_ids=shipped.EXTRA_IDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A set in BEIR's layout."""
  root = tmp_path_factory.mktemp("sets")
  rows = [
    {"_id": id_, "title": title, "text": text}
    for id_, (title, text) in DOCUMENTS.items()
  ]
  jsonl(root / "corpus.jsonl", rows)
  asked = [{"_id": id_, "text": text} for id_, text in QUERIES.items()]
  jsonl(root / "queries.jsonl", asked)
  (root / "qrels").mkdir()
  for split, judged in QRELS.items():
    lines = "".join(f"{q}\t{d}\t{grade}\n" for q, d, grade in judged)
    header = "query-id\tcorpus-id\tscore\n"
    (root / "qrels" / f"{split}.tsv").write_text(header + lines)
  return root


def contents(id_: str) -> str:
  title, text = DOCUMENTS[id_]
  return f"{title} {text}".strip()


def expected(vocabulary, text, length, prefix="") -> list[int]:
  """Tokens by the pipeline's own tokenizer, without padding."""
  row = vocabulary_lib.tokenize(
    vocabulary, [text], length=length, prefix=prefix
  )[0]
  return row[: np.flatnonzero(row)[-1] + 1].tolist()


def rows_of(name, lengths, split="train", **kwargs):
  import seqio

  kwargs = {"shuffle": False, "num_epochs": 1} | kwargs
  dataset = seqio.get_mixture_or_task(name).get_dataset(
    dict(lengths), split, **kwargs
  )
  return list(dataset.as_numpy_iterator())


def register_both(vocabulary, source):
  """The tasks of the papers' generator and of their retriever."""
  tasks.register("msmarco_query_generation", source, vocabulary)
  tasks.register(
    "msmarco_dual_encoder", source, vocabulary, form="dual_encoder"
  )


def register_encoder(name, source, vocabulary, **options):
  tasks.register(name, source, vocabulary, form="dual_encoder", **options)


def test_documents_become_queries_as_the_pipeline_tokenises(folder, vocabulary):
  register_both(vocabulary, f"beir:{folder}")
  rows = rows_of("msmarco_query_generation", LENGTHS)
  relevant = [(q, d) for q, d, grade in QRELS["train"] if grade > 0]
  names = [(r["query_id"].decode(), r["passage_id"].decode()) for r in rows]
  assert sorted(names) == sorted(relevant)
  for row, (query, document) in zip(rows, names, strict=True):
    text = contents(document)
    wanted = expected(vocabulary, text, 24, prefix=tasks.PREFIX)
    assert row["inputs"].tolist() == wanted
    assert row["targets"].tolist() == expected(vocabulary, QUERIES[query], 12)
    assert row["inputs"][-1] == row["targets"][-1] == vocabulary_lib.EOS_ID
    assert row["inputs"].dtype == np.int32
  assert max(len(row["inputs"]) for row in rows) == 24  # d4 was cut


def test_pairs_queries_and_documents_come_from_one_task(folder, vocabulary):
  register_both(vocabulary, f"beir:{folder}")
  pairs = rows_of("msmarco_dual_encoder", PAIR_LENGTHS, "test")
  assert [(r["query_id"], r["passage_id"]) for r in pairs] == [(b"q3", b"d3")]
  assert pairs[0]["targets"].tolist() == expected(
    vocabulary, contents("d3"), 24
  )
  documents = rows_of("msmarco_dual_encoder", PAIR_LENGTHS, "passage")
  assert [r["passage_id"].decode() for r in documents] == list(DOCUMENTS)
  for row in documents:
    text = contents(row["passage_id"].decode())
    assert row["targets"].tolist() == expected(vocabulary, text, 24)
    assert row["inputs"].tolist() == [vocabulary_lib.EOS_ID]
  queries = rows_of("msmarco_dual_encoder", PAIR_LENGTHS, "query")
  assert {r["query_id"].decode() for r in queries} == set(QUERIES)


def test_the_call_that_t5x_makes_gives_batches(folder, vocabulary, monkeypatch):
  import seqio

  register_both(vocabulary, f"beir:{folder}")
  task = seqio.get_mixture_or_task("msmarco_query_generation")
  # It would be filled with a thousand rows, of three.
  monkeypatch.setattr(task, "_shuffle_buffer_size", 8)
  shards = []
  for index in range(2):
    dataset = seqio.get_dataset(
      mixture_or_task_name=task,
      task_feature_lengths=LENGTHS,
      dataset_split="train",
      shuffle=True,
      num_epochs=None,
      feature_converter=seqio.EncDecFeatureConverter(
        pack=False, use_custom_packing_ops=False
      ),
      shard_info=seqio.ShardInfo(index=index, num_shards=2),
      use_cached=False,
      seed=3,
      trim_output_features=True,
      batch_size=2,
    )
    shards.append(list(dataset.take(4).as_numpy_iterator()))
  read = "encoder_input_tokens"
  assert [batch[read].shape for batch in shards[0]] == [(2, 24)] * 4
  seen = [{tuple(row) for b in shard for row in b[read]} for shard in shards]
  assert len(seen[0] | seen[1]) == 3  # relevant pairs, epoch after epoch


def test_a_dataset_read_twice_has_one_order(folder, vocabulary):
  register_both(vocabulary, f"beir:{folder}")
  import seqio

  source = seqio.TaskRegistry.get("msmarco_dual_encoder").source
  rows = source.get_dataset("train", shuffle=True, seed=4)
  first, second = (
    [row["query_id"] for row in rows.as_numpy_iterator()] for _ in range(2)
  )
  assert first == second


@pytest.mark.parametrize("split", ["query", "passage"])
def test_a_split_that_would_hide_queries_or_documents_is_refused(
  folder, vocabulary, tmp_path, split
):
  shutil.copytree(folder, tmp_path / "copy")
  qrels = tmp_path / "copy" / "qrels"
  (qrels / "test.tsv").rename(qrels / f"{split}.tsv")
  register_encoder("bad_split", f"beir:{tmp_path / 'copy'}", vocabulary)
  with pytest.raises(ValueError, match="other splits than query and passage"):
    rows_of("bad_split", PAIR_LENGTHS)


def test_all_sets_are_registered_by_a_call_and_none_before(
  folder, vocabulary, tmp_path
):
  import seqio

  for name in [n for n in seqio.TaskRegistry.names() if n.startswith("beir_")]:
    seqio.TaskRegistry.remove(name)
  names = tasks.register_beir(str(tmp_path), vocabulary)
  assert names == []
  for each in beir_sets.SETS:
    place = tmp_path / each.name.replace("_", "-").replace(".", "/")
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(folder)
  names = tasks.register_beir(str(tmp_path), vocabulary)
  assert len(beir_sets.SETS) == 26
  assert len(names) == 26 + 2
  known = {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}
  assert set(names) <= known
  parts = seqio.MixtureRegistry.get("beir_cqadupstack").tasks
  assert len(parts) == 12
  zero_shot = seqio.MixtureRegistry.get("beir_zero_shot").tasks
  assert len(zero_shot) == 10 + 12
  assert "beir_msmarco" not in {task.name for task in zero_shot}


def test_our_list_of_sets_is_that_of_tfds():
  import tensorflow_datasets as tfds

  found = {
    config.name: tuple(config.qrel_splits)
    for config in tfds.builder_cls("beir").BUILDER_CONFIGS
  }
  assert found == {each.name: each.splits for each in beir_sets.SETS}
  assert all(each.scored in each.splits for each in beir_sets.SETS)


def test_a_set_that_is_not_prepared_says_how_to(folder, monkeypatch, tmp_path):
  import tensorflow_datasets as tfds

  monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path))
  command = (
    r"expected beir/fiqa prepared by TFDS, got nothing; run pip install"
    r" 'synthq_jax\[tfds\]' && python -c .*tfds.builder\('beir/fiqa'"
  )
  with pytest.raises(ValueError, match=command):
    sources.open(f"tfds:fiqa@{folder / 'qrels'}").read()


def test_a_vocabulary_with_other_special_ids_is_refused(folder):
  import seqio

  with pytest.raises(
    ValueError, match="expected a vocabulary with an end of text"
  ):
    register_both(seqio.PassThroughVocabulary(size=50), f"beir:{folder}")


def test_texts_of_tasks_end_with_the_end_of_their_own_vocabulary(
  folder, tmp_path
):
  """ruT5's </s> is 2; SeqIO appends it as the pipeline does."""
  path = small_vocabularies.write(tmp_path / "v", small_vocabularies.RUT5)
  words = vocabulary_lib.load(path)
  register_both(words, f"beir:{folder}")
  for row in rows_of("msmarco_query_generation", LENGTHS):
    query = QUERIES[row["query_id"].decode()]
    [wanted] = vocabulary_lib.tokenize(words, [query], length=12)
    assert row["targets"].tolist() == wanted[wanted > 0].tolist()
    assert row["targets"][-1] == row["inputs"][-1] == 2
