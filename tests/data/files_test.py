import bz2
import collections
import gzip
import io
import lzma
import sys
import tarfile
import tracemalloc
import zipfile

import pyarrow as pa
import pytest
from pyarrow import parquet

from synthq_jax.data import files, query_pairs, table_files


def write(path, content: bytes, zipped: bool = False):
  path.write_bytes(gzip.compress(content) if zipped else content)
  return path


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path):
  path = write(tmp_path / "a", b"\xef\xbb\xbfone\ntwo")
  assert [text for _, text in files.lines(path)] == ["one", "two"]


def test_a_byte_order_mark_further_down_is_named(tmp_path):
  path = write(tmp_path / "a", b"\xef\xbb\xbfone\n\xef\xbb\xbftwo\n")
  with pytest.raises(ValueError, match="a:2: expected a byte order mark at"):
    list(files.lines(path))
  twice = write(tmp_path / "b", b"\xef\xbb\xbf\xef\xbb\xbfone\n")
  with pytest.raises(ValueError, match="b:1: expected a byte order mark at"):
    list(files.lines(twice))


def test_a_damaged_gzip_file_is_named_and_not_shown(tmp_path):
  """Python says the two bytes that it found where a part should begin."""
  path = tmp_path / "a.gz"
  path.write_bytes(gzip.compress(b"line\n") + b"transcript")
  with pytest.raises(ValueError, match=r"sound gzip, .*\(BadGzipFile\)") as got:
    list(files.lines(path))
  assert "tr'" not in str(got.value)


def test_find_takes_the_plain_or_the_gzipped_file_but_not_both(tmp_path):
  with pytest.raises(
    ValueError, match="a file c or c.gz, got an empty directory"
  ):
    files.find(tmp_path, "c")
  zipped = write(tmp_path / "c.gz", b"", zipped=True)
  assert files.find(tmp_path, "c") == zipped
  write(tmp_path / "c", b"")
  with pytest.raises(ValueError, match="got both"):
    files.find(tmp_path, "c")


def test_half_of_a_character_is_named(tmp_path):
  path = tmp_path / "cut.jsonl"
  path.write_text('{"text": "whole \\ud83d\\ude00"}\n{"text": "cut \\ud83d"}\n')
  rows = files.json_lines(path)
  assert next(rows)[1]["text"] == "whole \U0001f600"
  with pytest.raises(ValueError, match=r"cut.jsonl:2: expected whole char"):
    next(rows)


@pytest.mark.parametrize("name", ["log.jsonl", "quoted.csv"])
def test_a_little_gzip_that_holds_one_huge_line_is_refused(tmp_path, name):
  huge = b"0" * (1 << 27)
  if name.startswith("quoted"):
    huge = b'query,document\n"' + (b"0" * 65_535 + b"\n") * (1 << 11)
  path = tmp_path / name
  path.write_bytes(gzip.compress(huge, 1))
  assert path.stat().st_size < 1 << 20
  tracemalloc.start()
  try:
    with pytest.raises(ValueError, match=name) as error:
      read = files.json_lines if name == "log.jsonl" else table_files.rows
      collections.deque(read(path), 0)
    assert tracemalloc.get_traced_memory()[1] < 600 << 20
  finally:
    tracemalloc.stop()
  assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
  "line",
  [
    '{"query": "boats", "query": "cars"}',
    '{"query": "boats", "metadata": {"user_id": 1, "user_id": 2}}',
  ],
)
def test_a_key_that_is_there_twice_is_refused(tmp_path, line):
  """Python takes the last in silence."""
  path = write(tmp_path / "a.jsonl", f'{{"query": "x"}}\n{line}\n'.encode())
  with pytest.raises(ValueError, match=r"a\.jsonl:2: expected each key once"):
    list(files.json_lines(path))


@pytest.mark.parametrize(
  "text", ['[{"a": 1}]', '[\n{"a": 1}\n]', '{\n"a": 1\n}']
)
def test_json_that_is_not_a_line_an_object_says_what_writes_it_so(
  tmp_path, text
):
  path = write(tmp_path / "a.json", text.encode())
  with pytest.raises(ValueError, match="jq -c"):
    list(files.json_lines(path))


