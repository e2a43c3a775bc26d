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
  "title": "b",
  "variant": "c",
  "title_label": ["Generalization"],
  "variant_label": [],
  "other_label": ["Different Topic"],
  "cosine": 1,
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
    title="b",
    variant="c",
    title_relations=("generalisation",),
    variant_relations=(),
    different_topic=True,
    cosine=1.0,
  )


@pytest.mark.parametrize(
  ("key", "value", "said"),
  [
    ("query", None, 'string under "query", got None'),
    ("cosine", "high", "number under .cosine., got str"),
    ("cosine", float("nan"), "finite"),
    ("title_label", ["Synonym"], "got another one; "),
    ("title_label", [{"Identical": 1}], "got another one; "),
    ("title_label", "Identical", "expected a list"),
    ("other_label", ["Identical"], "Different Topic"),
  ],
)
def test_a_wrong_pair_is_refused_with_its_line(tmp_path, key, value, said):
  path = written(tmp_path, PAIR, {**PAIR, key: value})
  with pytest.raises(ValueError, match=f"file.jsonl:2: .*{said}"):
    query_pairs.labelled_pairs(path)


def test_topics_keep_their_collection(tmp_path):
  line = {"collection": "x", "topic": 301, "title": "t", "description": "d"}
  other = {**line, "collection": "y"}
  path = written(tmp_path, line, other)
  assert [t.collection for t in query_pairs.topics(path)] == ["x", "y"]
  with pytest.raises(ValueError, match="file.jsonl:3: .*301 of x again"):
    query_pairs.topics(written(tmp_path, line, other, line))


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
  path.write_text(f"{header}142\tmeasles\t2006-03-01\t\t\n217\tquery\t\t\t\n")
  assert len([*query_pairs.query_log(path)]) == count
  pairs = tmp_path / "pairs.tsv"
  lines = path.read_text().splitlines()
  cells = ("\t".join(line.split("\t")[:2]) for line in lines)
  pairs.write_text("\n".join(cells))
  assert len([*query_pairs.verified(pairs)]) == count


NO_LOGS = {
  "top1000": "188714\t{i}\tfoods and supplements\tWatch portion sizes\n",
  "triples of ids": "400296\t154078{i}\t3518497\n",
  "triples": "is a little caffeine ok {i}\tWe don't know\tIt is\n",
  "a run": "q{i}\tQ0\td1\t1\t2.5\ttag\n",
  "judgements": "q{i}\t0\td1\t1\n",
  "query and count": "measles outbreaks\t1{i}\n",
  "user, time and query": "u{i}\t2026-03-01 07:17:1{i}\tmeasles\n",
}


@pytest.mark.parametrize("lines", [3, 8, 9])
@pytest.mark.parametrize("kind", NO_LOGS)
def test_a_file_whose_second_column_is_no_query_is_refused(
  kind, lines, tmp_path
):
  """The check for leaks compared the numbers, and said "clean"."""
  path = tmp_path / "log.tsv"
  path.write_text("".join(NO_LOGS[kind].format(i=i) for i in range(lines)))
  with pytest.raises(ValueError, match="log.tsv: expected an id and a query"):
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
