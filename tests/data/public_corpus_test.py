"""Parts of a corpus: files of lines and of JSON."""

import bz2
import gzip
import json
import lzma

import pyarrow as pa
import pytest
from pyarrow import parquet

from synthq_jax.data import public_corpus


def _read(source):
  return [list(part.texts()) for part in public_corpus.parts(source)]


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


def test_a_part_may_be_a_parquet_table(tmp_path):
  """As FineWeb's are; it was told to be converted by iconv."""
  table = pa.table({"text": ["first", "second"], "url": ["u", "v"]})
  parquet.write_table(table, tmp_path / "000.parquet")
  assert _read(f"{tmp_path}/*") == [["first", "second"]]
  parquet.write_table(table.select(["url"]), tmp_path / "000.parquet")
  with pytest.raises(ValueError, match="000.parquet:1: .* under .text"):
    _read(f"{tmp_path}/*")


def test_a_part_is_known_by_its_file(tmp_path):
  path = tmp_path / "a.txt"
  path.write_text("one")
  (part,) = public_corpus.parts(str(path))
  before = part.identity
  assert before == public_corpus.parts(str(path))[0].identity
  path.write_text("other")
  assert public_corpus.parts(str(path))[0].identity != before


def test_a_line_without_a_text_is_named(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_text(_json("fine") + '\n{"txt": "oops"}')
  with pytest.raises(ValueError, match="a.jsonl:2: .* under .text"):
    _read(str(path))


def test_a_glob_without_files_is_refused(tmp_path):
  with pytest.raises(ValueError, match="got none for .*in quotes"):
    public_corpus.parts(f"{tmp_path}/*.json.gz")
