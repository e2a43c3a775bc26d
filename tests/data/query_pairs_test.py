"""Plain files of queries, topics and labelled pairs, and what is refused."""

import gzip
import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from synthq_jax.data import query_pairs

PAIR = {
  "query-id": 7,
  "query": "a",
  "topic": "301",
  "variant": "c",
  "other_label": ["Different Topic"],
}


def written(tmp_path, *lines, name="file.jsonl"):
  path = tmp_path / name
  path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
  return path


def test_a_labelled_pair_is_read_with_our_names(tmp_path):
  (pair,) = query_pairs.labelled_pairs(written(tmp_path, PAIR))
  assert pair == query_pairs.LabelledPair(
    query_id="7",
    query="a",
    topic="301",
    variant="c",
    different_topic=True,
  )


@pytest.mark.parametrize(
  ("key", "value", "said"),
  [
    ("query", None, 'string under "query", got None'),
    ("other_label", [{"Identical": 1}], "got another one; "),
    ("other_label", ["Identical"], "Different Topic"),
  ],
)
def test_a_wrong_pair_is_refused_with_its_line(tmp_path, key, value, said):
  path = written(tmp_path, PAIR, {**PAIR, key: value})
  with pytest.raises(ValueError, match=f"file.jsonl:2: .*{said}"):
    query_pairs.labelled_pairs(path)


def test_a_log_is_read_in_whatever_layout(tmp_path):
  expected = [("1", "red  apples"), ("2", "naïve")]
  texts = {
    "msmarco.tsv": "1\tred  apples\n2\tnaïve\n",
    "headed.tsv": "query-id\ttext\tsources\n1\tred  apples\tx\n2\tnaïve\ty\n",
    "orcas.tsv": (
      "1\tred  apples\tD1\thttps://a.org\n1\tred  apples\tD2\thttps://b.org\n"
      "2\tnaïve\tD1\thttps://a.org\n"
    ),
    "queries.jsonl": (
      '{"_id": "1", "text": "red  apples"}\n{"id": 2, "query": "naïve"}\n'
    ),
  }
  folder = tmp_path / "logs.jsonl.d"  # a file's own name says its layout
  folder.mkdir()
  for name, text in texts.items():
    (folder / name).write_text(text)
    assert list(query_pairs.query_log(folder / name)) == expected, name
    packed = folder / f"{name}.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert list(query_pairs.query_log(packed)) == expected, name


def test_what_one_id_asked_next_is_a_query_too(tmp_path):
  """Ids of users or sessions: a check for leaks that drops it says "clean"."""
  path = tmp_path / "log.tsv"
  path.write_text("u\tboat\nu\tboat\nu\tmeasles outbreaks\nu\tboat\n")
  texts = [text for _, text in query_pairs.query_log(path)]
  assert texts == ["boat", "measles outbreaks", "boat"]


@pytest.mark.parametrize("broken", ["a\\nb", "a\\rb"])
def test_an_id_of_several_lines_is_refused(tmp_path, broken):
  path = tmp_path / "log.jsonl"
  path.write_text(f'{{"_id": "{broken}", "text": "measles"}}\n')
  with pytest.raises(ValueError, match="log.jsonl:1: .*id of one line"):
    list(query_pairs.query_log(path))


def test_a_log_is_read_line_by_line(tmp_path):
  path = tmp_path / "log.tsv"
  path.write_text("1\tmeasles\nbroken secret\n")
  rows = query_pairs.query_log(path)
  assert next(rows) == ("1", "measles")
  with pytest.raises(ValueError, match="log.tsv:2: .*without a tab") as error:
    next(rows)
  assert "secret" not in str(error.value)


@pytest.mark.parametrize(
  ("name", "text"),
  [
    ("log.tsv", "\tmeasles\n"),
    ("log.tsv", "1\t \n"),
    ("log.jsonl", '{"_id": "1", "text": ""}\n'),
    ("log.jsonl", '{"_id": "1"}\n'),
    ("log.jsonl", '{"text": "measles"}\n'),
  ],
)
def test_a_query_without_an_id_or_words_is_refused(tmp_path, name, text):
  (tmp_path / name).write_text(text)
  with pytest.raises(ValueError, match=f"{name}:1: expected"):
    list(query_pairs.query_log(tmp_path / name))


