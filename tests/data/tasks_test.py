"""SeqIO tasks over small folders, read as T5X would read them."""

import json
import pathlib
import shutil

import numpy as np
import pytest
import small_vocabularies

from synthq_jax.data import (
  beir_sets,
  cache_writers,
  feature_converters,
  shipped,
  task_sources,
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
  """The same set in three layouts."""
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
    lines = "".join(f"{q} 0 {d} {grade}\n" for q, d, grade in judged)
    (root / f"qrels.{split}.tsv").write_text(lines)
    lines = "".join(f"{q}\t{QUERIES[q]}\n" for q in {q for q, *_ in judged})
    (root / f"queries.{split}.tsv").write_text(lines)
  lines = "".join(f"{i}\t{contents(i).strip()}\n" for i in DOCUMENTS)
  (root / "collection.tsv").write_text(lines)
  (root / "negatives.tsv").write_text(
    "query-id\tcorpus-id\nq1\td2\nq1\td3\nq2\td4\n"
  )
  written = [
    {"_id": f"s{n}", "text": text, "document": document}
    for n, (text, document) in enumerate([("red fruit", "d1"), ("sea", "d4")])
  ]
  jsonl(root / "written.jsonl", written)
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


def sources(folder):
  return {
    "beir": task_sources.Folder(path=str(folder)),
    "msmarco": task_sources.MsMarco(path=str(folder)),
  }


@pytest.mark.parametrize("layout", ["beir", "msmarco"])
def test_documents_become_queries_as_the_pipeline_tokenises(
  folder, vocabulary, layout
):
  tasks.register_msmarco(vocabulary, sources(folder)[layout])
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


@pytest.mark.parametrize("layout", ["beir", "msmarco"])
def test_pairs_queries_and_documents_come_from_one_task(
  folder, vocabulary, layout
):
  tasks.register_msmarco(vocabulary, sources(folder)[layout])
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


def converted(name, lengths, converter, split="train", **kwargs):
  import seqio

  dataset = seqio.get_dataset(
    name,
    task_feature_lengths=dict(lengths),
    dataset_split=split,
    shuffle=False,
    feature_converter=converter,
    **kwargs,
  )
  return list(dataset.as_numpy_iterator())


def test_the_encoder_decoder_converter_takes_the_task_as_it_is(
  folder, vocabulary
):
  import seqio

  tasks.register_msmarco(vocabulary, sources(folder)["beir"])
  rows = converted(
    "msmarco_query_generation",
    LENGTHS,
    seqio.EncDecFeatureConverter(pack=False),
  )
  assert len(rows) == 3
  for row in rows:
    assert row["encoder_input_tokens"].shape == (24,)
    targets, before = row["decoder_target_tokens"], row["decoder_input_tokens"]
    assert targets.shape == (12,)
    np.testing.assert_array_equal(before[1:], targets[:-1])
    np.testing.assert_array_equal(row["decoder_loss_weights"], targets != 0)


def test_the_dual_encoder_converter_names_left_and_right(folder, vocabulary):
  tasks.register_msmarco(vocabulary, sources(folder)["beir"])
  rows = converted(
    "msmarco_dual_encoder", PAIR_LENGTHS, feature_converters.dual_encoder()
  )
  assert {tuple(sorted(row)) for row in rows} == {
    ("left_encoder_input_tokens", "right_encoder_input_tokens")
  }
  row = rows[0]
  wanted = expected(vocabulary, QUERIES["q1"], 12)
  left = row["left_encoder_input_tokens"]
  assert left.tolist() == wanted + [0] * (12 - len(wanted))
  assert left.dtype == row["right_encoder_input_tokens"].dtype == np.int32
  assert row["right_encoder_input_tokens"].shape == (24,)


@pytest.mark.parametrize("kind", ["generation", "dual_encoder"])
def test_the_call_that_t5x_makes_gives_batches(
  folder, vocabulary, kind, monkeypatch
):
  import seqio

  tasks.register_msmarco(vocabulary, sources(folder)["beir"])
  generation = kind == "generation"
  name = "msmarco_query_generation" if generation else "msmarco_dual_encoder"
  converter = feature_converters.dual_encoder
  task = seqio.get_mixture_or_task(name)
  # It would be filled with a thousand rows, of three.
  monkeypatch.setattr(task, "_shuffle_buffer_size", 8)
  shards = []
  for index in range(2):
    dataset = seqio.get_dataset(
      mixture_or_task_name=task,
      task_feature_lengths=LENGTHS if generation else PAIR_LENGTHS,
      dataset_split="train",
      shuffle=True,
      num_epochs=None,
      feature_converter=(
        seqio.EncDecFeatureConverter if generation else converter
      )(pack=False, use_custom_packing_ops=False),
      shard_info=seqio.ShardInfo(index=index, num_shards=2),
      use_cached=False,
      seed=3,
      trim_output_features=True,
      batch_size=2,
    )
    shards.append(list(dataset.take(4).as_numpy_iterator()))
  read = "encoder_input_tokens" if generation else "right_encoder_input_tokens"
  assert [batch[read].shape for batch in shards[0]] == [(2, 24)] * 4
  seen = [{tuple(row) for b in shard for row in b[read]} for shard in shards]
  assert len(seen[0] | seen[1]) == 3  # relevant pairs, epoch after epoch


def test_each_hard_negative_makes_an_example(folder, vocabulary):
  source = task_sources.Folder(
    path=str(folder), negatives=str(folder / "negatives.tsv")
  )
  tasks.register_dual_encoder("hard", source, vocabulary, negatives=True)
  lengths = {**PAIR_LENGTHS, "negative_targets": 24}
  rows = rows_of("hard", lengths)
  found = [
    (r["query_id"].decode(), r["passage_id"].decode(), r["negative_targets"])
    for r in rows
  ]
  wanted = [("q1", "d1", "d2"), ("q1", "d1", "d3"), ("q2", "d2", "d4")]
  assert [names for *names, _ in found] == [[q, d] for q, d, _ in wanted]
  for (*_, tokens), (*_, negative) in zip(found, wanted, strict=True):
    assert tokens.tolist() == expected(vocabulary, contents(negative), 24)
  converter = feature_converters.dual_encoder(negatives=True)
  row = converted("hard", lengths, converter)[2]
  wide = row["right_negative_encoder_input_tokens"]
  text = expected(vocabulary, contents("d4"), 24)
  assert wide.tolist() == text


def test_a_table_of_negatives_repeats_no_pair_that_uses_none(
  folder, vocabulary
):
  source = task_sources.MsMarco(
    path=str(folder), negatives=str(folder / "negatives.tsv")
  )
  tasks.register_msmarco(vocabulary, source)
  for name, lengths in (
    ("msmarco_query_generation", LENGTHS),
    ("msmarco_dual_encoder", PAIR_LENGTHS),
  ):
    pairs = [(r["query_id"], r["passage_id"]) for r in rows_of(name, lengths)]
    assert len(pairs) == len(set(pairs)) == 3


def test_a_dataset_read_twice_has_one_order(folder, vocabulary):
  tasks.register_msmarco(vocabulary, sources(folder)["beir"])
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
  source = task_sources.Folder(path=str(tmp_path / "copy"))
  with pytest.raises(ValueError, match="other splits than query and passage"):
    tasks.register_dual_encoder("bad_split", source, vocabulary)


def test_a_mixture_and_a_missing_name_are_not_cached(
  folder, vocabulary, tmp_path
):
  import seqio

  tasks.register_msmarco(vocabulary, sources(folder)["beir"])
  if "both" in seqio.MixtureRegistry.names():
    seqio.MixtureRegistry.remove("both")
  seqio.MixtureRegistry.add("both", ["msmarco_dual_encoder"], default_rate=1.0)
  with pytest.raises(
    ValueError, match="got the mixture 'both': cache its tasks"
  ):
    cache_writers.from_task(tmp_path / "c", "both", "train", PAIR_LENGTHS)
  with pytest.raises(ValueError, match=r"of task 'msm.*got \['url'\]"):
    cache_writers.from_task(
      tmp_path / "c", "msmarco_dual_encoder", "train", PAIR_LENGTHS,
      names=("url",),
    )  # fmt: skip
  assert not list(tmp_path.iterdir())


def test_negatives_of_a_source_without_any_are_refused(folder, vocabulary):
  with pytest.raises(
    ValueError, match="expected a source with a table of hard neg"
  ):
    tasks.register_dual_encoder(
      "h", sources(folder)["beir"], vocabulary, negatives=True
    )


@pytest.mark.parametrize(
  ("lines", "message"),
  [
    ("q1\td2\n", "expected the header query-id corpus-id"),
    ("query-id\tcorpus-id\nq1\td9\n", ":2: expected ids of the collection"),
    ("query-id\tcorpus-id\nq1\td1\n", "judged relevant to the query"),
    ("query-id\tcorpus-id\nq1 d2\n", "expected 2 columns separated by tabs"),
  ],
)
def test_bad_hard_negatives_are_named(
  folder, vocabulary, tmp_path, lines, message
):
  path = tmp_path / "negatives.tsv"
  path.write_text(lines)
  source = task_sources.Folder(path=str(folder), negatives=str(path))
  tasks.register_dual_encoder("bad", source, vocabulary, negatives=True)
  with pytest.raises(ValueError, match=message):
    rows_of("bad", {**PAIR_LENGTHS, "negative_targets": 24})


def test_packing_pairs_is_refused():
  with pytest.raises(
    ValueError, match="expected pack=False for a dual encoder"
  ):
    feature_converters.dual_encoder(pack=True)


def test_written_queries_make_a_task(folder, vocabulary):
  source = task_sources.Synthetic(
    queries=str(folder / "written.jsonl"), corpus=str(folder / "corpus.jsonl")
  )
  tasks.register_dual_encoder("written", source, vocabulary)
  rows = rows_of("written", PAIR_LENGTHS)
  assert [(r["query_id"], r["passage_id"]) for r in rows] == [
    (b"s0", b"d1"),
    (b"s1", b"d4"),
  ]
  assert rows[1]["inputs"].tolist() == expected(vocabulary, "sea", 12)


@pytest.mark.parametrize(
  ("line", "message"),
  [
    (
      {"_id": "s", "text": "a"},
      ':1: expected a string under "docu',
    ),
    ({"_id": "s", "text": "a", "document": "d9"}, "got one for another"),
    (
      {"_id": "s", "text": " ", "document": "d1"},
      ":1: expected text in query, got none",
    ),
  ],
)
def test_bad_written_queries_are_named(
  folder, vocabulary, tmp_path, line, message
):
  jsonl(tmp_path / "queries.jsonl", [line])
  source = task_sources.Synthetic(
    queries=str(tmp_path / "queries.jsonl"), corpus=str(folder / "corpus.jsonl")
  )
  tasks.register_dual_encoder("bad_written", source, vocabulary)
  with pytest.raises(ValueError, match=message):
    rows_of("bad_written", PAIR_LENGTHS)


def test_all_sets_are_registered_by_a_call_and_none_before(vocabulary):
  import seqio

  for name in [n for n in seqio.TaskRegistry.names() if n.startswith("beir_")]:
    seqio.TaskRegistry.remove(name)
  names = tasks.register_beir(vocabulary)
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


def test_a_set_that_is_not_prepared_says_how_to(vocabulary, tmp_path):
  tasks.register_beir(vocabulary, data_dir=str(tmp_path))
  command = (
    r"expected beir/fiqa prepared by TFDS, got nothing; run pip install"
    r" 'synthq_jax\[tfds\]' && python -c .*tfds.builder\('beir/fiqa', data_dir='"
  )
  with pytest.raises(ValueError, match=command):
    rows_of("beir_fiqa", PAIR_LENGTHS, "test")


def test_a_task_is_cached_as_it_is_read(folder, vocabulary, tmp_path):
  tasks.register_msmarco(vocabulary, sources(folder)["beir"])
  cache = cache_writers.from_task(
    tmp_path / "cache", "msmarco_dual_encoder", "train", PAIR_LENGTHS
  )
  rows = rows_of("msmarco_dual_encoder", PAIR_LENGTHS)
  assert len(cache) == len(rows) == 3
  for place, row in enumerate(rows):
    assert cache.names["query_id"][place] == row["query_id"].decode()
    for name in PAIR_LENGTHS:
      tokens = cache.columns[name][place]
      assert tokens[: len(row[name])].tolist() == row[name].tolist()
      assert not tokens[len(row[name]) :].any()
  assert cache.facts == {"task": "msmarco_dual_encoder", "split": "train"}


def test_a_task_without_names_of_pairs_is_cached(folder, vocabulary, tmp_path):
  tasks.register_query_generation(
    "generation", sources(folder)["beir"], vocabulary
  )
  seen = []
  cache = cache_writers.from_task(
    tmp_path / "task",
    "generation",
    "passage",
    LENGTHS,
    facts={"by": "a test"},
    progress=seen.append,
  )
  assert seen == [4]
  assert cache.facts["by"] == "a test"
  assert list(cache.names["passage_id"]) == list(DOCUMENTS)
  expected, _ = vocabulary_lib.tokenize_and_count(
    vocabulary,
    [contents(id_) for id_ in DOCUMENTS],
    length=24,
    prefix=tasks.PREFIX,
  )
  np.testing.assert_array_equal(cache.columns["inputs"][:], expected)


@pytest.mark.parametrize(
  ("lengths", "split"),
  [({"inputs": 8}, "train"), (PAIR_LENGTHS, "dev")],
)
def test_a_cache_of_what_a_task_lacks_is_refused(
  folder, vocabulary, tmp_path, lengths, split
):
  tasks.register_msmarco(vocabulary, sources(folder)["beir"])
  with pytest.raises(ValueError, match="expected lengths of .*inputs.*targets"):
    cache_writers.from_task(
      tmp_path / "cache", "msmarco_dual_encoder", split, lengths
    )
  assert not (tmp_path / "cache").exists()


def test_a_vocabulary_with_other_special_ids_is_refused(folder):
  import seqio

  with pytest.raises(
    ValueError, match="expected a vocabulary with an end of text"
  ):
    tasks.register_msmarco(
      seqio.PassThroughVocabulary(size=50), sources(folder)["beir"]
    )


def test_an_unknown_set_is_named():
  with pytest.raises(ValueError, match="expected a BEIR set of msmarco, trec"):
    beir_sets.get("fiqua")


def test_texts_of_tasks_end_with_the_end_of_their_own_vocabulary(
  folder, tmp_path
):
  """ruT5's </s> is 2; SeqIO appends it as the pipeline does."""
  path = small_vocabularies.write(tmp_path / "v", small_vocabularies.RUT5)
  words = vocabulary_lib.load(path)
  tasks.register_msmarco(words, sources(folder)["beir"])
  for row in rows_of("msmarco_query_generation", LENGTHS):
    query = QUERIES[row["query_id"].decode()]
    [wanted] = vocabulary_lib.tokenize(words, [query], length=12)
    assert row["targets"].tolist() == wanted[wanted > 0].tolist()
    assert row["targets"][-1] == row["inputs"][-1] == 2
