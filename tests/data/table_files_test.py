"""Logs and sets as they come: one content, in every kind of table."""

import csv
import gzip
import json

import pyarrow
import pytest
from pyarrow import parquet

from synthq_jax.data import (
  beir,
  collection,
  jsonl,
  msmarco,
  query_sets,
  sources,
  splits,
  table_files,
)

CORPUS = [
  {"_id": f"d{i}", "title": f"Thing {i}", "text": f"It is\t thing, {i}."}
  for i in range(60)
]
CLICKS = [
  {
    "user": f"u{i % 7}",
    "query": f'what is "thing" {i}',
    "document": f"d{i % 60}",
    "clicks": str(i % 4),
  }
  for i in range(120)
]


def write(path, rows):
  """Writes a table of the kind that its suffix says."""
  path.parent.mkdir(parents=True, exist_ok=True)
  suffix = path.name.removesuffix(".gz").rpartition(".")[2]
  if suffix == "parquet":
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
  elif suffix == "arrow":
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
      writer.write_table(table)
  else:
    opened = gzip.open if path.name.endswith(".gz") else open
    with opened(path, "wt", newline="") as stream:
      if suffix == "jsonl":
        stream.writelines(f"{json.dumps(row)}\n" for row in rows)
      else:
        options = {"delimiter": ","}
        if suffix == "tsv":
          options = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
          options["quotechar"] = None
        writer = csv.DictWriter(stream, rows[0].keys(), **options)
        writer.writeheader()
        writer.writerows(rows)
  return path


