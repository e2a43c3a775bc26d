"""A BEIR set made from six rows through TFDS' own builder, and read.

Preparing needs apache-beam, which nothing else here needs: without the extra
[tfds] the tests are skipped.
"""

import json

import pytest

from synthq_jax.data import (
  beir_sets,
  sources,
)

ROWS = {
  "queries.jsonl": [
    {"_id": "q1", "text": "red fruit", "metadata": {}},
    {"_id": "q2", "text": "salt water", "metadata": {}},
    {"_id": "q3", "text": "which fruit is red", "metadata": {}},
  ],
  "corpus.jsonl": [
    {"_id": "d1", "title": "Apple", "text": "A red fruit.", "metadata": {}},
    {"_id": "d2", "title": "", "text": "The sea is salty.", "metadata": {}},
    {"_id": "d3", "title": "Pear", "text": "A green fruit.", "metadata": {}},
  ],
}
JUDGED = [("q1", "d1", 1), ("q2", "d2", 1), ("q3", "d1", 1)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
  """The data folder of a prepared beir/scifact."""
  pytest.importorskip(
    "apache_beam", reason="preparing a set with TFDS needs the extra [tfds]"
  )
  import tensorflow_datasets as tfds

  root = tmp_path_factory.mktemp("tfds")
  builder = tfds.builder("beir/scifact", data_dir=str(root / "data"))
  unzipped = root / "download"
  place = unzipped / "scifact"
  (place / "qrels").mkdir(parents=True)
  for name, rows in ROWS.items():
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (place / name).write_text(lines)
  lines = "".join(f"{q}\t{d}\t{grade}\n" for q, d, grade in JUDGED)
  for split in ("train", "test"):
    (place / "qrels" / f"{split}.tsv").write_text(
      "query-id\tcorpus-id\tscore\n" + lines
    )

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      tfds.download.DownloadManager,
      "download_and_extract",
      lambda self, url: str(unzipped),
    )
    builder.download_and_prepare()
  return root / "data"


def examples_of(split):
  """Rows of a split as TFDS' builder writes them."""
  empty = {
    "query_id": "", "query": "", "query_metadata": "{}", "passage_id": "",
    "passage": "", "passage_metadata": "{}", "score": -1.0,
  }  # fmt: skip
  queries = {
    row["_id"]: {"query_id": row["_id"], "query": row["text"]}
    for row in ROWS["queries.jsonl"]
  }
  documents = {
    row["_id"]: {
      "passage_id": row["_id"],
      "passage": row["text"],
      "passage_metadata": json.dumps({"title": row["title"]}),
    }
    for row in ROWS["corpus.jsonl"]
  }
  if split == "query":
    return [{**empty, **row} for row in queries.values()]
  if split == "passage":
    return [{**empty, **row} for row in documents.values()]
  return [
    {**empty, **queries[q], **documents[d], "score": float(grade)}
    for q, d, grade in JUDGED[:2]
  ]


def write_prepared(root, each):
  """Writes what a prepared set consists of, without apache-beam."""
  import tensorflow as tf
  import tensorflow_datasets as tfds

  text = tfds.features.Text()
  names = [name for name in examples_of("query")[0] if name != "score"]
  features = tfds.features.FeaturesDict(
    {**dict.fromkeys(names, text), "score": tf.float32}
  )
  place = root / "beir" / each.name / "1.0.0"
  place.mkdir(parents=True)
  template = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
  files = tfds.core.ShardedFileTemplate(
    dataset_name="beir", data_dir=place, filetype_suffix="tfrecord",
    template=template,
  )  # fmt: skip
  infos = []
  for split in ("query", "passage", *each.splits):
    rows = examples_of(split)
    path = place / f"beir-{split}.tfrecord-00000-of-00001"
    with tf.io.TFRecordWriter(str(path)) as writer:
      for row in rows:
        writer.write(features.serialize_example(row))
    infos.append(
      tfds.core.SplitInfo(
        name=split, shard_lengths=[len(rows)], num_bytes=0,
        filename_template=files.replace(split=split),
      )
    )  # fmt: skip
  tfds.folder_dataset.write_metadata(
    data_dir=place, features=features, split_infos=infos,
    filename_template=template,
  )  # fmt: skip


def write_judgements(root, judged):
  """Writes the download's judgements beside a prepared set; returns its SOURCE."""
  lines = "".join(f"{q}\t{d}\t{grade}\n" for q, d, grade in judged)
  (root / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + lines)
  return f"tfds:scifact@{root}"


def test_tfds_keeps_one_query_of_a_document(prepared):
  """The pitfall that `beir_sets` names; delete both when this fails."""
  import tensorflow_datasets as tfds

  assert len(JUDGED) == 3
  builder = tfds.builder("beir/scifact", data_dir=str(prepared))
  rows = builder.as_dataset("test")
  pairs = [(r["query_id"], r["passage_id"]) for r in tfds.as_numpy(rows)]
  assert len(pairs) == 2
  assert len({query for query, document in pairs if document == b"d1"}) == 1


def test_a_prepared_set_is_a_collection_with_all_judgements(
  tmp_path, monkeypatch
):
  import tensorflow_datasets as tfds

  monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path))
  write_prepared(tmp_path, beir_sets.get("scifact"))
  place = write_judgements(tmp_path, [*JUDGED, ("q2", "d7", 1)])
  source = sources.open(place)
  data = source.read()
  assert data.pairs("test") == [("q1", "d1"), ("q2", "d2"), ("q3", "d1")]
  assert source.left_out == {"document": 1}
  assert {each.id: each.contents for each in data.documents} == {
    "d1": "Apple A red fruit.",
    "d2": "The sea is salty.",
    "d3": "Pear A green fruit.",
  }
  assert {q.id: q.text for q in data.queries}["q2"] == "salt water"
  with pytest.raises(
    ValueError, match="test.tsv:5: expected the id of a known"
  ):
    sources.open(place, strict=True).read()
