"""A task, its cache and the folder it was made from are one collection."""

import dataclasses
import json

import cached_tasks
import numpy as np
import pytest
import tiny_runs

from synthq_jax.data import (
  beir,
  collection,
  shipped,
  sources,
  task_records,
  tasks,
)
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.runtime import workspace
from synthq_jax.stages import prepare_data, prepare_test_set

COUNT = 40
PLACES = "harbor museum forest station bridge castle market valley".split()


def text_of(number):
  return (
    f"Report {number} on the {PLACES[number % 8]}. It was written in {number}"
    f" years, and nobody read it. The {PLACES[number // 8]} is far away."
  )


def make_collection():
  """Ids out of order, titles, users, grade 0, two documents, a lacking one."""
  order = np.random.default_rng(3).permutation(COUNT).tolist()
  documents = tuple(
    collection.Document(f"d{i}", f"  {text_of(i)} ", title=f"No {i}" * (i % 2))
    for i in order
  )
  queries = tuple(
    collection.Query(f"q{i}", f"who wrote report {i}", client=f"u{i % 20}")
    for i in order[::-1]
  )
  train = {f"q{i}": {f"d{i}": 1, f"d{(i + 1) % 30}": 1} for i in range(30)}
  train["q4"] = {"gone": 1, "d4": 2, "d9": 0}
  test = {f"q{i}": {f"d{i}": 1} for i in range(39, 29, -1)}
  return collection.Collection(
    documents,
    queries,
    {"train": train, "test": test},
    lacking=frozenset(["gone"]),
  )


@pytest.fixture(scope="module")
def vocabulary():
  return vocabulary_lib.load(shipped.VOCABULARY, extra_ids=shipped.EXTRA_IDS)


@pytest.fixture(scope="module")
def places(tmp_path_factory, vocabulary):
  """The same data as a folder, a task, its cache and a cache in other order."""
  root = tmp_path_factory.mktemp("sets")
  beir.write_beir(root / "set", make_collection())
  tasks.register("records_task", f"beir:{root / 'set'}", vocabulary)
  cached = cached_tasks.write("records_task", root / "cache")
  other = cached_tasks.write("records_task", root / "other", shards=5, seed=9)
  return {
    "beir": f"beir:{root / 'set'}",
    "task": "seqio:records_task",
    "cache": f"seqio:{cached}",
    "other": f"seqio:{other}",
  }


def prepared(place, root, **changes):
  config = prepare_data.Config(
    source=place,
    vocabulary=str(shipped.VOCABULARY),
    document_length=16,
    query_length=12,
    public_test_documents=20,
    **changes,
  )
  space = workspace.Workspace(root, secret_seed=7)
  made = tiny_runs.make(prepare_data.STAGE, config, space)
  files = {
    path.relative_to(root).as_posix(): path.read_bytes()
    for path in sorted(root.rglob("*"))
    if path.is_file() and path.name != "result.json"
  }
  return made, files


@pytest.mark.parametrize(
  ("which", "unit"), [("task", "query"), ("cache", "query"), ("other", "user")]
)
def test_a_task_is_prepared_byte_for_byte_as_its_folder(
  places, tmp_path, which, unit
):
  """The table of a run follows: stages read these files alone."""
  changes = {"unit": unit} if unit == "user" else {}
  made, files = prepared(places["beir"], tmp_path / "beir", **changes)
  again, others = prepared(places[which], tmp_path / which, **changes)
  assert files.keys() == others.keys() and "private/prepare_data/train.npz" in (
    files
  )
  for name, content in files.items():
    assert content == others[name], name
  plain = dict.fromkeys(("source", "seconds"))
  rest = [dataclasses.asdict(x) | plain for x in (made, again)]
  assert rest[0] == rest[1]
  assert made.units("train") == (
    30 if unit == "query" else again.units("train")
  )
  assert "from_pairs" not in again.statement().not_protected


