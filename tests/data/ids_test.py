"""One rule for ids: the same person, query or document whatever a file writes."""

import csv
import decimal
import json
import random

import numpy as np
import pytest

from synthq_jax.data import beir, collection, ids, msmarco, query_pairs, sources
from synthq_jax.data import splits as splits_lib
from synthq_jax.retrieval import trec


@pytest.mark.parametrize(
  ("value", "name"),
  [
    (17, "17"),
    (17.0, "17"),
    ("17.0", "17"),
    ("17.00", "17"),
    ("17.0000", "17"),
    (np.int64(17), "17"),
    (np.float32(17), "17"),
    (decimal.Decimal("17.00"), "17"),
    (-3.0, "-3"),
    (" 17\t", "17"),
    ("017", "017"),
    ("1.10", "1.10"),  # a version, and no whole number
    ("1e5", "1e5"),  # part of a digest
    ("1.2345678E7", "12345678"),  # of Spark
    ("1.0e7", "10000000"),  # of polars
    ("1.25E1", "1.25E1"),  # no whole number, so a text
    ("Ann", "Ann"),
    ("cafe\u0301", "caf\u00e9"),
    ("\ufeffan\u00adn\u200b", "ann"),
    ("a\u200db", "ab"),
    ("\u200b", ""),
    ("", ""),
    (None, ""),
    (float("nan"), ""),
    (2**60 + 1, str(2**60 + 1)),
    ("1152921504606846977", "1152921504606846977"),
  ],
)
def test_an_id_is_read_by_the_rule(value, name):
  assert ids.read(value, "user") == name
  assert ids.read(name, "user") == name


@pytest.mark.parametrize(
  ("value", "message"),
  [
    (1.5, "whole number"),
    (float("inf"), "whole number"),
    (True, "got a bool"),
    (np.bool_(True), "got a"),
    (["a"], "got a list"),
    (b"a", "got a bytes"),
    (1.152921504606847e18, "all its digits"),
    ("1.152921504606847e+18", "all its digits"),
    ("9007199254740993.0", "all its digits"),
    ("1e+18", "all its digits"),
    ("1.152921504606847E18", "all its digits"),
    ("17.000", "may stand for thousands"),  # of a German spreadsheet
  ],
)
def test_what_is_no_id_is_refused_in_one_line_without_it(value, message):
  with pytest.raises(ValueError, match=f"^log:3: .*{message}") as error:
    ids.read(value, "user", "log:3")
  assert "\n" not in str(error.value) and "1152" not in str(error.value)


def test_torn_ids_are_counted():
  assert ids.count_torn(["17", "017", "Ann", "ann", "\uff41nn", "b", "0"]) == 5
  assert ids.count_torn(["17", "u017", "u17", "", "0", "ab", "b"]) == 0


def write_log(path, rows):
  with path.open("w", newline="") as stream:
    writer = csv.writer(stream)
    writer.writerow(["user", "query", "document"])
    writer.writerows(rows)


def two_days(tmp_path):
  """A corpus, and the rows of two days of 120 clicks."""
  draw = random.Random(0)
  lines = [
    {"_id": str(200 + i), "text": f"document {i} about thing{i}"}
    for i in range(60)
  ]
  corpus = tmp_path / "corpus.jsonl"
  corpus.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
  (tmp_path / "log").mkdir()
  return corpus, [
    [
      (draw.randint(1, 9), f"thing {word} {k}", 200 + draw.randint(0, 59))
      for k in range(120)
    ]
    for word in ("question", "other")
  ]