AOL = "AnonID\tQuery\tQueryTime\tItemRank\tClickURL\n"


@pytest.mark.parametrize(
  ("header", "count"),
  [
    (AOL, 2),
    ("Query ID\tText\n", 2),
    ("user_id\tquery\ttime\n", 2),
    ("\ufeffTopic\tTitle\n", 2),
    ("user\tboat\n", 3),
    ("query\tquery\n", 3),
    ("", 2),
  ],
)
def test_names_of_columns_are_no_query(tmp_path, header, count):
  """AOL's logs begin with AnonID: 3 of 3 queries leaked for 2 of 2."""
  path = tmp_path / "log.txt"
  rows = ["142\tmeasles\t2006-03-01\t\t", "217\tquery\t\t\t"]
  width = len(header.split("\t")) if header else 5
  rows = ["\t".join(row.split("\t")[:width]) for row in rows]
  path.write_text(header + "\n".join(rows))
  assert len([*query_pairs.query_log(path)]) == count
  pairs = tmp_path / "pairs.tsv"
  lines = path.read_text().splitlines()
  cells = ("\t".join(line.split("\t")[:2]) for line in lines)
  pairs.write_text("\n".join(cells))
  assert len([*query_pairs.verified(pairs)]) == count


@pytest.mark.parametrize("first", ["", "index", "Unnamed: 0"])
@pytest.mark.parametrize("second", ["query", "search_query"])
def test_an_index_that_pandas_wrote_is_a_column_of_ids(first, second, tmp_path):
  """The names of the columns were a query of the log: 13 for 12."""
  path = tmp_path / "log.tsv"
  path.write_text(f"{first}\t{second}\n0\tboat\n1\trope\n")
  assert [*query_pairs.query_log(path)] == [("0", "boat"), ("1", "rope")]
  path.write_text("0\tquery\t\n1\trope\t\n")  # no header: ends in tabs
  assert len([*query_pairs.query_log(path)]) == 2


NO_LOGS = {
  "top1000": "188714\t{i}\tfoods and supplements\tWatch portion sizes\n",
  "triples of ids": "400296\t154078{i}\t3518497\n",
  "triples": "is a little caffeine ok {i}\tWe don't know\tIt is\n",
  "a run": "q{i}\tQ0\td1\t1\t2.5\ttag\n",
  "judgements": "q{i}\t0\td1\t1\n",
  "query and count": "measles outbreaks\t1{i}\n",
  "user, time and query": "u{i}\t2026-03-01 07:17:1{i}\tmeasles\n",
  "pandas' index": "{i}\tq{i}\tmeasles outbreaks\n",
  "time, user and query": "2026-03-0{i}\tuser{i}\tmeasles outbreaks\n",
  "language and query": "{i}\ten\tmeasles outbreaks\n",
  "language and query of another": "{i}\tde\t\u00e4pfel\n",
  "session, query and time": "{i}\ts-{i}a\tmeasles outbreaks\t2026\n",
  "judgements of texts": "{i}\tD15{i}\t1\n",
  "query and address": "measles\thttp://example.org/{i}\n",
}


@pytest.mark.parametrize("lines", [3, 70])
@pytest.mark.parametrize("kind", NO_LOGS)
def test_a_file_whose_second_column_is_no_query_is_refused(
  kind, lines, tmp_path
):
  """The check for leaks compared users and ids, and said "0 of 12"."""
  path = tmp_path / "log.tsv"
  path.write_text("".join(NO_LOGS[kind].format(i=i) for i in range(lines)))
  with pytest.raises(ValueError, match="log.tsv: expected an id and a query"):
    list(query_pairs.query_log(path))


