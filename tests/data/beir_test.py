import csv
import dataclasses
import gzip

import pytest

from synthq_jax.data import beir, collection, query_sets

CORPUS = (
  '{"_id": "d1", "title": "T", "text": "one", "client": "c", "more": 3}\n'
  '{"_id": 2, "title": null, "text": "two"}\n'
)
QUERIES = '{"_id": "q1", "text": "uno", "client": "a"}\n'
QRELS = "query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\t2\t0\n"


def folder(tmp_path, corpus=CORPUS, queries=QUERIES, qrels=QRELS, zipped=False):
  (tmp_path / "qrels").mkdir()
  contents = {
    "corpus.jsonl": corpus,
    "queries.jsonl": queries,
    "qrels/test.tsv": qrels,
  }
  for name, text in contents.items():
    data = text if isinstance(text, bytes) else text.encode()
    if zipped:
      (tmp_path / f"{name}.gz").write_bytes(gzip.compress(data))
    else:
      (tmp_path / name).write_bytes(data)
  return tmp_path


def whole(data):
  """A collection with its documents in memory."""
  return dataclasses.replace(data, documents=tuple(data.documents))


BOM = "\ufeff"


@pytest.mark.parametrize("start, end", [("", "\r\n"), (BOM, "\r\n\r\n")])
def test_files_made_on_windows_are_read_as_they_are_meant(tmp_path, start, end):
  contents = {
    name: start + text.replace("\n", end)
    for name, text in (
      ("corpus", CORPUS),
      ("queries", QUERIES),
      ("qrels", QRELS),
    )
  }
  (tmp_path / "one").mkdir()
  (tmp_path / "two").mkdir()
  read = beir.read_beir(folder(tmp_path / "one", **contents))
  assert whole(read) == whole(beir.read_beir(folder(tmp_path / "two")))


@pytest.mark.parametrize("zipped", [False, True])
def test_a_folder_is_read_plain_or_gzipped(tmp_path, zipped):
  read = beir.read_beir(folder(tmp_path, zipped=zipped))
  assert (
    tuple(read.documents)
    == tuple(read.documents)
    == (
      collection.Document("d1", "one", "T", "c"),
      collection.Document("2", "two"),
    )
  )
  assert read.queries == (collection.Query("q1", "uno", "a"),)
  assert read.qrels == {"test": {"q1": {"d1": 1, "2": 0}}}


def test_queries_are_written_without_the_documents(tmp_path):
  read = beir.read_beir(folder(tmp_path))
  beir.write_judged_queries(tmp_path / "new", read)
  assert not (tmp_path / "new" / "corpus.jsonl").exists()
  beir.write_beir(tmp_path / "new", read)
  assert whole(beir.read_beir(tmp_path / "new")) == whole(read)


def test_what_was_written_is_read_back(tmp_path):
  data = collection.Collection(
    (
      collection.Document("d1", 'a "b"\n\tc\u2028', "Ü", "x"),
      collection.Document("d2", "", "only a title"),
    ),
    (collection.Query("q1", "uno"), collection.Query("q2", "due", "y")),
    {"train": {"q2": {"d2": 2}}, "dev.small": {"q1": {"d1": 1, "d2": 0}}},
  )
  beir.write_beir(tmp_path / "new", data)
  beir.write_beir(tmp_path / "new", data)  # again: the same files
  assert whole(beir.read_beir(tmp_path / "new")) == data


def test_files_of_another_collection_are_not_mixed_in(tmp_path):
  older = folder(tmp_path)
  newer = beir.read_beir(older)
  newer = collection.Collection(newer.documents, newer.queries, {"dev": {}})
  with pytest.raises(ValueError, match=r"\['qrels/test.tsv'\] of another"):
    beir.write_beir(older, newer)


