import dataclasses
import json

import pytest

from synthq_jax.data import jsonl, sources, splits

HALVES = {"train": 0.5, "test": 0.5}


def write(tmp_path, rows):
  path = tmp_path / "log.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


def log(count):
  return [
    {"query": f"what is thing {i}", "document": f"Thing {i} is a thing."}
    for i in range(count)
  ]


def test_the_order_of_documents_is_that_of_their_ids(tmp_path):
  read = jsonl.read_jsonl(write(tmp_path, log(100)))
  ids = [document.id for document in read.documents]
  assert ids == sorted(ids)  # which are digests of the content
  for rows in (log(100)[::-1], log(100)[50:] + log(100)):
    assert jsonl.read_jsonl(write(tmp_path, rows)).documents == read.documents


def test_a_query_moves_no_other_into_the_train_split_or_out_of_it(tmp_path):
  rows = log(200)
  train = jsonl.read_jsonl(write(tmp_path, rows)).qrels["train"]
  for number in range(0, 200, 10):
    # In the words of one query it asks for the document of another.
    document = rows[number - 1]["document"]
    new = {**rows[number], "document": document, "client": "x"}
    found = jsonl.read_jsonl(write(tmp_path, [new, *rows])).qrels["train"]
    assert train.items() <= found.items()
    assert len(found) <= len(train) + 1


def test_no_document_and_no_words_of_a_query_are_in_two_splits(tmp_path):
  rows = log(200)
  for number in range(0, 200, 3):
    document = rows[number - 1]["document"]
    rows.append({**rows[number], "document": document, "client": "x"})
  read = jsonl.read_jsonl(write(tmp_path, rows))
  texts = read.query_by_id()
  words, documents = (
    [{pick(*pair) for pair in read.pairs(split)} for split in read.qrels]
    for pick in (lambda q, d: splits.token_set(texts[q].text), lambda q, d: d)
  )
  for sides in (words, documents):
    assert all(sides) and len(set.union(*sides)) == sum(map(len, sides))
  asked = {q for judged in read.qrels.values() for q in judged}
  assert len(asked) < len(read.queries)  # some were left out


def test_equal_documents_and_equal_queries_are_merged(tmp_path):
  rows = log(40) + [
    {"query": "first", "document": "same text", "client": "a"},
    {"query": "second", "document": "same text", "client": "b"},
    {"query": "first", "document": "same text", "client": "a"},
    {"query": "first", "document": "other text", "client": "a"},
    {"query": "first", "document": "other text", "client": "c"},
  ]
  read = jsonl.read_jsonl(write(tmp_path, rows), fractions=HALVES, seed=4)
  added = [item for item in read.documents if "Thing" not in item.text]
  documents = {item.text: item for item in added}
  assert len(added) == 2 and set(documents) == {"same text", "other text"}
  assert documents["same text"].client == ""  # its lines do not agree
  asked = [(query.text, query.client) for query in read.queries[40:]]
  assert asked == [("first", "a"), ("second", "b"), ("first", "c")]
  first = read.queries[40].id
  (positives,) = [q[first] for q in read.qrels.values() if first in q]
  assert positives == {item.id: 1 for item in documents.values()}


def test_keys_can_have_other_names(tmp_path):
  rows = [
    {"q": f"ask {i}", "url": {"not": "read"}, "body": f"b {i}", "who": "me"}
    for i in range(40)
  ]
  fields = jsonl.Fields(query="q", document="body", client="who")
  read = jsonl.read_jsonl(write(tmp_path, rows), fields, fractions=HALVES)
  assert read.queries[3].text == "ask 3"
  assert {item.client for item in read.documents} == {"me"}