WORDS = {
  "sorted": "{i}\tboat{i}\n{i}\trope{i}\n",
  "clicks": "{i}\tboat\tD1{i}\thttps://example.org/{i}\n",
  "titles of half": "{i}\tboat\tA boat\n{i}\trope boat\tA rope\n",
  "another language": "{i}\t\u8239\u8236\tred boat\n",
  "named": "id\tquery\ttitle\n",
}


@pytest.mark.parametrize("kind", WORDS)
def test_single_words_are_queries(kind, tmp_path):
  path = tmp_path / "log.tsv"
  rows = "{i}\tboat\tA red boat\n" if kind == "named" else WORDS[kind]
  text = "".join(rows.format(i=i) for i in range(70))
  path.write_text((WORDS[kind] if kind == "named" else "") + text)
  number = len(text.splitlines())
  assert len([*query_pairs.query_log(path)]) == number


@pytest.mark.parametrize("first", ["id\tquery\n", "0\trope\n"])
@pytest.mark.parametrize("places", [(0, 1), (1, 0)])
def test_a_query_with_a_tab_is_refused_not_cut(first, places, tmp_path):
  """Of 4 leaked queries with a tab in 3, the check found 1."""
  path = tmp_path / "log.tsv"
  lines = ["1\tmeasles outbreaks\n", "2\torganized\tcrime\n"]
  path.write_text(first + "".join(lines[place] for place in places))
  with pytest.raises(
    ValueError, match="log.tsv:.*a tab inside a query"
  ) as error:
    list(query_pairs.query_log(path))
  assert "crime" not in str(error.value)
  path.write_text("".join(lines[place] for place in places))
  with pytest.raises(ValueError, match="log.tsv:2: .*a tab inside a query"):
    list(query_pairs.query_log(path))


def test_lines_that_end_with_carriage_returns_are_refused(tmp_path):
  """Excel for Mac writes them: all queries were one."""
  path = tmp_path / "log.tsv"
  for header in ("", "id\tquery\r"):
    path.write_bytes(f"{header}1\tboat\r2\tmeasles\r".encode())
    with pytest.raises(ValueError, match="log.tsv:1: .*carriage returns alone"):
      list(query_pairs.query_log(path))
  path.write_bytes(b"1\tboat\r\n2\tmeasles\r\n")
  assert [*query_pairs.query_log(path)] == [("1", "boat"), ("2", "measles")]


@pytest.mark.parametrize("form", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["log.tsv", "log.csv", "log.jsonl"])
def test_a_log_in_utf_16_is_refused_with_and_without_its_mark(
  form, name, tmp_path
):
  """Its zero bytes are sound UTF-8: 0 of 12 queries leaked, without a word."""
  texts = {
    "log.tsv": "1\tmeasles",
    "log.csv": "id,query\n1,measles",
    "log.jsonl": '{"id": "1", "query": "measles"}',
  }
  (tmp_path / name).write_bytes(texts[name].encode(form))
  with pytest.raises(ValueError, match=f"{name}:1: expected UTF-8, got"):
    list(query_pairs.query_log(tmp_path / name))


@pytest.mark.parametrize("text", ["<top>\n", '[{"id": 1}]'])
def test_markup_and_json_under_another_name_say_what_to_do(text, tmp_path):
  path = tmp_path / "topics.txt"
  path.write_text(text)
  with pytest.raises(ValueError, match="got markup or JSON; name JSON lines"):
    list(query_pairs.query_log(path))


@pytest.mark.parametrize(
  "lines", [["1\t911", "2\t747"], ["1\t911", "2\t747", "3\tboat", "4\t1"] * 4]
)
def test_numbers_are_queries_among_others(lines, tmp_path):
  path = tmp_path / "log.tsv"
  path.write_text("\n".join(lines))
  assert len([*query_pairs.query_log(path)]) == len(lines)
  times = "2006-03-01 07:17:1{i}\tboat\n"
  path.write_text("".join(times.format(i=i) for i in range(9)))
  assert len([*query_pairs.query_log(path)]) == 9