def test_days_with_a_missing_value_hold_the_same_users_and_documents(
  tmp_path, capsys
):
  corpus, (first, second) = two_days(tmp_path)
  write_log(tmp_path / "log/day1.csv", first)
  floats = [(f"{user:.1f}", query, f"{doc:.1f}") for user, query, doc in second]
  write_log(tmp_path / "log/day2.csv", [*floats, ("", "no click", "")])
  source = sources.open(f"log:{tmp_path}/log@{corpus}", divide=False)
  data = source.read()
  said = capsys.readouterr().err.splitlines()
  assert len(data.queries) == 240 and source.left_out == {"document": 1}
  assert {query.client for query in data.queries} == set("123456789")
  assert len(said) == 3
  assert "unknown document ids: 1;" in said[0]
  assert "120 document ids written as decimals (17.0)" in said[1]
  assert "120 user ids written as decimals (17.0)" in said[2]
  kept = splits_lib.by_user(data, most=4, secret="s")
  user_of = {query.id: query.client for query in kept.queries}
  counts, sides = {}, {}
  for side, judged in kept.qrels.items():
    for query in judged:
      counts[user_of[query]] = counts.get(user_of[query], 0) + 1
      sides.setdefault(user_of[query], set()).add(side)
  assert max(counts.values()) == 4
  assert all(len(each) == 1 for each in sides.values())


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_floats_of_other_tables_are_the_integers_too(tmp_path, kind):
  corpus, (first, _) = two_days(tmp_path)
  rows = [
    {"user": float(u), "query": q, "document": float(d)} for u, q, d in first
  ]
  rows.append({"user": None, "query": "no click", "document": None})
  path = tmp_path / f"log.{kind}"
  if kind == "parquet":
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
  else:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  source = sources.open(f"log:{path}@{corpus}", divide=False)
  data = source.read()
  assert len(data.queries) == 120 and source.left_out == {"document": 1}
  assert {query.client for query in data.queries} == set("123456789")


@pytest.mark.parametrize("word", ["nan", "NULL"])
def test_a_word_for_no_user_is_no_user(word):
  """One person more among those who share it would move others' queries."""
  queries = tuple(
    collection.Query(f"q{i}", f"text {i}", f"u{i}" if i % 3 else word)
    for i in range(30)
  )
  data = collection.Collection(
    (collection.Document("d", "text"),),
    queries,
    {"train": {query.id: {"d": 1} for query in queries}},
  )
  with pytest.raises(ValueError, match="a word for a missing id, such as NULL"):
    splits_lib.by_user(data, most=2, secret="0")


@pytest.mark.parametrize(("first", "second"), [("17", "017"), ("Ann", "ann")])
def test_a_claim_for_users_with_torn_ids_is_refused(
  tmp_path, capsys, first, second
):
  corpus, (rows, _) = two_days(tmp_path)
  rows = [(first, *rows[0][1:]), (second, *rows[1][1:]), *rows[2:]]
  write_log(tmp_path / "log/day1.csv", rows)
  data = sources.open(f"log:{tmp_path}/log@{corpus}", divide=False).read()
  assert "2 user ids differ from another" in capsys.readouterr().err
  with pytest.raises(ValueError, match="each user under one id") as error:
    splits_lib.by_user(data, most=4, secret="s")
  assert first not in str(error.value).replace("as 17 and 017", "")


@pytest.mark.parametrize("second", ["a ", "\ufeffa", "a\u00ad"])
def test_space_and_invisible_characters_make_no_second_user(
  tmp_path, capsys, second
):
  corpus, (rows, _) = two_days(tmp_path)
  rows = [(("a", second)[k % 2], *row[1:]) for k, row in enumerate(rows)]
  write_log(tmp_path / "log/day1.csv", rows)
  data = sources.open(f"log:{tmp_path}/log@{corpus}", divide=False).read()
  assert {query.client for query in data.queries} == {"a"}
  assert "60 user ids had" in capsys.readouterr().err.replace("held", "had")
  assert len(splits_lib.by_user(data, most=4, secret="s").queries) == 4