BAD = {
  "a line without the query": (
    {"question": "x", "document": "y"},
    r'log\.jsonl:41: expected the key "query", got 2 others',
  ),
  "an empty document": (
    {"query": "x", "document": " "},
    r'log\.jsonl:41: expected text under "document", got none',
  ),
  "a query that is a list": (
    {"query": ["x"], "document": "y"},
    r'log\.jsonl:41: expected a string under "query", got list',
  ),
  "a document that is NaN": (
    {"query": "x", "document": float("nan")},
    r'log\.jsonl:41: expected a string under "document", got float',
  ),
  "a tab-separated line": (
    b"x\ty\n",
    r"log\.jsonl:41: expected one JSON object a line, got other text",
  ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_with_file_and_line(tmp_path, name):
  row, message = BAD[name]
  path = write(tmp_path, log(40))
  with path.open("ab") as stream:
    stream.write(row if isinstance(row, bytes) else json.dumps(row).encode())
  with pytest.raises(ValueError, match=message):
    jsonl.read_jsonl(path)


def test_a_file_too_small_for_three_splits_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"pairs in every split, got none in"):
    jsonl.read_jsonl(write(tmp_path, log(2)))


@pytest.mark.parametrize("key", ["client", "user", "user_id"])
def test_a_column_says_who_asked(tmp_path, key):
  path = write(tmp_path, [row | {key: 3} for row in log(40)])
  assert {query.client for query in jsonl.read_jsonl(path).queries} == {"3"}


def test_a_line_of_two_users_is_refused_unless_they_are_one(tmp_path):
  rows = [row | {"client": "a", "user": "a"} for row in log(40)]
  jsonl.read_jsonl(write(tmp_path, rows))
  rows[3]["user"] = "b"
  with pytest.raises(ValueError, match=r":4: expected one user of a query"):
    jsonl.read_jsonl(write(tmp_path, rows))


COLUMNS = {
  "Query_Text,body": "--gin.QUERY_FIELD=Query_Text --gin.DOCUMENT_FIELD=body,",
  "query,passage": 'the key "document", got 2 others (query, passage): give'
  " --gin.DOCUMENT_FIELD=passage, or rename the column",
  "words,document": "got 2 others (words, document): give --gin.QUERY_FIELD=words,",
  "Search_Term,Page": "--gin.QUERY_FIELD=Search_Term --gin.DOCUMENT_FIELD=Page,",
  "text,page,when": "--gin.QUERY_FIELD=text --gin.DOCUMENT_FIELD=NAME, or rename",
  "pink boats,http://d": "got 2 others: give --gin.QUERY_FIELD=NAME"
  " --gin.DOCUMENT_FIELD=NAME, or add the header, if the file has none",
  "boats,d1": "got 2 others: give",
}


@pytest.mark.parametrize("header", COLUMNS)
def test_other_columns_are_told_with_the_flags_to_give(tmp_path, header):
  path = tmp_path / "log.csv"
  path.write_text(f"{header}\nboats{',d1' * header.count(',')}\n")
  for read in (
    jsonl.read_jsonl,
    lambda path: jsonl.check_columns(path, jsonl.Fields(), has_corpus=False),
  ):
    with pytest.raises(ValueError) as error:
      read(path)
    assert COLUMNS[header] in str(error.value)
    assert "boats" not in str(error.value)  # may be a query


@pytest.mark.parametrize(
  ("header", "chosen", "words"),
  [
    ("query,document", "client", '"client" or "user" or "user_id"'),
    ("query,document,user", "account", 'under "account"'),
    ("query,document,user_id", "client", None),
    ("query,document,account", "account", None),
  ],
)
def test_a_log_without_users_is_refused_by_its_header(
  tmp_path, header, chosen, words
):
  """So that a dry run says it, before any line is read."""
  path = tmp_path / "log.csv"
  path.write_text(f"{header}\n")
  fields = jsonl.Fields(client=chosen)
  for needs_user in (False, True):
    fields = dataclasses.replace(fields, needs_user=needs_user)
    if words is None or not needs_user and chosen == "client":
      jsonl.check_columns(path, fields, has_corpus=True)
      continue
    with pytest.raises(ValueError, match=words) as error:
      jsonl.check_columns(path, fields, has_corpus=True)
    assert "user_field=NAME" in str(error.value)


@pytest.mark.parametrize(
  "names", [("data_0", "data_1"), ("part-0", "part-1"), ("2026-01", "log")]
)
def test_parts_of_an_export_are_one_log(tmp_path, names):
  """DuckDB's were refused as splits; Spark's were divided by words."""
  lines = [f"thing number {i},{i}\n" for i in range(100)]
  whole = tmp_path / "log.csv"
  whole.write_text("query,document\n" + "".join(lines))
  (tmp_path / "log").mkdir()
  for part, name in zip((lines[:50], lines[50:]), names, strict=True):
    file = tmp_path / "log" / f"{name}.csv"
    file.write_text("query,document\n" + "".join(part))
  corpus = tmp_path / "corpus.jsonl"
  corpus.write_text(
    "".join(f'{{"_id": "{i}", "text": "a {i}"}}\n' for i in range(100))
  )
  for read in (jsonl.read_jsonl, lambda log: jsonl.read_log(log, corpus)):
    assert read(tmp_path / "log").qrels == read(whole).qrels
  (tmp_path / "log" / f"{names[1]}.csv").rename(tmp_path / "log" / "test.csv")
  with pytest.raises(ValueError, match="TEST_SPLIT|split"):
    sources.open(f"log:{tmp_path / 'log'}@{corpus}").read().judgements("train")


def test_a_key_that_first_lines_leave_out_is_not_passed_over(tmp_path):
  """Protocol buffers leave out zeros: each line was a click."""
  rows = [row | {"numClicks": i} if i else row for i, row in enumerate(log(60))]
  with pytest.raises(ValueError, match='jsonl:2: expected "clicks", got "numC'):
    jsonl.read_jsonl(write(tmp_path, rows))


def test_a_text_that_is_null_is_empty_or_under_its_other_name(tmp_path):
  """pandas writes null for nothing; an empty cell of a CSV was read before."""
  log, corpus = tmp_path / "log.csv", tmp_path / "corpus.jsonl"
  log.write_text("query,document,split\nboat,1,train\nrope,2,test\n")
  corpus.write_text(
    '{"_id": 1, "text": null}\n{"id": 2, "text": null, "contents": "a rope"}\n'
  )
  documents = jsonl.read_log(log, corpus).documents
  assert [document.text for document in documents] == ["", "a rope"]
  corpus.write_text('{"_id": 1, "text": "a"}\n{"_id": 2, "body": "b"}\n')
  with pytest.raises(ValueError, match='jsonl:2: .*string under "text"'):
    jsonl.read_log(log, corpus)


@pytest.mark.parametrize(
  ("name", "words"),
  [
    ("Clicks", 'expected "clicks", got "Clicks"'),
    ("clicked", 'expected "clicks", got "clicked"'),
    ("Split", 'expected "split", got "Split"'),
    ("User", 'expected "client", got "User"'),
    ("userId", 'expected "client", got "userId"'),
    ("label", 'expected "clicks", got "label"'),
    ("Relevance", 'expected "clicks", got "Relevance"'),
    ("score", 'expected "clicks", got "score"'),
    ("Total Clicks", 'expected "clicks", got "Total Clicks"'),
    ("sum(clicks)", 'expected "clicks", got'),
    ("has_click", 'expected "clicks", got "has_click"'),
    ("esci_label", 'expected "clicks", got "esci_label"'),
    ("is_duplicate", 'expected "clicks", got "is_duplicate"'),
    ("relevance_score", 'expected "clicks", got "relevance_score"'),
    ("when", None),
    ("clicked_at", None),
  ],
)
def test_an_optional_column_is_not_passed_over_for_its_name(
  tmp_path, name, words
):
  """A column "Clicks" of zeros made every row a click."""
  path, corpus = tmp_path / "log.csv", tmp_path / "corpus.jsonl"
  lines = [f"boats {i},{i},{i}" for i in range(60)]
  path.write_text("\n".join((f"query,document,{name}", *lines)))
  documents = [f'{{"_id": "{i}", "text": "a {i}"}}' for i in range(60)]
  corpus.write_text("\n".join(documents))
  for read in (jsonl.read_jsonl, lambda log: jsonl.read_log(log, corpus)):
    if words is None:
      assert len(read(path).queries) == 60
      continue
    with pytest.raises(ValueError, match=words) as error:
      read(path)
    assert "boats" not in str(error.value)
  named = jsonl.Fields(document=name)  # a column that is chosen is read
  assert len(jsonl.read_jsonl(path, named).queries) == 60


def test_a_title_is_not_passed_over_for_its_name(tmp_path):
  log, corpus = tmp_path / "log.csv", tmp_path / "corpus.jsonl"
  log.write_text("query,document,Title\nboats,1,b\n")
  with pytest.raises(ValueError, match='expected "title", got "Title"'):
    jsonl.read_jsonl(log)
  jsonl.check_columns(log, jsonl.Fields(), has_corpus=True)  # it has its own
  corpus.write_text('{"_id": "1", "text": "a", "Title": "b"}\n')
  with pytest.raises(ValueError, match='expected "title", got "Title"'):
    jsonl.read_log(log, corpus)


def test_a_log_beside_a_corpus_names_the_flag_of_its_ids(tmp_path):
  corpus = tmp_path / "corpus.jsonl"
  corpus.write_text('{"_id": "1", "text": "a"}\n')
  path = tmp_path / "log.csv"
  path.write_text("search_term;doc_id\nboats;1\n")
  with pytest.raises(ValueError, match="QUERY_FIELD=search_term") as error:
    jsonl.read_log(path, corpus)
  assert "--gin.DOCUMENT_FIELD=doc_id," in str(error.value)


NULLS = [
  "NULL",
  "null",
  r"\N",
  "None",
  "nan",
  " NaN ",
  "<null>",
  "(not set)",
  "-",
]


@pytest.mark.parametrize("word", NULLS)
def test_a_word_for_nothing_is_no_query_and_no_document(tmp_path, capsys, word):
  """Exports of MySQL, Hive and pandas made it a query with many documents."""
  rows = [{"query": f"ask {i}", "document": f"{i}"} for i in range(60)]
  rows += [{"query": word, "document": str(i)} for i in range(7)]
  corpus = tmp_path / "corpus.jsonl"
  texts = [json.dumps({"_id": str(i), "text": f"thing {i}"}) for i in range(60)]
  corpus.write_text("\n".join(texts))
  log = write(tmp_path, rows)
  said = "7 query texts are a word for nothing, such as NULL or nan"
  for source in (f"log:{log}@{corpus}", f"jsonl:{log}"):
    read = sources.open(source).read()
    assert [query.text for query in read.queries] == [
      f"ask {i}" for i in range(60)
    ]
    assert f"{said}: their lines are left out" in capsys.readouterr().err
  ids_and_texts = [*jsonl.queries(log)]  # of the leak check
  assert [text for _, text in ids_and_texts] == [f"ask {i}" for i in range(60)]
  pairs = [*rows[:60], {"query": "ask", "document": word}]
  read = sources.open(f"jsonl:{write(tmp_path, pairs)}").read()
  assert len(read.queries) == len(read.documents) == 60
  assert "1 document texts are a word for" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["none", "NAN", "null pointer", "N", "nil"])
