"""Compressed files are opened by what they hold, and archives refused by name."""

import bz2
import gzip
import io
import lzma
import sys
import tarfile
import zipfile

import pyarrow as pa
import pytest
from pyarrow import parquet

from synthq_jax.data import compression, files, query_pairs

TEXT = b"1\tmeasles\n2\tboat trips\n" * 3000


def zstd(data):
  return pa.compress(data, codec="zstd", asbytes=True)


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
  assert compression.get_kind(path) == kind
  assert len([*query_pairs.query_log(path)]) == 6000
  assert files.get_max_lines(path) == 6001


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


def test_what_a_server_compressed_again_is_read(tmp_path):
  path = tmp_path / "log.tsv.gz"
  path.write_bytes(gzip.compress(gzip.compress(TEXT)))
  assert len([*files.lines(path)]) == 6000
  path.write_bytes(gzip.compress(gzip.compress(gzip.compress(TEXT))))
  with pytest.raises(ValueError, match="expected a file compressed once, got"):
    list(files.lines(path))


def test_a_text_that_begins_like_bzip2_is_a_text(tmp_path):
  path = tmp_path / "log.tsv"
  path.write_text("BZh9\tmeasles\n")
  assert [*query_pairs.query_log(path)] == [("BZh9", "measles")]


def archives():
  table, zipped, tarred = io.BytesIO(), io.BytesIO(), io.BytesIO()
  parquet.write_table(pa.table({"_id": ["1"], "text": ["a"]}), table)
  with zipfile.ZipFile(zipped, "w") as archive:
    archive.writestr("a", "b")
  with tarfile.open(fileobj=tarred, mode="w:gz") as archive:
    archive.addfile(tarfile.TarInfo("log.tsv"), io.BytesIO())
  return {
    "a parquet table: name it": table.getvalue(),
    "a zip archive: unpack it": zipped.getvalue(),
    "a tar archive: unpack it": tarred.getvalue(),
  }


@pytest.mark.parametrize("said", archives())
def test_what_is_no_text_is_refused_by_its_kind(said, tmp_path):
  """Each was told to be converted by iconv."""
  path = tmp_path / "log.tsv"
  path.write_bytes(archives()[said])
  with pytest.raises(ValueError, match=f"log.tsv: expected text.*got {said}"):
    list(query_pairs.query_log(path))


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


@pytest.mark.parametrize("suffix", compression.SUFFIXES)
def test_files_of_a_folder_are_found_with_any_suffix(suffix, tmp_path):
  (tmp_path / f"dev.tsv{suffix}").touch()
  assert files.splits(tmp_path) == ["dev"]
  assert files.find(tmp_path, "dev.tsv").name == f"dev.tsv{suffix}"
  assert compression.remove_suffix(suffix) == suffix