def test_users_of_a_collection_made_in_code_are_read_by_the_rule():
  queries = tuple(
    collection.Query(f"q{k}", f"word{k}", client)
    for k, client in enumerate(["7", "7.0", " 7", "7\u200b"])
  )
  data = collection.Collection(
    (collection.Document("d", "x"),),
    queries,
    {"train": {query.id: {"d": 1} for query in queries}},
  )
  kept = splits_lib.by_user(data, most=2, secret="s")
  assert [query.client for query in kept.queries] == ["7", "7"]


@pytest.mark.parametrize("name", ["\u200b", "a\u00adb"])
def test_no_id_of_a_collection_holds_what_nobody_sees(name):
  with pytest.raises(ValueError, match="invisible characters"):
    collection.check_id("document", name)


def test_unknown_ids_in_another_form_are_told(tmp_path, capsys):
  corpus = tmp_path / "corpus.jsonl"
  corpus.write_text(
    "".join(f'{{"_id": "00{k}", "text": "text {k}"}}\n' for k in range(40))
  )
  rows = [("u", f"word{k}", k) for k in range(40)] + [("u", "w", "0039")]
  write_log(tmp_path / "log.csv", rows + [("u", "good", "000")])
  source = sources.open(f"log:{tmp_path}/log.csv@{corpus}", divide=False)
  assert {query.text for query in source.read().queries} == {"w", "good"}
  said = capsys.readouterr().err
  assert "unknown document ids: 40;" in said
  assert "40 document ids are unknown as written, but known with other" in said


def test_a_beir_folder_reads_ids_of_all_its_files_alike(tmp_path):
  (tmp_path / "qrels").mkdir()
  (tmp_path / "corpus.jsonl").write_text(
    '{"_id": 1, "text": "one"}\n{"_id": 2.0, "text": "two"}\n'
    '{"_id": "\\ufeff3", "text": "three"}\n'
  )
  (tmp_path / "queries.jsonl").write_text(
    '{"_id": "7.0", "text": "x", "client": 5}\n'
    '{"_id": 8, "text": "y", "metadata": {"user_id": 5.0}}\n'
  )
  (tmp_path / "qrels/test.tsv").write_text(
    "query-id\tcorpus-id\tscore\n7\t1.0\t1\n8.0\t2\t1\n8\t3\u200b\t1\n"
  )
  data = beir.read_beir(tmp_path)
  assert data.qrels == {"test": {"7": {"1": 1}, "8": {"2": 1, "3": 1}}}
  assert [query.client for query in data.queries] == ["5", "5"]


def test_trec_and_ms_marco_files_read_ids_alike(tmp_path):
  (tmp_path / "collection.tsv").write_text("1.0\tone\n2\ttwo\n")
  (tmp_path / "queries.dev.tsv").write_text("7\u200b\tx\n")
  (tmp_path / "qrels.dev.tsv").write_text("7.0\t0\t1\t1\n")
  data = msmarco.read_msmarco(tmp_path)
  assert data.qrels == {"dev": {"7": {"1": 1}}}
  run = tmp_path / "run.trec"
  run.write_text("7.0 Q0 1.0 1 2.5 x\n7 Q0 2\u200b 2 2.0 x\n")
  assert trec.read_run(run) == {"7": {"1": 2.5, "2": 2.0}}


def test_the_leak_check_reads_ids_alike(tmp_path):
  table, lines = tmp_path / "log.tsv", tmp_path / "log.jsonl"
  table.write_text("17.0\tx\n\ufeff18\u200b\ty\n 19\tz\n".replace("\ufeff", ""))
  lines.write_text('{"id": 17.0, "text": "x"}\n{"id": 18, "text": "y"}\n')
  assert [name for name, _ in query_pairs.query_log(table)] == [
    "17",
    "18",
    "19",
  ]
  assert [name for name, _ in query_pairs.query_log(lines)] == ["17", "18"]


def test_an_id_with_a_plus_sign_or_an_e_is_a_text():
  for name in ("a+b", "+17", "1e18", "5e3", "c++", "e+10"):
    assert ids.read(name, "query") == name