def test_what_people_ask_for_is_a_query(tmp_path, text):
  rows = [*log(60), {"query": text, "document": "It is a thing."}]
  read = jsonl.read_jsonl(write(tmp_path, rows))
  assert read.queries[-1].text == text


def test_a_line_with_a_word_for_nothing_moves_no_other(tmp_path):
  rows = log(200)
  train = jsonl.read_jsonl(write(tmp_path, rows))
  rows += [{"query": "NULL", "document": row["document"]} for row in rows]
  assert jsonl.read_jsonl(write(tmp_path, rows)) == train


@pytest.mark.parametrize(
  ("field", "said"),
  [("title", "title texts"), ("text", "document texts")],
)
def test_documents_named_nan_are_counted_and_stay(
  tmp_path, capsys, field, said
):
  corpus, path = tmp_path / "corpus.jsonl", write(tmp_path, [])
  path.write_text(
    "".join(f'{{"query": "ask {i}", "document": {i}}}\n' for i in range(60))
  )
  row = {"text": "boats"}
  lines = [
    json.dumps({"_id": str(i), **row, **({field: "nan"} if i < 9 else {})})
    for i in range(60)
  ]
  corpus.write_text("\n".join(lines))
  read = sources.open(f"log:{path}@{corpus}").read()
  assert len(read.documents) == 60
  note = f"9 {said} are a word for nothing, such as NULL or nan: they are read"
  assert note in capsys.readouterr().err


