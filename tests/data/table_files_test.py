"""Logs and sets as they come: one content, in every kind of table."""

import csv
import gzip
import json
import traceback

import pyarrow
import pytest
import small_data
from pyarrow import parquet

from synthq_jax.data import (
  beir,
  collection,
  ids,
  jsonl,
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
      if suffix in ("jsonl", "ndjson"):
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


KINDS = ["jsonl", "ndjson", "csv", "csv.gz", "tsv", "parquet", "arrow"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_log_is_the_same_in_every_kind_of_table(kind, tmp_path):
  corpus = write(tmp_path / "corpus.jsonl", CORPUS)
  path = write(tmp_path / f"log.{kind}", CLICKS)
  read = sources.open(f"log:{path}@{corpus}").read()
  assert [(d.id, d.contents) for d in read.documents] == [
    (row["_id"], f"{row['title']} {row['text']}") for row in CORPUS
  ]
  assert len(CLICKS) <= table_files.get_max_rows(path) <= len(CLICKS) + 2
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
  assert table_files.get_max_rows(folder) == len(CLICKS)
  named[3]["split"] = ""
  with pytest.raises(ValueError, match="in all lines or in none"):
    jsonl.read_log(write(tmp_path / "b.csv", named), corpus)


def test_what_was_computed_of_a_saved_set_is_no_part_of_it(tmp_path):
  folder = tmp_path / "saved" / "train"
  write(folder / "data-00000-of-00001.arrow", CLICKS)
  write(folder / "cache-0123456789abcdef.arrow", CLICKS[:9])
  state = folder / "state.json"
  state.write_text(
    '{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}'
  )
  assert len(list(table_files.rows(tmp_path / "saved"))) == len(CLICKS)
  assert table_files.get_max_rows(tmp_path / "saved") == len(CLICKS)
  state.write_text("[]")
  with pytest.raises(ValueError, match="state.json: expected the names"):
    list(table_files.rows(tmp_path / "saved"))


def test_hidden_copies_of_tables_are_passed_over(tmp_path):
  """Notebooks and macOS leave them: a log would have been read twice."""
  write(tmp_path / "train.csv", CLICKS)
  write(tmp_path / ".ipynb_checkpoints" / "train-checkpoint.csv", CLICKS)
  (tmp_path / "._train.csv").write_bytes(b"\0\xff")
  assert len(list(table_files.rows(tmp_path))) == len(CLICKS)
  assert table_files.get_max_rows(tmp_path) <= len(CLICKS) + 2


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_folders_of_partitions_are_columns(tmp_path, suffix):
  """Spark and pyarrow leave these columns out of the files."""
  for row in CLICKS:
    row = dict(row)
    names = [f"clicks={row.pop('clicks')}", f"user={row.pop('user')}%20x"]
    path = tmp_path / "log" / names[0] / names[1] / f"part-0.{suffix}"
    rows = [r for _, r in table_files.rows(path)] if path.is_file() else []
    write(path, [*rows, row])
  table_files.check(tmp_path / "log")
  assert {"clicks", "user"} <= {*table_files.columns(tmp_path / "log")[1]}
  assert table_files.splits(tmp_path / "log") == ["part"]
  corpus = write(tmp_path / "corpus.jsonl", CORPUS)
  read = jsonl.read_log(tmp_path / "log", corpus)
  clicked = [row for row in CLICKS if row["clicks"] != "0"]
  assert {(query.text, query.client) for query in read.queries} == {
    (row["query"], f"{row['user']} x") for row in clicked
  }


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("kind", ["log", "jsonl"])
def test_missing_clicks_are_no_clicks(tmp_path, suffix, kind):
  """A left join of impressions and clicks leaves them empty."""
  corpus = write(tmp_path / "corpus.jsonl", CORPUS)
  missing = {"csv": "", "parquet": None}.get(suffix)
  joined = [
    row | {"clicks": missing if row["clicks"] == "0" else row["clicks"]}
    for row in CLICKS
  ]
  if suffix == "jsonl":  # BigQuery leaves out null
    joined = [{k: v for k, v in row.items() if v is not None} for row in joined]
  path = write(tmp_path / f"log.{suffix}", joined)
  place = f"{path}@{corpus}" if kind == "log" else path
  with pytest.raises(ValueError, match='"clicks" in all lines or in none'):
    sources.open(f"{kind}:{place}").read()
  path = write(path, [row | {"clicks": missing} for row in CLICKS])
  read = sources.open(f"{kind}:{place}").read()  # a column without any value
  assert len(read.queries) == len(CLICKS)


@pytest.mark.parametrize("name", ["queries.jsonl", "queries/train-0.jsonl"])
def test_queries_beside_a_corpus_are_no_documents(tmp_path, name):
  """They would have become public texts of the collection."""
  folder = tmp_path / "beir"
  write(folder / "corpus.jsonl", CORPUS)
  write(folder / name, [{"_id": "q1", "text": "a private query"}])
  log = write(tmp_path / "log.csv", CLICKS)
  with pytest.raises(
    ValueError, match="documents alone.* got a table of queries"
  ):
    jsonl.read_log(log, folder)


def test_a_folder_of_two_kinds_of_tables_is_refused(tmp_path):
  write(tmp_path / "train-0.parquet", CLICKS[:5])
  write(tmp_path / "train-1.jsonl", CLICKS[5:])
  with pytest.raises(ValueError, match=r"of one kind, got .jsonl and .parquet"):
    list(table_files.rows(tmp_path))


def test_the_hubs_folder_of_all_splits_is_no_split(tmp_path):
  for split, rows in (("train", CLICKS[:90]), ("test", CLICKS[90:])):
    write(tmp_path / "log" / "data" / f"{split}-00000-of-00001.parquet", rows)
  assert table_files.splits(tmp_path / "log") == ["test", "train"]
  corpus = write(tmp_path / "corpus.jsonl", CORPUS)
  read = jsonl.read_log(tmp_path / "log", corpus)
  assert {k: len(v) for k, v in read.qrels.items()} == {"train": 67, "test": 23}


@pytest.mark.parametrize("by_file", [False, True])
def test_pairs_stay_in_the_splits_that_they_name(by_file, tmp_path):
  path, names = tmp_path / "log.jsonl", ("train", "other")
  rows = [row | {"split": names[i % 2]} for i, row in enumerate(CLICKS)]
  if by_file:
    path = tmp_path / "log"
    write(path / "train.csv", CLICKS[::2])
    write(path / "other.csv", CLICKS[1::2])
  else:
    write(path, rows)
  read = sources.open(f"jsonl:{path}").read()
  assert set(read.qrels) == {*names}
  assert read.split_by_record != by_file
  texts = {query.id: query.text for query in read.queries}
  for split in names:
    assert {texts[query] for query in read.qrels[split]} == {
      row["query"]
      for row in rows
      if row["split"] == split and row["clicks"] != "0"
    }


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
  assert "left out judgements of unknown document ids" in line
  assert f"document ids: {len(lost)}; --strict" in line
  assert source.left_out == {"document": len(lost)}
  assert sum(len(read.pairs(split)) for split in read.qrels) == 90 - len(lost)
  with pytest.raises(
    ValueError, match="log.csv:57: expected the id of a known document"
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


ORIGIN = {"generator": "eps8", "epsilon": 8.0, "delta": 1e-5}


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
    with pytest.raises(ValueError, match="expected the id of a known query"):
      read(tmp_path)


@pytest.mark.parametrize("kind", ["beir", "hf", "msmarco", "log", "jsonl"])
def test_a_set_says_before_it_is_read_how_many_documents_it_may_have(
  kind, tmp_path
):
  place = str(tmp_path)
  if kind in query_sets.LAYOUTS:
    query_sets.LAYOUTS[kind].write(tmp_path, small_set(), ORIGIN)
  elif kind == "msmarco":
    small_data.write_msmarco(tmp_path, small_set())
  else:
    place = str(write(tmp_path / "log.csv", CLICKS))
    corpus = write(tmp_path / "corpus.parquet", CORPUS)
    place += f"@{corpus}" if kind == "log" else ""
  source = sources.open(f"{kind}:{place}")
  most, number = source.most_documents(), len(source.read().documents)
  assert number <= most
  if kind != "jsonl":  # where a document may stand in several lines
    assert most <= number + 1
  assert sources.open(f"{kind}:{tmp_path / 'no'}@no").most_documents() is None


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_whole_grades_may_be_stored_as_floats(tmp_path, suffix):
  data = small_set()
  query_sets.LAYOUTS["hf"].write(tmp_path, data, ORIGIN)
  [file] = (tmp_path / "qrels").glob("test*")
  file.unlink()

  def graded(grade):
    row = {"query-id": "q6", "corpus-id": "d6", "score": grade}
    write(tmp_path / "qrels" / f"test.{suffix}", [row])
    [other] = (tmp_path / "qrels").glob("train*")
    rows = [
      {"query-id": query, "corpus-id": document, "score": float(one)}
      for query, grades in data.qrels["train"].items()
      for document, one in grades.items()
    ]
    other.unlink()
    write(tmp_path / "qrels" / f"train.{suffix}", rows)
    return beir.read_hub(tmp_path).qrels

  assert graded(2.0) == data.qrels | {"test": {"q6": {"d6": 2}}}
  for bad in (1.5, float("nan")):
    with pytest.raises(ValueError, match="expected a whole number") as caught:
      graded(bad)
    assert "\n" not in str(caught.value)


def hub(tmp_path, judged, suffix="parquet", key="_id"):
  """Writes a set of the hub with these judgements."""
  rows = {
    "corpus": [
      {key: f"d{i}", "title": None, "text": f"t {i}"} for i in range(3)
    ],
    "queries": [{key: f"q{i}", "text": f"about {i}"} for i in range(3)],
    "qrels": judged,
  }
  for name, each in rows.items():
    (tmp_path / name).mkdir(exist_ok=True)
    write(tmp_path / name / f"test-00000-of-00001.{suffix}", each)
  return sources.open(f"hf:{tmp_path}").read()


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_judgements_without_a_grade_are_relevant(suffix, tmp_path):
  """NanoBEIR has two columns: "expected a whole number as the grade"."""
  judged = [{"query-id": f"q{i}", "corpus-id": f"d{i}"} for i in range(2)]
  read = hub(tmp_path, judged, suffix)
  assert read.qrels == {"test": {"q0": {"d0": 1}, "q1": {"d1": 1}}}
  for other in ({"relevance": 0}, {"score": None}):
    with pytest.raises(
      ValueError, match="expected a whole number as the grade"
    ):
      hub(tmp_path, [judged[0] | other, judged[1] | other], suffix)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_lists_of_ids_in_judgements_are_refused_as_such(suffix, tmp_path):
  """They were "unknown ids", all left out under a note."""
  judged = [{"query-id": "q0", "corpus-id": ["d0", "d1"], "score": 1}]
  with pytest.raises(ValueError, match=':1: .* under "corpus-id", got list'):
    hub(tmp_path, judged, suffix)
  judged = [{"query_id": "q0", "corpus-id": "d0", "score": 1}]
  with pytest.raises(ValueError, match=':1: .* under "query-id", got None'):
    hub(tmp_path, judged, suffix)


def test_ids_may_stand_under_id_as_mteb_2_writes_them(tmp_path):
  judged = [{"query-id": "q0", "corpus-id": "d0", "score": 1}]
  read = hub(tmp_path, judged, key="id")
  assert [item.id for item in read.documents] == ["d0", "d1", "d2"]
  assert read.pairs("test") == [("q0", "d0")]


@pytest.mark.parametrize("folder", ["default", "data"])
def test_judgements_may_be_the_default_table_of_a_set(tmp_path, folder):
  """`push_to_hub` of `datasets`, and mteb's sets with it, calls it "data"."""
  judged = [{"query-id": "q0", "corpus-id": "d0", "score": 1}]
  expected = hub(tmp_path, judged).qrels
  (tmp_path / "qrels").rename(tmp_path / folder)
  assert sources.open(f"hf:{tmp_path}").read().qrels == expected
  assert expected == {"test": {"q0": {"d0": 1}}}


def test_a_set_may_be_the_files_that_mteb_keeps_on_the_hub(tmp_path):
  """corpus.jsonl and queries.jsonl beside qrels/test.jsonl: no kind read it."""
  judged = [{"query-id": "q0", "corpus-id": "d0", "score": 1.0}]
  expected = hub(tmp_path, judged, "jsonl")
  documents = [*expected.documents]
  for name in ("corpus", "queries"):
    (tmp_path / name / "test-00000-of-00001.jsonl").rename(
      tmp_path / f"{name}.jsonl"
    )
    (tmp_path / name).rmdir()
  parts = tmp_path / "qrels" / "test-00000-of-00001.jsonl"
  parts.rename(parts.with_name("test.jsonl"))
  (tmp_path / "README.md").write_text("a card")
  read = sources.open(f"hf:{tmp_path}").read()
  assert [*read.documents] == documents
  assert (read.queries, read.qrels) == (expected.queries, expected.qrels)
  with pytest.raises(ValueError, match=r"got \['test.jsonl'\].*name.* hf:DIR"):
    sources.open(f"beir:{tmp_path}").read()


def prepared(path, corpus):
  """What prepare_data makes of the splits of a log."""
  return splits.where_none(jsonl.read_log(path, corpus))


def sides(data):
  """The splits of each query, with its documents there."""
  return {
    (data.query_by_id()[query], split, *sorted(grades))
    for split, judged in data.qrels.items()
    for query, grades in judged.items()
  }


@pytest.mark.parametrize("change", [{"split": "test"}, {"split": "new"}, None])
def test_one_record_with_another_split_moves_no_other(change, tmp_path):
  corpus = write(tmp_path / "corpus.jsonl", CORPUS)
  rows = [
    {"query": f"thing {i}", "document": f"d{i % 60}", "split": "train"}
    for i in range(100)
  ]
  changed = [*rows[:-1], *([rows[-1] | change] if change else [])]
  one = prepared(write(tmp_path / "a.csv", rows), corpus)
  other = prepared(write(tmp_path / "b.csv", changed), corpus)
  assert {query.text for query, *_ in sides(one) ^ sides(other)} == {"thing 99"}
  assert list(one.qrels) == ["train"]  # declared: no rule divides them
  with pytest.raises(ValueError, match="got split='dev'") as raised:
    other.pairs("dev")  # nor does the message say a cell or a number
  assert "new" not in str(raised.value) and "9" not in str(raised.value)


def test_whether_a_folder_is_divided_is_a_matter_of_its_files(tmp_path):
  corpus = write(tmp_path / "corpus.jsonl", CORPUS)
  rows = [{"query": f"q {i}", "document": f"d{i % 60}"} for i in range(100)]
  folder = tmp_path / "log"
  write(folder / "train.csv", rows)
  assert len(prepared(folder, corpus).qrels) == 3  # one file, one split
  write(folder / "test.csv", rows[:1])
  one = prepared(folder, corpus)
  (folder / "test.csv").write_text("query,document\n")
  other = prepared(folder, corpus)
  assert {len(data.qrels["train"]) for data in (one, other)} == {100}
  assert list(map(len, (one.qrels["test"], other.qrels["test"]))) == [1, 0]


def test_whether_a_set_of_the_hub_is_divided_is_no_matter_of_one_row(tmp_path):
  write(tmp_path / "corpus" / "corpus.jsonl", CORPUS)
  asked = [{"_id": f"q{i}", "text": f"what is {i}"} for i in range(60)]
  write(tmp_path / "queries" / "queries.jsonl", asked)
  judged = [
    {"query-id": f"q{i}", "corpus-id": f"d{i}", "score": 1, "split": "train"}
    for i in range(60)
  ]
  path = write(tmp_path / "qrels" / "all.jsonl", judged)
  one = splits.where_none(beir.read_hub(tmp_path))
  write(path, [*judged[:-1], judged[-1] | {"split": "test"}])
  other = splits.where_none(beir.read_hub(tmp_path))
  assert {query.id for query, *_ in sides(one) ^ sides(other)} == {"q59"}
  for row in judged:
    del row["split"]
  path.unlink()
  write(tmp_path / "qrels" / "train.csv", judged)
  path = write(tmp_path / "qrels" / "test.csv", judged[:1])
  path.write_text(path.read_text().splitlines()[0])  # its one row is gone
  whole = splits.where_none(beir.read_hub(tmp_path))
  assert {k: len(v) for k, v in whole.qrels.items()} == {"test": 0, "train": 60}


PRIVATE = "is my rash from hiv"


@pytest.mark.parametrize(
  "kind, name, text",
  [
    ("log", "log.csv", "{p},d1\nother,d2\n"),
    ("log", "log.tsv", "{p}\td1\nother\td2\n"),
    ("log", "log.tsv", "query\tdocument\n{p}\td1\td2\n"),
    ("log", "log.csv", "query,document,clicks\nx,d1,{p}\n"),
    ("log", "log.csv", "query,document\nx,{p}\n"),
    ("log", "log.csv", "query,document,split\nx,d1,{p}\n"),
    ("log", "log.csv", 'query,document\n"{p}"x,d1\n'),
    ("log", "log.csv", "query,document\n{p}\udcff,d1\n"),
    ("log", "log.jsonl", '{{"query": "{p}\n'),
    ("log", "log.jsonl", '{{"query": "{p} \\ud83d", "document": "d1"}}\n'),
    ("log", "log.jsonl", '{{"{p}": "x", "document": "d1"}}\n'),
    ("log", "log.jsonl", '{{"query": "x", "document": "d1", "user": ["{p}"]}}'),
    ("jsonl", "log.csv", "{p},d1\nother,d2\n"),
    ("jsonl", "log.jsonl", '{{"{p}": "x", "document": "d1"}}\n'),
    ("beir", "queries.jsonl", '{{"_id": "{p}", "text": "x"}}\n'),
    ("beir", "queries.jsonl", '{{"_id": "q1", "{p}": "x"}}\n'),
    ("beir", "queries.jsonl", '{{"_id": "{u}", "text": " "}}\n'),
    ("beir", "queries.jsonl", '{{"_id": "{u}", "text": "x"}}\n' * 2),
    ("beir", "qrels/test.tsv", "{p}\td1\t1\n"),
    ("beir", "qrels/test.tsv", "query-id\tcorpus-id\tscore\n{p}\n"),
    ("beir", "qrels/test.tsv", "query-id\tcorpus-id\tscore\n{p}\td1\t1\n"),
    ("beir", "qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1\t{p}\t1\n"),
    ("beir", "qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1\td1\t{p}\n"),
    ("hf", "queries/queries.csv", "_id,text\n{p},x\n"),
    ("hf", "queries/queries.csv", "q1,{p}\nq2,x\n"),
    ("hf", "qrels/test.csv", "query-id,corpus-id,score\nq1,d1,{p}\n"),
    ("hf", "qrels/test.csv", "query-id,corpus-id,score\n{p},d1,1\n"),
    ("hf", "qrels/test.csv", "{p},d1,1\nq2,d1,1\n"),
    ("msmarco", "queries.test.tsv", "{p}\n"),
    ("msmarco", "queries.test.tsv", "q1\t{p}\tx\n"),
    ("msmarco", "queries.test.tsv", "{p}\tx\n"),
    ("msmarco", "qrels.test.tsv", "{p}\n"),
    ("msmarco", "qrels.test.tsv", "{u}\t0\td1\t1\n"),
  ],
)
def test_no_error_of_a_private_file_holds_what_stands_in_it(
  kind, name, text, tmp_path
):
  shared = write(tmp_path / "corpus.jsonl", CORPUS)
  place = tmp_path / "set"
  place.mkdir()
  if kind in query_sets.LAYOUTS:
    query_sets.LAYOUTS[kind].write(place, small_set(), ORIGIN)
  elif kind == "msmarco":
    small_data.write_msmarco(place, small_set())
  path = place / name
  for older in path.parent.glob("*.parquet"):
    older.unlink()
  private = PRIVATE.replace(" ", "_")
  content = text.format(p=PRIVATE, u=private)
  path.write_bytes(content.encode("utf-8", "surrogateescape"))
  source = {"log": f"log:{path}@{shared}", "jsonl": f"jsonl:{path}"}
  with pytest.raises(ValueError) as raised:  # noqa: PT011  (several)
    sources.open(source.get(kind, f"{kind}:{place}"), strict=True).read()
  said = "".join(traceback.format_exception_only(raised.value))
  assert path.name.partition(".")[0] in said
  error, seen = raised.value, [raised.value]
  while error := error.__cause__ or (
    None if error.__suppress_context__ else error.__context__
  ):
    seen.append(error)
  held = "".join(repr((each, vars(each))) for each in seen)
  held += "".join(str(getattr(each, "object", "")) for each in seen)
  for part in ("rash", "hiv", "my"):
    assert part not in held


@pytest.mark.parametrize(
  "name, content, words",
  [
    ("log.xlsx", b"", "got another suffix"),
    ("log.csv", b"query,document\na\n", "expected 2 cells"),
    ("log.csv", b"query,document\n\xff,d1\n", "log.csv: .*UTF-8.*iconv"),
    ("log.csv", b"query,document\n", "expected lines, got none; fill it"),
    (
      "log.csv",
      b"query,document,clicks\na,d1,0\n",
      'expected clicks on "document" ids that .*corpus.jsonl has, got none',
    ),
    ("log.parquet", b"none", "damaged file"),
    ("log.arrow", b"none", "damaged file"),
    ("log.csv", b"query,document,clicks\na,d1,often\n", "expected a number"),
    ("log.csv", b"query,doc\na,d1\n", 'key "document"'),
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
  assert "another seed" not in str(raised.value)
  with pytest.raises(ValueError, match="no such file"):
    list(table_files.rows(tmp_path / "nowhere.csv"))


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".csv.gz"])
@pytest.mark.parametrize("sign", [",", ";", "\t", "|"])
def test_the_header_says_what_separates_cells(suffix, sign, tmp_path):
  rows = [["query", "document"], ["a, b", 'say "so"; or\tnot'], ["|", ";;;"]]
  path = tmp_path / f"log{suffix}"
  opened = gzip.open if suffix.endswith("gz") else open
  with opened(path, "wt", encoding="utf-8-sig", newline="") as stream:
    csv.writer(stream, delimiter=sign).writerows(rows)
  read = [[*row.values()] for _, row in table_files.rows(path)]
  assert read == rows[1:]
  assert table_files.columns(path) == (f"{path}:1", rows[0])


def test_records_do_not_say_what_separates_cells(tmp_path):
  path = tmp_path / "log.csv"
  path.write_text("query\na;b;c\n;;\n")
  assert [row for _, row in table_files.rows(path)] == [
    {"query": "a;b;c"},
    {"query": ";;"},
  ]


HEADERS = {
  "sep.csv": (b"sep=;\nquery;document\na;d1\n", "got the line sep=;"),
  "quoted.csv": (b'"sep=,"\r\nquery,document\r\na,d1\r\n', "line sep=,"),
  "twice.csv": (
    b"query,document\na,d1\nquery,document\nb,d2\n",
    r"twice\.csv:3: expected the header in the first line only",
  ),
  "column.csv": (b"query,document,query\na,d1,b\n", "each column once"),
  "wide.csv": (
    "query,document\n".encode("utf-16"),
    r"wide\.csv:1: .* as UTF-16 has; .*iconv -f utf-16",
  ),
  "spark.csv": (
    b'query,document\n"5\\" screen",d1\n',
    r"spark\.csv:2: .*in Spark, option\('escape', '\"'\)",
  ),
  "windows.tsv": (
    "query\tdocument\ncaf\u00e9\td1\n".encode("cp1252"),
    r"windows\.tsv: .*iconv -f windows-1252",
  ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_is_none_is_named(name, tmp_path):
  """Of two files put together, a pair "query", "document" was trained on."""
  content, words = HEADERS[name]
  path = tmp_path / name
  path.write_bytes(content)
  with pytest.raises(ValueError, match=words):
    list(table_files.rows(path))
  if name in ("sep.csv", "quoted.csv", "column.csv", "wide.csv"):  # a dry run
    with pytest.raises(ValueError, match=words):
      table_files.columns(path)


def test_a_column_that_a_parquet_table_has_twice_is_refused(tmp_path):
  """Its last values were read in silence."""
  path = tmp_path / "log.parquet"
  columns = [pyarrow.array([text]) for text in ("boats", "d1", "cars")]
  names = ["query", "document", "query"]
  parquet.write_table(pyarrow.Table.from_arrays(columns, names=names), path)
  for read in (table_files.columns, lambda path: list(table_files.rows(path))):
    with pytest.raises(ValueError, match="expected each column once") as error:
      read(path)
    assert "damaged" not in str(error.value)


@pytest.mark.parametrize(
  "name",
  [
    "log/_delta_log/00000000000000000000.json",
    "log/.hoodie/hoodie.properties",
    "log/metadata/v2.metadata.json",
    "metadata/00001-ab.metadata.json",  # beside the folder of Iceberg's data
  ],
)
def test_tables_whose_files_hold_deleted_rows_are_refused(tmp_path, name):
  """Hudi's were read with them; of others "move the other files away" was said."""
  write(tmp_path / "log" / "a.parquet", CLICKS)
  (tmp_path / name).parent.mkdir(parents=True)
  (tmp_path / name).write_text("{}")
  for read in (table_files.check, lambda path: list(table_files.rows(path))):
    with pytest.raises(ValueError, match="deleted and replaced rows"):
      read(tmp_path / "log")


def test_rows_of_a_job_that_failed_are_no_rows(tmp_path):
  """Spark leaves parts of an attempt there, which no reader of its own sees."""
  write(tmp_path / "log" / "part-00000.parquet", CLICKS)
  attempt = "_temporary/0/_temporary/attempt_2024_m_000000_0"
  write(tmp_path / "log" / attempt / "part-00000.parquet", CLICKS[:9])
  assert len([*table_files.rows(tmp_path / "log")]) == len(CLICKS)


def test_a_folder_of_a_log_may_hold_links_to_folders(tmp_path):
  """The digest read them, and the log lacked their rows without a word."""
  write(tmp_path / "log" / "2023" / "a.parquet", CLICKS[:60])
  write(tmp_path / "disk" / "b.parquet", CLICKS[60:])
  (tmp_path / "log" / "2024").symlink_to(tmp_path / "disk")
  assert len([*table_files.rows(tmp_path / "log")]) == len(CLICKS)
  for name, end in (("latest", "2024"), ("2022", ".")):
    (tmp_path / "log" / name).symlink_to(end)
    assert len([*table_files.rows(tmp_path / "log")]) == len(CLICKS)


@pytest.mark.parametrize(
  "kind",
  [
    pyarrow.timestamp("us", tz="Europe/Berlin"),  # 9999-12-31: "never"
    pyarrow.timestamp("us", tz="CEST"),
    pyarrow.date64(),
  ],
)
def test_times_that_python_lacks_change_no_row(tmp_path, kind):
  """They ended in a traceback, or "a damaged file"."""
  never = pyarrow.array([253402300799999000] * len(CLICKS), kind)
  table = pyarrow.Table.from_pylist(CLICKS).append_column("expires", never)
  parquet.write_table(table, tmp_path / "log.parquet")
  rows = [row for _, row in table_files.rows(tmp_path / "log.parquet")]
  assert [row | {"expires": 0} for row in rows] == [
    row | {"expires": 0} for row in CLICKS
  ]
  with pytest.raises(ValueError, match='string or number under "expires"'):
    ids.get_field("log:1", rows[0], "expires", "user")


def test_a_word_for_nothing_is_no_split(tmp_path):
  """Its lines were a split "NULL", which nothing reads."""
  rows = [
    {"query": f"ask {i}", "document": f"d{i}", "split": split}
    for i, split in enumerate(["train", "dev", "test", "NULL"] * 9)
  ]
  path = write(tmp_path / "log.csv", rows)
  with pytest.raises(ValueError, match='"split" in all lines or in none'):
    jsonl.read_jsonl(path)
