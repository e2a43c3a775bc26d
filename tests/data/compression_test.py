"""Compressed files are opened by what they hold."""

import bz2
import gzip
import io
import lzma
import sys

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
  "gzip in gzip": lambda: gzip.compress(gzip.compress(TEXT)),
  "parquet": lambda: write_table(pa.table({"_id": ["1"], "text": ["a"]})),
}


def write_table(table):
  stream = io.BytesIO()
  parquet.write_table(table, stream)
  return stream.getvalue()


@pytest.mark.parametrize("kind", ARCHIVES)
def test_what_is_no_text_is_refused(kind, tmp_path):
  path = tmp_path / "log.tsv"
  path.write_bytes(ARCHIVES[kind]())
  with pytest.raises(ValueError, match=r"log.tsv:\d+: expected UTF-8, got"):
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


@pytest.mark.parametrize("suffix", compression.SUFFIXES)
def test_files_of_a_folder_are_found_with_any_suffix(suffix, tmp_path):
  (tmp_path / f"dev.tsv{suffix}").touch()
  assert files.splits(tmp_path) == ["dev"]
  assert files.find(tmp_path, "dev.tsv").name == f"dev.tsv{suffix}"
  assert compression.remove_suffix(suffix) == suffix