@pytest.mark.parametrize(
  ("text", "is_garbled"),
  [
    ("boat+to+the+island", True),
    ("boat%20to", True),
    ("salt &amp; pepper", True),
    ("caf\u00c3\u00a9", True),
    ("it\u00e2\u20ac\u2122s", True),
    ("caf\ufffd", True),
    ("c++ and c#", False),
    ("a+b", False),
    ("100% wool & silk", False),
    ("caf\u00e9 \u00c3 \u00e2", False),
  ],
)
def test_queries_that_an_export_left_encoded_are_counted(
  tmp_path, capsys, text, is_garbled
):
  rows = [*log(60), {"query": text, "document": "It is a thing."}]
  read = sources.open(f"jsonl:{write(tmp_path, rows)}").read()
  assert read.queries[-1].text == text
  note = "1 query texts hold %20, &amp;, \u00c3\u00a9 or the like"
  assert (note in capsys.readouterr().err) == is_garbled


CORPORA = {
  "corpus.csv": (
    "docid,body\n1,a thing\n",
    r'corpus\.csv:[12]: expected a key "_id" \(or "id"\) and "text" \(or'
    r""" "contents"\), got docid, body: rename the columns""",
  ),
  "without_header.csv": (  # cells of a document that may be of a person
    "p17,Ada Lovelace was admitted with\n1,a thing\n",
    r"got 2 others: rename the columns, or add the header",
  ),
  "corpus.jsonl": (
    '{"_index": "x", "_id": "1", "_source": {"text": "a thing"}}\n',
    r"""a key "text" .*_source: write hits of Elasticsearch by jq""",
  ),
}


