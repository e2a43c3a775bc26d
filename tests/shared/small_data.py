"""Small collections for tests, in the formats that synthq reads."""

import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

TOPICS = "otter violin glacier saffron turbine lagoon compass beetle".split()
PLACES = "harbor museum forest station bridge castle market valley".split()


def document(number: int) -> str:
  """A text that a topic, a place and its number tell from all others."""
  topic, place = TOPICS[number % 8], PLACES[number // 8 % 8]
  return (
    f"Report {number} is about the {topic} of the {place}. It was written by"
    f" somebody who studied it for {number} years. Winters there are long, and"
    f" the {topic} sleeps under the {place}."
  )


def query(number: int) -> str:
  return f"who wrote report {number} on the {TOPICS[number % 8]}"


def write_lines(path: pathlib.Path, lines: Iterable[str]) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(f"{line}\n" for line in lines))


def write_pairs(path: pathlib.Path, count: int) -> str:
  """Writes a log of as many queries, each with a document; returns its SOURCE."""
  pairs = [{"query": query(i), "document": document(i)} for i in range(count)]
  write_lines(path, map(json.dumps, pairs))
  return f"jsonl:{path}"


def write_user_log(
  folder: pathlib.Path, asked: Iterable[tuple[str, str, int]], count: int
) -> str:
  """Writes a log of who asked what, beside a corpus; returns its SOURCE.

  Args:
    folder: to write to.
    asked: user, query and number of the document that answers it.
    count: documents.
  """
  corpus = [{"_id": f"d{i}", "text": document(i)} for i in range(count)]
  write_lines(folder / "corpus.jsonl", map(json.dumps, corpus))
  rows = [
    {"query": text, "user": who, "document": f"d{d}"} for who, text, d in asked
  ]
  write_lines(folder / "log.jsonl", map(json.dumps, rows))
  return f"log:{folder / 'log.jsonl'}@{folder / 'corpus.jsonl'}"


def write_beir(
  folder: pathlib.Path,
  documents: Mapping[str, str],
  queries: Mapping[str, str],
  judged: Mapping[str, Iterable[tuple[str, str, int]]],
) -> str:
  """Writes a BEIR folder; returns its SOURCE.

  Args:
    folder: to write to.
    documents: texts by id.
    queries: texts by id.
    judged: by split: query, document and grade.
  """
  for name, texts in (("corpus", documents), ("queries", queries)):
    rows: list[dict[str, Any]] = [
      {"_id": id_, "text": text} for id_, text in texts.items()
    ]
    write_lines(folder / f"{name}.jsonl", map(json.dumps, rows))
  for split, rows in judged.items():
    lines = ("\t".join(map(str, row)) for row in rows)
    header = "query-id\tcorpus-id\tscore"
    write_lines(folder / "qrels" / f"{split}.tsv", [header, *lines])
  return f"beir:{folder}"


def write_split_beir(folder: pathlib.Path, *, train: int, test: int) -> str:
  """Writes a BEIR folder of pairs, the first of which are the train split."""
  numbers = range(train + test)
  rows = [(f"q{i}", f"d{i}", 1) for i in numbers]
  return write_beir(
    folder,
    {f"d{i}": document(i) for i in numbers},
    {f"q{i}": query(i) for i in numbers},
    {"train": rows[:train], "test": rows[train:]},
  )


def write_msmarco(folder: pathlib.Path, data: Any) -> None:
  """Writes the three kinds of tables of MS MARCO.

  Args:
    folder: to write to.
    data: a `collection.Collection`.
  """
  texts = data.query_by_id()
  tables = {"collection": [(d.id, d.contents) for d in data.documents]}
  for split, judged in data.qrels.items():
    tables[f"queries.{split}"] = [
      (query, texts[query].text) for query in judged
    ]
    tables[f"qrels.{split}"] = [
      (query, 0, document, grade)
      for query, grades in judged.items()
      for document, grade in grades.items()
    ]
  for name, rows in tables.items():
    lines = ("\t".join(map(str, row)) for row in rows)
    write_lines(folder / f"{name}.tsv", lines)
