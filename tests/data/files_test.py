import collections
import gzip
import tracemalloc

import pytest

from synthq_jax.data import files, table_files


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