BAD = {
  "a document without id": (
    {"corpus": '{"text": "x"}\n'},
    r'corpus\.jsonl:1: expected a string under "_id", got None',
  ),
  "a document id given twice": (
    {"corpus": CORPUS + CORPUS},
    r"corpus\.jsonl:3: expected distinct document ids, got 'd1' again",
  ),
  "an id with a tab": (
    {"corpus": CORPUS + '{"_id": "d\\t3", "text": "x"}\n'},
    r"corpus\.jsonl:3: expected a document id without white space, got 'd\\t3'",
  ),
  "documents in Latin-1": (
    {"corpus": CORPUS.encode() + b'{"_id": "d3", "text": "caf\xe9"}\n'},
    r"corpus\.jsonl:3: expected UTF-8, got another byte at position 26.*iconv",
  ),
  "an empty query": (
    {"queries": QUERIES + '{"_id": "q2", "text": "  "}\n'},
    r"queries\.jsonl:2: expected text in query, got none",
  ),
  "empty documents alone": (
    {"corpus": CORPUS.replace("one", "").replace("two", "").replace("T", "")},
    r"corpus\.jsonl: expected documents with text, got none in 2: check",
  ),
  "an empty file": ({"queries": "\n"}, r"queries\.jsonl: expected a query"),
  "an unknown query": (
    {"qrels": QRELS + "q7\td1\t1\n"},
    r"test\.tsv:4: expected the id of a known query, got another",
  ),
  "two grades of one pair": (
    {"qrels": QRELS + "q1\td1\t2\n"},
    r"test\.tsv:4: expected one grade .* got another",
  ),
  "a grade that is no whole number": (
    {"qrels": QRELS + "q1\td1\tyes\n"},
    r"test\.tsv:4: expected a whole number as the grade, got another",
  ),
  "no header": (
    {"qrels": "q1\td1\t1\n"},
    r"test\.tsv:1: expected the header query-id corpus-id score",
  ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_with_file_and_line(tmp_path, name):
  content, message = BAD[name]
  with pytest.raises(ValueError, match=message):
    beir.read_beir(folder(tmp_path, **content))


def test_a_folder_without_judgements_is_refused(tmp_path):
  path = folder(tmp_path)
  (path / "qrels" / "test.tsv").rename(path / "qrels" / "test.txt")
  with pytest.raises(ValueError, match=r"SPLIT.tsv files, got \['test.txt'\]"):
    beir.read_beir(path)


def test_another_key_of_the_lines_can_be_read_by_itself(tmp_path):
  (tmp_path / "corpus.jsonl").write_text(
    '{"_id": "s1", "text": "One.", "doc": "p"}\n{"_id": "s2", "text": "Two."}\n'
  )
  assert beir.read_key(tmp_path, "doc") == {"s1": "p"}
  (tmp_path / "corpus.jsonl").write_text('{"_id": "s", "text": "x", "doc": 3}')
  with pytest.raises(ValueError, match='corpus.jsonl:1: .* under "doc", got '):
    beir.read_key(tmp_path, "doc")


def users_of(tmp_path, *lines):
  """Returns who asked the queries of a folder with these lines."""
  (tmp_path / "qrels").mkdir()
  (tmp_path / "corpus.jsonl").write_text('{"_id": "d", "text": "one"}\n')
  (tmp_path / "queries.jsonl").write_text("".join(f"{x}\n" for x in lines))
  (tmp_path / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n")
  return [query.client for query in beir.read_beir(tmp_path).queries]


def test_metadata_says_who_asked(tmp_path):
  assert users_of(
    tmp_path,
    '{"_id": "a", "text": "x", "metadata": {"user_id": "u1", "more": 1}}',
    '{"_id": "b", "text": "x", "metadata": {"user_id": 7}, "client": "7"}',
    '{"_id": "c", "text": "x", "metadata": {}}',
    '{"_id": "d", "text": "x", "metadata": null}',
    '{"_id": "e", "text": "x", "metadata": "user_id"}',
  ) == ["u1", "7", "", "", ""]


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ('"metadata": {"user_id": ["u1", "u2"]}', "got list among 1 keys"),
    ('"metadata": {"user_id": "u1"}, "client": "u2"', "one user of a query"),
  ],
)
def test_a_query_of_several_users_is_refused(tmp_path, fields, message):
  with pytest.raises(ValueError, match=message) as error:
    users_of(tmp_path, '{"_id": "a", "text": "x", ' + fields + "}")
  assert "queries.jsonl:1" in str(error.value)
  assert "u1" not in str(error.value)


def test_spaces_around_judged_ids_part_them_from_no_query(tmp_path):
  """All judgements of such a file were left out under a note."""
  (tmp_path / "test.tsv").write_text(
    "query-id\tcorpus-id\tscore\nq1 \t d1\t1 \r\n"
  )
  read = beir.read_judgements(tmp_path / "test.tsv", {"q1"}, {"d1"})
  assert read == {"q1": {"d1": 1}}


def test_lines_as_exports_write_them_are_read_as_they_are_meant(tmp_path):
  """Whole numbers as ids, null titles, lists for metadata, ids under "id"."""
  (tmp_path / "qrels").mkdir()
  (tmp_path / "corpus.jsonl").write_text(
    '{"_id": 7, "title": null, "text": "a", "metadata": []}\n'
    '{"id": "8", "text": "b"}\n{"id": "x", "_id": "9", "text": "c"}\n'
  )
  (tmp_path / "queries.jsonl").write_text(
    '{"_id": 1, "text": "q", "metadata": ["u1"]}\n'
  )
  (tmp_path / "qrels/test.tsv").write_text(
    "query-id\tcorpus-id\tscore\n1\t7\t1\n1\t8\t1\n1\t8\t1\n"
  )
  read = beir.read_beir(tmp_path)
  assert [(x.id, x.title) for x in read.documents] == [
    ("7", ""),
    ("8", ""),
    ("9", ""),
  ]
  assert read.pairs("test") == [("1", "7"), ("1", "8")]
  assert [query.client for query in read.queries] == [""]


@pytest.mark.parametrize("marks", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_judgements_of_csv_writer_lose_their_marks(tmp_path, marks):
  """BEIR's own code writes and reads them so; before, they named no document."""
  ids = ["Weird_Al", '"Heroes"', 'say_"no"', "d3"]
  beir.write_beir(
    tmp_path,
    collection.Collection(
      documents=tuple(collection.Document(id_, "text") for id_ in ids),
      queries=(collection.Query("q1", "ask"),),
      qrels={"test": {"q1": dict.fromkeys(ids, 1)}},
    ),
  )
  path = tmp_path / "qrels" / "test.tsv"
  expected = beir.read_judgements(path)
  with path.open("w", newline="") as stream:
    writer = csv.writer(stream, delimiter="\t", quoting=marks)
    writer.writerow(("query-id", "corpus-id", "score"))
    writer.writerows(("q1", id_, 1) for id_ in ids)
  assert beir.read_beir(tmp_path).qrels == {"test": expected}
  path.write_text(path.read_text() + "q1\td3\n")
  with pytest.raises(ValueError, match=r"test.tsv:6: expected 3 cells"):
    beir.read_judgements(path)


def test_ids_that_beirs_loader_takes_for_quotations_are_not_exported(tmp_path):
  """Five judgements were loaded as three, of other documents."""
  data = collection.Collection(
    documents=(collection.Document(id='"d1', text="one"),),
    queries=(collection.Query(id="s0", text="ask"),),
    qrels={"train": {"s0": {'"d1': 1}}},
  )
  with pytest.raises(ValueError, match="begin with a quotation mark, got 1"):
    query_sets.LAYOUTS["beir"].write(tmp_path, data, {})
  beir.write_beir(tmp_path, data)
  assert whole(beir.read_beir(tmp_path)) == data