def test_a_cache_in_another_order_says_so_by_its_digest_alone(places):
  digests = {n: sources.open(x).digest() for n, x in places.items()}
  assert len(set(digests.values())) == 4
  assert digests["task"] == sources.open(places["task"]).digest()


def test_a_task_that_repeats_its_records_has_as_many_units(places, capsys):
  """The same rows twice, in an order by a seed."""
  import seqio

  register_copy("repeated", lambda rows: rows.repeat(2).shuffle(500, seed=5))
  once, twice = (
    sources.open(x).read() for x in (places["beir"], f"seqio:repeated@{CORPUS}")
  )
  assert twice.qrels == once.qrels
  assert [*twice.qrels["train"]] == [*once.qrels["train"]]
  assert set(twice.queries) == set(once.queries)
  assert len(twice.queries) == len(once.queries) == COUNT
  assert list(twice.documents) == list(once.documents)
  assert capsys.readouterr().err.count("1 judgements name documents") == 2
  seqio.TaskRegistry.remove("repeated")


CORPUS = "records_task"


def register_copy(name, change, columns=None):
  """Registers a task without a cache over the rows of records_task."""
  import seqio

  if name in seqio.TaskRegistry.names():
    seqio.TaskRegistry.remove(name)
  first = seqio.TaskRegistry.get("records_task")

  def rows(split, shuffle_files, seed=None):
    rows = first.source.get_dataset(split, shuffle=False)
    return change(rows)

  seqio.TaskRegistry.add(
    name,
    source=seqio.FunctionDataSource(rows, ("train", "test")),
    preprocessors=[
      seqio.preprocessors.tokenize,
      *([columns] if columns else []),
    ],
    output_features=first.output_features,
  )


def test_texts_alone_are_a_log_of_pairs(places, tmp_path):
  """What a T5X user's task usually keeps: inputs and targets."""

  def texts(rows):
    kept = ("inputs", "targets", "inputs_pretokenized", "targets_pretokenized")
    rows = rows.filter(
      lambda row: (row["score"] > 0) & (row["passage_id"] != "gone")
    )
    return rows.map(lambda row: {name: row[name] for name in kept})

  register_copy("texts", lambda rows: rows.shuffle(500, seed=2), texts)
  with pytest.raises(ValueError, match="expected the feature 'query_id', got"):
    sources.open(f"seqio:texts@{CORPUS}").read()
  with pytest.raises(ValueError, match="expected a split 'passage' with all"):
    sources.open("seqio:texts").read()
  fields = {"query_field": "targets", "document_field": "inputs"}
  made, files = prepared("seqio_pairs:texts", tmp_path / "a", **fields)
  register_copy("texts", lambda rows: rows.repeat(3), texts)
  again, others = prepared("seqio_pairs:texts", tmp_path / "b", **fields)
  assert files == others and made.num_queries == again.num_queries
  assert made.num_queries == {"train": 30, "test": 10}
  assert "from_pairs" in made.statement().not_protected
  with pytest.raises(ValueError, match="--gin.QUERY_FIELD="):
    sources.open("seqio_pairs:texts").read()


def test_documents_of_asked_records_are_no_corpus(places):
  register_copy("pairs_only", lambda rows: rows)
  with pytest.raises(ValueError, match="would reveal queries"):
    sources.open("seqio:records_task@pairs_only").read()


def test_a_task_of_rate_0_is_no_part_of_a_mixture(places):
  import seqio

  def count(task):
    raise ValueError(f"{task.name} is not cached")

  register_copy("off_task", lambda rows: rows.take(1))
  register_copy("counted_task", lambda rows: rows.take(3))
  rates = [("counted_task", count), ("off_task", 0.0), ("records_task", 0.3)]
  if "rates_mixture" in seqio.MixtureRegistry.names():
    seqio.MixtureRegistry.remove("rates_mixture")
  seqio.MixtureRegistry.add("rates_mixture", rates)
  parts = [part.name for part in task_records._find_tasks("rates_mixture")]
  assert sorted(parts) == ["counted_task", "records_task"]
  read = sources.open(f"seqio:rates_mixture@{CORPUS}").read()
  assert read.qrels == sources.open(places["beir"]).read().qrels