@pytest.mark.parametrize("name", CORPORA)
def test_a_corpus_without_its_columns_is_refused_before_the_log_is_read(
  tmp_path, name
):
  """The line said "among 4 keys", of two, and a dry run said nothing."""
  content, words = CORPORA[name]
  path = write(tmp_path, log(3))
  (tmp_path / name).write_text(content)
  source = f"log:{path}@{tmp_path / name}"
  for look in (sources.check, lambda source: sources.open(source).read()):
    with pytest.raises(ValueError, match=words):
      look(source)


@pytest.mark.parametrize(
  ("content", "words"),
  [
    (
      '{"_id": "1", "_source": {"query": "boats", "document": "1"}}\n',
      "write hits of Elasticsearch by jq",
    ),
    ("# ----\n# 2026\nquery,document\n", "remove the lines above the header"),
    ("#,search_term,doc_id\n1,boats,1\n", r"give --gin\.QUERY_FIELD="),
  ],
)
def test_an_export_with_its_columns_elsewhere_says_where(
  tmp_path, content, words
):
  path = tmp_path / ("log.jsonl" if content[0] == "{" else "log.csv")
  path.write_text(content)
  with pytest.raises(ValueError, match=words):
    jsonl.check_columns(path, jsonl.Fields(), has_corpus=True)


def test_ids_that_differ_in_zeros_alone_are_named_as_the_cause(tmp_path):
  corpus = tmp_path / "corpus.jsonl"
  corpus.write_text('{"_id": "7", "text": "a"}\n')
  path = write(tmp_path, [{"query": "ask", "document": "007"}])
  with pytest.raises(ValueError, match=r"has \(it has some .* leading zeros\)"):
    sources.open(f"log:{path}@{corpus}").read()