def test_carriage_returns_as_line_ends_are_named(tmp_path):
  path = write(tmp_path / "a.tsv", b"q1\td1\t1\rq2\td2\t1\r")
  with pytest.raises(ValueError, match=r"got a carriage return .*\(tr "):
    list(files.table(path, columns=3))


TEXT = b"1\tmeasles\n2\tboat trips\n" * 3000


def zstd(data):
  return pa.compress(data, codec="zstd", asbytes=True)


def pzstd(data):
  skipped = b"\x50\x2a\x4d\x18\x04\0\0\0size"
  return b"".join(skipped + zstd(part) for part in (data[:9], data[9:]))


PACKERS = {
  "gzip": gzip.compress,
  "bzip2": bz2.compress,
  "xz": lzma.compress,
  "Zstandard": zstd,
  "": bytes,
}


@pytest.mark.parametrize("kind", PACKERS)
def test_a_file_is_unpacked_by_its_first_bytes(kind, tmp_path):
  path = tmp_path / "log.tsv"
  path.write_bytes(PACKERS[kind](TEXT))
  assert files.get_kind(path) == kind
  assert len([*query_pairs.query_log(path)]) == 6000
  assert files.get_max_lines(path) == 6001


def test_frames_that_readers_skip_are_skipped(tmp_path):
  """pzstd writes one before each part of a file."""
  path = tmp_path / "log.tsv.zst"
  path.write_bytes(pzstd(TEXT))
  assert files.get_kind(path) == "Zstandard"
  assert len([*query_pairs.query_log(path)]) == 6000


@pytest.mark.parametrize("kind", ["gzip", "bzip2", "xz", "Zstandard"])
def test_a_cut_or_damaged_file_is_one_line(kind, tmp_path):
  path = tmp_path / "log.tsv"
  whole = PACKERS[kind](TEXT)
  middle = len(whole) // 2
  for bad in (
    whole[:middle],
    whole[:middle] + b"se" * 20 + whole[middle + 40 :],
  ):
    path.write_bytes(bad)
    with pytest.raises(
      ValueError, match=rf"log.tsv:\d+: expected sound {kind}"
    ):
      list(files.lines(path))


ARCHIVES = {
  "compressed twice": lambda: gzip.compress(gzip.compress(TEXT)),
  "a parquet table": lambda: write_table(pa.table({"_id": ["1"]})),
  "a workbook of Excel": lambda: write_zip(),
  "a tar archive": lambda: write_tar(),
}


def write_table(table):
  stream = io.BytesIO()
  parquet.write_table(table, stream)
  return stream.getvalue()


def write_zip():
  stream = io.BytesIO()
  with zipfile.ZipFile(stream, "w") as archive:
    archive.writestr("a", "b")
  return stream.getvalue()


def write_tar():
  stream = io.BytesIO()
  with tarfile.open(fileobj=stream, mode="w:gz") as archive:
    archive.addfile(tarfile.TarInfo("log.tsv"), io.BytesIO())
  return stream.getvalue()


def test_a_text_that_begins_like_bzip2_is_a_text(tmp_path):
  path = tmp_path / "log.tsv"
  path.write_text("BZh9\tmeasles\n")
  assert [*query_pairs.query_log(path)] == [("BZh9", "measles")]


@pytest.mark.parametrize("kind", ARCHIVES)
def test_what_is_no_text_is_refused_by_its_kind(kind, tmp_path):
  path = tmp_path / "log.tsv"
  path.write_bytes(ARCHIVES[kind]())
  with pytest.raises(ValueError, match=rf"log.tsv: expected text.*{kind}"):
    list(files.lines(path))


def test_zstandard_is_refused_by_name_where_nothing_unpacks_it(
  tmp_path, monkeypatch
):
  path = tmp_path / "log.tsv"
  path.write_bytes(zstd(TEXT))
  monkeypatch.setitem(sys.modules, "pyarrow", None)
  with pytest.raises(
    ValueError, match=r"got Zstandard: .*\[parquet\].*zstd -d"
  ):
    list(files.lines(path))


@pytest.mark.parametrize("suffix", files._SUFFIXES)
def test_files_of_a_folder_are_found_with_any_suffix(suffix, tmp_path):
  (tmp_path / f"dev.tsv{suffix}").touch()
  assert files.splits(tmp_path) == ["dev"]
  assert files.find(tmp_path, "dev.tsv").name == f"dev.tsv{suffix}"
  assert files.remove_suffix(suffix) == suffix
