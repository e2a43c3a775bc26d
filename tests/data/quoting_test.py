"""Quotation marks of tab-separated tables: of cells, or of texts."""

import csv
import random
import sys

import pytest

from synthq_jax.data import jsonl, query_pairs, quoting, sources, table_files
from synthq_jax.stages import prepare_data

TEXTS = [
  'Aaron ( or ; "Aharon") is a prophet',
  '"exact phrase" search',
  '"exact phrase"',
  "plain",
  "with\ta tab",
  "with\na line break",
  'both\n"of them"',
]


def write(path, rows, **options):
  with path.open("w", newline="", encoding="utf-8") as stream:
    csv.writer(stream, delimiter="\t", **options).writerows(rows)
  return path


@pytest.mark.parametrize(
  "quoting_", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]
)
@pytest.mark.parametrize("number", [2, 3, len(TEXTS)])
def test_a_table_of_csv_writer_gives_its_cells_back(tmp_path, quoting_, number):
  rows = [[k, text, "train"] for k, text in enumerate(TEXTS[:number])]
  header = ["id", "text", "split"]
  path = write(tmp_path / "t.tsv", [header, *rows], quoting=quoting_)
  read = [row["text"] for _, row in table_files.rows(path)]
  assert read == TEXTS[:number]


def test_a_table_of_pandas_gives_its_cells_back(tmp_path):
  pandas = pytest.importorskip("pandas")
  frame = pandas.DataFrame({"id": range(len(TEXTS)), "text": TEXTS})
  frame.to_csv(tmp_path / "t.tsv", sep="\t", index=False)
  read = [row["text"] for _, row in table_files.rows(tmp_path / "t.tsv")]
  assert read == TEXTS


def test_passages_of_dpr_lose_their_marks(tmp_path):
  path = tmp_path / "psgs_w100.tsv"
  path.write_text(
    "id\ttext\ttitle\n"
    '1\t"Aaron Aaron ( or ; ""Aharon"") is a prophet"\tAaron\n'
    '2\t"God at Sinai granted Aaron the priesthood"\tAaron\n'
    '3\tA third passage\t"A title with ""marks"""\n'
  )
  rows = [row for _, row in table_files.rows(path)]
  assert [row["text"] for row in rows] == [
    'Aaron Aaron ( or ; "Aharon") is a prophet',
    "God at Sinai granted Aaron the priesthood",
    "A third passage",
  ]
  assert rows[2]["title"] == 'A title with "marks"'


RAW = [
  'what is "ms marco',
  '"unbalanced',
  '"exact phrase" search',
  'ends with"',
  '"exact phrase"',
  '5" pipe',
  '"',
]


def test_marks_of_a_raw_table_stay(tmp_path):
  path = tmp_path / "log.tsv"
  lines = [f"{text}\t{k}\ttrain\n" for k, text in enumerate(RAW)]
  path.write_text("query\tdocument\tsplit\n" + "".join(lines))
  assert [row["query"] for _, row in table_files.rows(path)] == RAW
  bare = tmp_path / "queries.tsv"
  bare.write_text("".join(f"{k}\t{text}\n" for k, text in enumerate(RAW)))
  assert [text for _, text in query_pairs.query_log(bare)] == RAW


def test_the_leak_check_reads_quoted_cells(tmp_path):
  texts = [text for text in TEXTS if "\t" not in text]
  path = write(tmp_path / "log.tsv", enumerate(texts))
  assert [text for _, text in query_pairs.query_log(path)] == texts


def test_a_table_that_could_be_either_is_refused_until_it_is_said(tmp_path):
  path = tmp_path / "log.tsv"
  path.write_text('query\tdocument\n"exact phrase"\td1\nother\td1\n')
  with pytest.raises(ValueError, match="quotes='csv' or 'text'") as error:
    list(table_files.rows(path))
  assert "\n" not in str(error.value) and "phrase" not in str(error.value)
  for quotes, text in (("text", '"exact phrase"'), ("csv", "exact phrase")):
    [(_, first), _] = table_files.rows(path, quotes)
    assert first["query"] == text
  bare = tmp_path / "bare.tsv"
  bare.write_text('1\t"exact phrase"\n2\tother\n')
  assert next(query_pairs.query_log(bare)) == ("1", '"exact phrase"')


def test_a_table_of_two_writers_is_refused(tmp_path):
  path = write(tmp_path / "log.tsv", [["query", "document"], ['a "b"', "d1"]])
  with path.open("a") as stream:
    stream.write('raw "marks\td1\n')
  with pytest.raises(ValueError, match="could be either"):
    list(table_files.rows(path))


@pytest.mark.parametrize("seed", range(20))
def test_a_row_more_or_less_never_changes_how_others_are_read(tmp_path, seed):
  """Random tables of cells of all kinds: of two neighbours, none or equal."""
  draw = random.Random(seed)
  kinds = ["x", '"x"', '"a ""b"""', '"open', 'in "side', '""', "y"]
  for number in range(40):
    rows = [
      f"{draw.choice(kinds)}\t{draw.choice(kinds)}\n"
      for _ in range(draw.randint(1, 25))
    ]
    modes = []
    for each in (rows, rows[:-1]):
      path = tmp_path / f"{number}_{len(each)}.tsv"
      path.write_text("a\tb\n" + "".join(each))
      try:
        modes.append(quoting.is_quoted(path))
      except ValueError:
        continue
    has_marks = any('"' in row for row in rows[:-1])
    assert len({*modes}) < 2 or not has_marks


def test_the_table_is_looked_at_line_by_line(tmp_path):
  """Ten megabytes of one cell open at each line: time and memory stay small."""
  path = tmp_path / "log.tsv"
  path.write_text("a\tb\n" + '"open\tx\n' * 300_000 + '"a\n' * 2)
  assert not quoting.is_quoted(path)
  assert quoting._count_cells.cache_info().maxsize < sys.maxsize


def test_the_setting_reaches_log_and_corpus(tmp_path):
  corpus = tmp_path / "corpus.tsv"
  corpus.write_text('id\ttext\nd1\t"one text"\n')
  log = tmp_path / "log.tsv"
  log.write_text('user\tquery\tdocument\nu1\t"exact phrase"\td1\n')
  for quotes, mark in (("text", '"'), ("csv", "")):
    config = prepare_data.Config(
      source=f"log:{log}@{corpus}", quotes=quotes, unit="user"
    )
    data = prepare_data._source(config).read()
    assert data.queries[0].text == f"{mark}exact phrase{mark}"
    assert [d.text for d in data.documents] == [f"{mark}one text{mark}"]
  with pytest.raises(ValueError, match="quotes"):
    prepare_data.Config(quotes="maybe")
  with pytest.raises(ValueError, match="quotes='x'"):
    jsonl.Fields(quotes="x")


def test_ms_marco_keeps_its_marks(tmp_path):
  (tmp_path / "collection.tsv").write_text('1\t"a ""b"""\n')
  (tmp_path / "queries.dev.tsv").write_text('7\t"a ""b"""\n')
  (tmp_path / "qrels.dev.tsv").write_text("7 0 1 1\n")
  source = sources.open(f"msmarco:{tmp_path}")
  assert [text for _, text in source.queries()] == ['"a ""b"""']
  assert source.read().queries[0].text == '"a ""b"""'