KINDS = ["jsonl", "csv", "csv.gz", "tsv", "parquet", "arrow"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_log_is_the_same_in_every_kind_of_table(kind, tmp_path):
  corpus = write(tmp_path / "corpus.jsonl", CORPUS)
  path = write(tmp_path / f"log.{kind}", CLICKS)
  read = sources.open(f"log:{path}@{corpus}").read()
  assert [(d.id, d.contents) for d in read.documents] == [
    (row["_id"], f"{row['title']} {row['text']}") for row in CORPUS
  ]
  texts = {query.id: (query.client, query.text) for query in read.queries}
  clicked = {
    (row["user"], row["query"], row["document"])
    for row in CLICKS
    if row["clicks"] != "0"
  }
  assert clicked == {
    (*texts[query], document)
    for split in ("train", "dev", "test")
    for query, document in read.pairs(split)
  }
  pairs = jsonl.read_jsonl(path)  # here a document's cell is its text
  assert {(q.client, q.text) for q in pairs.queries} == {
    (user, query) for user, query, _ in clicked
  }


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_corpus_may_be_such_a_table_too(kind, tmp_path):
  rows = [
    {"id": row["_id"], "contents": row["text"].replace("\t", " ")}
    for row in CORPUS
  ]
  corpus = write(tmp_path / f"corpus.{kind}", rows)
  path = write(tmp_path / "log.csv", CLICKS)
  read = jsonl.read_log(path, corpus)
  assert [(d.id, d.text) for d in read.documents] == [
    (row["id"], row["contents"]) for row in rows
  ]


def test_lines_may_name_their_split(tmp_path):
  corpus = write(tmp_path / "corpus.jsonl", CORPUS)
  named = [
    row | {"split": "train" if number < 100 else "test"}
    for number, row in enumerate(CLICKS)
  ]
  read = jsonl.read_log(write(tmp_path / "a.csv", named), corpus)
  assert {k: len(v) for k, v in read.qrels.items()} == {"train": 75, "test": 15}
  folder = tmp_path / "saved"  # as `datasets` saves several splits
  write(folder / "train" / "data-00000-of-00001.arrow", CLICKS[:100])
  write(folder / "test" / "data-00000-of-00001.arrow", CLICKS[100:])
  (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
  assert jsonl.read_log(folder, corpus).qrels == read.qrels
  named[3]["split"] = ""
  with pytest.raises(ValueError, match="in all lines or in none"):
    jsonl.read_log(write(tmp_path / "b.csv", named), corpus)


def records(data):
  """The trained queries, each with its documents."""
  train = data.qrels["train"].items()
  return {(query, *sorted(grades)) for query, grades in train}


def test_one_query_of_a_log_moves_no_other_record(tmp_path):
  corpus = write(tmp_path / "corpus.jsonl", CORPUS)
  before = jsonl.read_log(write(tmp_path / "a.csv", CLICKS), corpus)
  assert len(records(before)) > 50
  for left_out in range(0, 60, 7):
    rows = CLICKS[:left_out] + CLICKS[left_out + 1 :]
    after = jsonl.read_log(write(tmp_path / "b.csv", rows), corpus)
    assert tuple(after.documents) == tuple(before.documents)
    assert len(records(after) ^ records(before)) <= 1


def test_unknown_ids_are_counted_and_said_or_stop(tmp_path, capsys):
  corpus = write(tmp_path / "corpus.jsonl", CORPUS[:55])
  path = write(tmp_path / "log.csv", CLICKS)
  source = sources.open(f"log:{path}@{corpus}")
  read = source.read()
  lost = [
    r for r in CLICKS if r["clicks"] != "0" and int(r["document"][1:]) > 54
  ]
  [line] = capsys.readouterr().err.splitlines()
  assert f"left out judgements of {len(lost)} unknown document ids" in line
  assert source.left_out == {"document": len(lost)}
  assert sum(len(read.pairs(split)) for split in read.qrels) == 90 - len(lost)
  with pytest.raises(
    ValueError, match="log.csv:57: .* known document, got 'd55'"
  ):
    sources.open(f"log:{path}@{corpus}", strict=True).read()


def small_set():
  return collection.Collection(
    tuple(collection.Document(f"d{i}", f"text {i}", f"T{i}") for i in range(9)),
    tuple(collection.Query(f"q{i}", f"what about {i}") for i in range(9)),
    {
      "train": {f"q{i}": {f"d{i}": 1, "d0": 0} for i in range(1, 6)},
      "test": {f"q{i}": {f"d{i}": 2} for i in range(6, 9)},
    },
  )


ORIGIN = query_sets.Origin(generator="eps8", epsilon=8.0, delta=1e-5)


@pytest.mark.parametrize(
  "layout, read", [("hf", beir.read_hub), ("beir", beir.read_beir)]
)
def test_a_written_set_comes_back(layout, read, tmp_path):
  data = small_set()
  query_sets.LAYOUTS[layout].write(tmp_path, data, ORIGIN)
  found = read(tmp_path)
  assert tuple(found.documents) == data.documents
  assert set(found.queries) <= set(data.queries)
  assert found.qrels == data.qrels
  unknown = {"qx": {"d1": 1}}
  rows = [{"query-id": "qx", "corpus-id": "d1", "score": 1}]
  if layout == "hf":
    write(tmp_path / "qrels" / "test.parquet", rows)
    lost = collection.Dangling()
    assert not read(tmp_path, dangling=lost).qrels["test"]
    assert lost == {"query": len(unknown)}
    with pytest.raises(ValueError, match="known query, got 'qx'"):
      read(tmp_path)


def test_anserini_reads_what_is_written_for_it(tmp_path):
  data = small_set()
  query_sets.LAYOUTS["pyserini"].write(tmp_path, data, ORIGIN)
  found = sources.open(f"anserini:{tmp_path}").read()
  assert [(d.id, d.text) for d in found.documents] == [
    (d.id, d.contents) for d in data.documents
  ]
  assert found.qrels == data.qrels
  (tmp_path / "topics.test.tsv").unlink()
  (tmp_path / "topics.test.txt").write_text(
    "<top>\n<num> Number: q6\n<title> Topic: what\n about 6\n<desc> Long.\n"
    "</top>\n<top>\n<num>q7</num>\n<title>seven</title></top>\n"
  )
  lost = collection.Dangling()
  found = msmarco.read_anserini(tmp_path, dangling=lost)
  texts = {query.id: query.text for query in found.queries}
  assert (texts["q6"], texts["q7"]) == ("what about 6", "seven")
  assert lost == {"query": 1}  # q8 is no topic any more


def test_one_split_for_all_is_divided_by_words_and_said(capsys):
  judged = {f"q{i}": {f"d{i % 9}": 1} for i in range(300)}
  data = collection.Collection(
    small_set().documents,
    tuple(collection.Query(q, f"What about {q}?") for q in judged),
    {"test": judged},
  )
  divided = splits.where_none(data)
  assert "a hash of their words" in capsys.readouterr().err
  sizes = {name: len(qrels) for name, qrels in divided.qrels.items()}
  assert 200 < sizes["train"] < 280 and min(sizes.values()) > 10
  together = {
    q: g for qrels in divided.qrels.values() for q, g in qrels.items()
  }
  assert together == judged
  fewer = {q: g for q, g in judged.items() if q != "q7"}
  again = splits.where_none(
    collection.Collection(data.documents, data.queries, {"test": fewer})
  )
  for name, qrels in again.qrels.items():
    assert qrels.items() <= divided.qrels[name].items()
  assert splits.where_none(small_set()) == small_set()


@pytest.mark.parametrize(
  "name, content, words",
  [
    ("log.xlsx", b"", "got another suffix"),
    ("log.csv", b"query,document\na\n", "expected 2 cells"),
    ("log.csv", b"query,document\n\xff,d1\n", "UTF-8"),
    ("log.parquet", b"none", "damaged file"),
    ("log.arrow", b"none", "damaged file"),
    ("log.csv", b"query,document,clicks\na,d1,often\n", "expected a number"),
    ("log.csv", b"query,doc\na,d1\n", 'under "document"'),
  ],
)
def test_a_damaged_log_is_one_line_without_its_texts(
  name, content, words, tmp_path
):
  corpus = write(tmp_path / "corpus.jsonl", CORPUS)
  path = tmp_path / name
  path.write_bytes(content)
  with pytest.raises(ValueError, match=words) as raised:
    jsonl.read_log(path, corpus)
  assert str(path) in str(raised.value) and "often" not in str(raised.value)
  with pytest.raises(ValueError, match="no such file"):
    list(table_files.rows(tmp_path / "nowhere.csv"))
