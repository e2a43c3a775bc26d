"""Parts of a corpus: files of lines, of JSON, and shards of TFDS."""

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


@pytest.fixture(name="tfds_home")
def _tfds_home(tmp_path, monkeypatch):
  """Returns TFDS's data folder with two shards as C4's builder writes them."""
  import tensorflow as tf
  import tensorflow_datasets as tfds

  monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path))
  features = tfds.builder("c4/en", data_dir=tmp_path).info.features
  place = tmp_path / "c4" / "en" / "3.1.0"
  place.mkdir(parents=True)
  for shard in range(2):
    path = place / f"c4-train.tfrecord-{shard:05d}-of-00002"
    with tf.io.TFRecordWriter(str(path)) as writer:
      for number in range(3):
        example = dict.fromkeys(features, "")
        example["text"] = f"caf\u00e9 {shard} {number}"
        writer.write(features.serialize_example(example))
  name = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
  template = tfds.core.ShardedFileTemplate(
    dataset_name="c4", data_dir=place, filetype_suffix="tfrecord", template=name
  )
  split = tfds.core.SplitInfo(
    name="train",
    shard_lengths=[3, 3],
    num_bytes=0,
    filename_template=template.replace(split="train"),
  )
  tfds.folder_dataset.write_metadata(
    data_dir=place, features=features, split_infos=[split],
    filename_template=name,
  )  # fmt: skip
  return tmp_path


def test_c4_of_tfds_is_read_shard_by_shard(tfds_home):
  del tfds_home
  parts = public_corpus.parts("tfds:c4/en")
  assert [list(part.texts()) for part in parts] == [
    [f"café {shard} {number}" for number in range(3)] for shard in range(2)
  ]
  assert [part.identity for part in parts] == [
    f"tfds:c4/en/3.1.0@train {shard}" for shard in range(2)
  ]


def test_what_tfds_has_not_prepared_is_named_with_its_command(tfds_home):
  command = rf"tfds.builder\('c4/realnewslike', data_dir='{tfds_home}'\)"
  with pytest.raises(ValueError, match=command):
    public_corpus.parts("tfds:c4/realnewslike")
  with pytest.raises(
    ValueError,
    match=r"only \['train'\]: run pip install .* tfds.builder\('c4/en',",
  ):
    public_corpus.parts("tfds:c4/en@validation")
  with pytest.raises(ValueError, match="nosuch not found.; check the name"):
    public_corpus.parts("tfds:nosuch")