def test_a_log_may_be_a_parquet_table(tmp_path):
  path = tmp_path / "log.parquet"
  rows = [{"id": 1, "query": "red apples"}, {"id": 2, "query": "boat"}]
  parquet.write_table(pa.Table.from_pylist(rows), path)
  assert [*query_pairs.query_log(path)] == [("1", "red apples"), ("2", "boat")]


NAMED = {
  "time.tsv": "id\ttimestamp\tquery\nq1\t2026-01-02 10:00:00\tboat\n",
  "language.tsv": "qid\tlang\tquery\nq1\ten\tboat\n",
  "user.tsv": "query_id\tuser_id\tquery\nq1\tu1\tboat\n",
  "first.tsv": "query\tid\nboat\tq1\n",
  "session.tsv": "time\tsession\tquery\n10:00\tq1\tboat\n",
  "comma.csv": 'id,query\nq1,"boat"\n',
  "semicolon.csv": "id;query\nq1;boat\n",
  "tab.csv": "q1\tboat\n",
  "passage.csv": "id,text,question\nq1,A passage,boat\n",
  "squad.jsonl": '{"id": "q1", "text": "A passage", "question": "boat"}\n',
  "other.jsonl": '{"lang": "en", "query_id": "q1", "query": "boat"}\n',
}


@pytest.mark.parametrize("name", NAMED)
def test_named_columns_are_read_wherever_they_stand(name, tmp_path):
  """The leak check compared times and languages, and said "clean"."""
  (tmp_path / name).write_text(NAMED[name])
  assert [*query_pairs.query_log(tmp_path / name)] == [("q1", "boat")]


UNCLEAR = {
  "log.tsv": "query\tdocument\nboat\td1\nrope\td2\n",
  "counts.tsv": "query\tclicks\nboat\t1\nrope\t2\n",
  "log.csv": "query,document\nboat,d1\n",
  "tongue.tsv": "qid\tlang\tutterance\nq1\ten\tboat\n",
  "pairs.jsonl": '{"_id": "1", "query": "boat", "text": "A passage"}\n',
  "log.jsonl": '{"query": "boat", "document": "d1"}\n',
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_columns_that_are_unclear_are_refused(name, tmp_path):
  """Documents' ids were compared in place of queries."""
  (tmp_path / name).write_text(UNCLEAR[name])
  with pytest.raises(ValueError, match=f"{name}:.*expected .*quer") as error:
    list(query_pairs.query_log(tmp_path / name))
  assert "boat" not in str(error.value)


def test_a_folder_in_place_of_a_log_is_refused_in_one_line(tmp_path):
  with pytest.raises(ValueError, match="expected a file, got a folder"):
    list(query_pairs.query_log(tmp_path))


def test_a_variant_without_text_is_refused_in_both_forms(tmp_path):
  for name, text in (
    ("v.tsv", "7\t \n"),
    ("v.jsonl", '{"topic": "7", "variant": " "}'),
  ):
    (tmp_path / name).write_text(text)
    with pytest.raises(
      ValueError, match=f"{name}:1: expected an id and a query"
    ):
      list(query_pairs.variants(tmp_path / name))


def test_a_verified_pair_that_stands_twice_is_one(tmp_path):
  """Two people judged it: the study counted two near-duplicates."""
  path = tmp_path / "pairs.tsv"
  path.write_text("302\tq1\n302\tq2\n302\tq1\n")
  assert [*query_pairs.verified(path)] == [("302", "q1"), ("302", "q2")]


def test_a_log_is_json_by_its_suffix_alone(tmp_path):
  """log.jsonl.csv was read as JSON, and log.json as a table of tabs."""
  lines = {
    "log.jsonl.csv": "id,query\n1,measles\n",
    "log.jsonl.tsv": "1\tmeasles\n",
    "log.json": '{"id": "1", "query": "measles"}\n',
    "log.jsonl.1": '{"id": "1", "query": "measles"}\n',
  }
  for name, text in lines.items():
    path = tmp_path / name
    path.write_text(text)
    assert list(query_pairs.query_log(path)) == [("1", "measles")]
