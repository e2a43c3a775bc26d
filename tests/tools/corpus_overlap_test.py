"""`synthq corpus_overlap` on a small working directory."""

import bz2
import gzip
import json
import lzma
import types

import pyarrow as pa
import pytest
import small_data
from pyarrow import parquet

from synthq_jax.audit import corpus_overlap as overlap_lib
from synthq_jax.cli import main
from synthq_jax.runtime import results
from synthq_jax.storage import artifacts
from synthq_jax.tools import corpus_overlap

_QUERIES = ["what is a red apple", "who ate all the pears", "zanzibar"]
_DOCUMENTS = [("Apples", "they are red and round"), ("", "nothing known here")]
_CORPUS = {
  "a.txt": ["Once: what is a red apple?"],
  "b.txt": ["Apples: they are red and round."],
  "c.txt": ["who ate all", "the pears"],
}


@pytest.fixture(name="place")
def _place(tmp_path, monkeypatch):
  """Returns a folder with a run and a corpus of three parts."""
  prepared = types.SimpleNamespace(
    directory="prepare_data", private_directory="private/prepare_data"
  )
  load = artifacts.load

  def fake(directory, kind):
    if kind is results.PreparedData and directory.is_dir():
      return prepared
    return load(directory, kind)

  monkeypatch.setattr(artifacts, "load", fake)
  monkeypatch.setattr(
    artifacts, "read_fingerprint", lambda place: "" if place.is_dir() else None
  )
  write = small_data.write_lines
  queries = [{"_id": str(i), "text": t} for i, t in enumerate(_QUERIES)]
  documents = [
    {"_id": str(i), "title": title, "text": text}
    for i, (title, text) in enumerate(_DOCUMENTS)
  ]
  run = tmp_path / "run"
  folder = run / "private/prepare_data"
  write(folder / "queries.jsonl", map(json.dumps, queries))
  write(run / "prepare_data/corpus.jsonl", map(json.dumps, documents))
  for name, texts in _CORPUS.items():
    write(tmp_path / "corpus" / name, texts)
  return tmp_path


def _argv(place, *flags):
  return [
    "corpus_overlap",
    f"--corpus={place}/corpus/*.txt",
    f"--workdir={place}/run",
    "--quiet",
    *flags,
  ]


def _result(place):
  folder = place / "run/private/corpus_overlap"
  return artifacts.load(folder, overlap_lib.Overlap)


def test_queries_and_documents_are_looked_for(place, capsys):
  assert main.main(_argv(place)) == 0
  printed = capsys.readouterr().out
  assert printed.startswith("PRIVATE: ")
  assert (
    "4 texts, 17 words; mean and standard deviation of 5 samples" in printed
  )
  table = [line.split("  ") for line in printed.splitlines() if "+-" in line]
  cells = [[cell.strip() for cell in row if cell.strip()] for row in table]
  third, half = "33.333 +- 0.000", "50.000 +- 0.000"
  assert cells == [
    ["queries", "3", "3", third, "100.000 +- 0.000"],
    ["documents", "2", "2", half, "100.000 +- 0.000"],
  ]
  found = _result(place)
  assert found.kinds["queries"].exact.mean == pytest.approx(1 / 3)
  assert found.config == overlap_lib.Config()


def test_everything_lies_in_the_private_folder(place, capsys):
  main.main(_argv(place))
  capsys.readouterr()
  made = [p for p in (place / "run").rglob("*") if "corpus_overlap" in p.parts]
  assert made and all("private" in path.parts for path in made)


@pytest.mark.parametrize(
  "flags, words",
  [
    (["--corpus=/none/*.gz"], "expected files of a corpus, got none"),
    (["--workdir=/none"], "run `synthq prepare_data` first"),
  ],
)
def test_what_the_user_can_mend_is_one_line(place, capsys, flags, words):
  assert main.main(_argv(place, *flags)) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert words in line


def test_a_corpus_without_texts_is_refused_and_gives_no_result(place, capsys):
  artifacts.write_atomically(place / "empty/a.txt", "\n\n")
  assert main.main(_argv(place, f"--corpus={place}/empty/*")) == 2
  assert "expected texts, got none in 1 parts: check" in capsys.readouterr().err
  assert not list(place.rglob("result.json"))


def _read(source):
  return [
    [*corpus_overlap.read_texts(x)] for x in corpus_overlap.find_files(source)
  ]


def _json(*texts):
  return "\n".join(json.dumps({"text": text, "url": "u"}) for text in texts)


def test_a_glob_gives_its_files_in_order(tmp_path):
  (tmp_path / "b.txt").write_text("one text\n\nanother\n")
  (tmp_path / "a.jsonl").write_text(_json("first", "second\nline"))
  packed = gzip.compress(_json("packed").encode())
  (tmp_path / "c4-train.00000-of-01024.json.gz").write_bytes(packed)
  (tmp_path / "folder.txt").mkdir()
  assert _read(f"{tmp_path}/*") == [
    ["first", "second\nline"],
    ["one text", "another"],
    ["packed"],
  ]


@pytest.mark.parametrize(
  ("suffix", "pack"),
  [
    ("bz2", bz2.compress),
    ("xz", lzma.compress),
    ("zst", lambda data: pa.compress(data, codec="zstd", asbytes=True)),
  ],
)
def test_a_part_may_be_compressed_as_the_pile_and_wikipedia_are(
  suffix, pack, tmp_path
):
  (tmp_path / f"00.jsonl.{suffix}").write_bytes(pack(_json("packed").encode()))
  (tmp_path / f"01.txt.{suffix}").write_bytes(pack(b"one text"))
  assert _read(f"{tmp_path}/*") == [["packed"], ["one text"]]


@pytest.mark.parametrize("name", ["a.ndjson", "a.ndjson.gz", "a.json"])
def test_json_lines_are_texts_whatever_their_name(tmp_path, name):
  """Escapes of raw lines hid texts: "caf\\u00e9", and "two\\nlines"."""
  texts = ["a caf\u00e9", "two\nlines"]
  small_data.write_lines(
    tmp_path / "a", (json.dumps({"text": text}) for text in texts)
  )
  (tmp_path / "a").rename(tmp_path / name)
  assert [*corpus_overlap.read_texts(str(tmp_path / name))] == texts


def test_a_part_may_be_a_parquet_table(tmp_path):
  """As FineWeb's are; it was told to be converted by iconv."""
  table = pa.table({"text": ["first", "second"], "url": ["u", "v"]})
  parquet.write_table(table, tmp_path / "000.parquet")
  assert _read(f"{tmp_path}/*") == [["first", "second"]]
  parquet.write_table(table.select(["url"]), tmp_path / "000.parquet")
  with pytest.raises(ValueError, match="000.parquet:1: .* under .text"):
    _read(f"{tmp_path}/*")


def test_a_line_without_a_text_is_named(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_text(_json("fine") + '\n{"txt": "oops"}')
  with pytest.raises(ValueError, match="a.jsonl:2: .* under .text"):
    _read(str(path))


def test_a_glob_without_files_is_refused(tmp_path):
  with pytest.raises(ValueError, match="got none for .*in quotes"):
    corpus_overlap.find_files(f"{tmp_path}/*.json.gz")