def test_a_task_that_keeps_no_texts_says_how_to(places):
  """Before, "split" was advised, the one text that every record has."""
  names = ("inputs", "targets")

  def drop_texts(rows):
    return rows.map(lambda row: {name: row[name] for name in names})

  register_copy("tokens_task", lambda rows: rows, drop_texts)
  with pytest.raises(ValueError, match="keep the texts .copy_pretokenized"):
    sources.open("seqio_pairs:tokens_task").read()


@pytest.mark.parametrize(
  ("spoil", "message"),
  [
    (lambda f: (f / "COMPLETED").unlink(), "no complete one"),
    (
      lambda f: (f / "train.tfrecord-00001-of-00003").unlink(),
      "expected 3 files train.tfrecord-.*, got 2",
    ),
    (
      lambda f: (f / "stats.test.json").write_text(json.dumps({"examples": 9})),
      "expected 9 records in split 'test', as stats.test.json says, got 10",
    ),
  ],
)
def test_a_cache_that_is_not_whole_is_refused(places, tmp_path, spoil, message):
  folder = cached_tasks.write("records_task", tmp_path)
  spoil(folder)
  with pytest.raises(ValueError, match=message):
    source = sources.open(f"seqio:{folder}")
    source.read()


def test_a_name_that_nothing_registered_says_how_to(tmp_path):
  with pytest.raises(ValueError, match="import my_tasks in a gin file"):
    sources.check("seqio:no_such_task")


def test_a_query_with_several_documents_is_one_example(places, vocabulary):
  """The one that prepare_data keeps; T5X's n is synthq's."""
  import seqio

  data = sources.open(places["beir"]).read()
  rows = list(
    seqio.get_mixture_or_task("records_task")
    .get_dataset(None, "train", shuffle=False)
    .as_numpy_iterator()
  )
  assert len(rows) == len({row["query_id"] for row in rows}) == 30
  pairs = {(r["query_id"].decode(), r["passage_id"].decode()) for r in rows}
  assert pairs <= set(data.pairs("train"))
  tasks.register("every_pair", places["beir"], vocabulary, one_per_query=False)
  rows = seqio.get_mixture_or_task("every_pair").get_dataset(None, "train")
  assert len(list(rows)) == len(data.pairs("train")) == 59


def test_seqio_reads_the_cache_as_the_task(places):
  """T5X with USE_CACHED_TASKS sees the examples alone."""
  import seqio

  seqio.set_global_cache_dirs([places["cache"].partition(":")[2] + "/.."])
  try:
    task = seqio.get_mixture_or_task("records_task")
    fresh, cached = (
      sorted(
        (row["query_id"], row["passage_id"], tuple(row["inputs"].tolist()))
        for row in task.get_dataset(
          {"inputs": 16, "targets": 8}, "train", shuffle=False,
          use_cached=use_cached,
        ).as_numpy_iterator()
      )
      for use_cached in (False, True)
    )  # fmt: skip
    assert fresh == cached and len(fresh) == 30
    # Now the name stands for the cache, whose files are digested.
    assert sources.open("seqio:records_task").read().qrels
  finally:
    seqio.set_global_cache_dirs([])
    task._cache_dir = None


def test_the_private_task_is_no_test_set_under_another_name(places):
  [one] = prepare_test_set.expand([places["cache"]])
  assert (one.name, one.split) == ("records_task", "test")
  for private in (places["cache"], places["cache"] + f"@{CORPUS}"):
    with pytest.raises(ValueError, match="must not hold the private log"):
      prepare_test_set.refuse_private([one], private)
