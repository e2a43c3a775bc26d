"""A BEIR set made from six rows through TFDS' own builder, and read.

Preparing needs apache-beam, which nothing else here needs: without the extra
[tfds] the tests are skipped.
"""

import json

import pytest

from synthq_jax.data import shipped, tasks, tfds_beir
from synthq_jax.data import vocabulary as vocabulary_lib

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
LENGTHS = {"inputs": 12, "targets": 16}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
  """The data folder of a prepared beir/scifact, and its qrels."""
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
  return root / "data", place / "qrels"


def rows_of(split):
  import seqio

  dataset = seqio.get_mixture_or_task("beir_scifact").get_dataset(
    dict(LENGTHS), split, shuffle=False
  )
  return list(dataset.as_numpy_iterator())


@pytest.fixture(scope="module")
def vocabulary():
  return vocabulary_lib.load(shipped.VOCABULARY, extra_ids=shipped.EXTRA_IDS)


def test_a_prepared_set_is_read_through_its_task(prepared, vocabulary):
  tasks.register_beir(vocabulary, data_dir=str(prepared[0]))
  documents = {
    r["passage_id"].decode(): r["targets"] for r in rows_of("passage")
  }
  assert set(documents) == {"d1", "d2", "d3"}
  for row in ROWS["corpus.jsonl"]:
    text = f"{row['title']} {row['text']}".strip()
    wanted = vocabulary_lib.tokenize(vocabulary, [text], length=16)[0]
    found = documents[row["_id"]]
    assert found.tolist() == wanted[: len(found)].tolist()
    assert not wanted[len(found) :].any()
  assert {r["query_id"] for r in rows_of("query")} == {b"q1", b"q2", b"q3"}
  pairs = {(r["query_id"], r["passage_id"]) for r in rows_of("test")}
  assert (b"q2", b"d2") in pairs


def test_tfds_keeps_one_query_of_a_document(prepared, vocabulary):
  """The pitfall that `tfds_beir` names; delete both when this fails."""
  tasks.register_beir(vocabulary, data_dir=str(prepared[0]))
  assert len(JUDGED) == 3
  pairs = [(r["query_id"], r["passage_id"]) for r in rows_of("test")]
  assert len(pairs) == 2
  assert len({query for query, document in pairs if document == b"d1"}) == 1


def test_a_prepared_set_is_a_collection_with_all_judgements(prepared):
  data_dir, qrels = prepared
  data = tfds_beir.read("scifact", qrels, data_dir=data_dir)
  assert sorted(data.pairs("test")) == [
    ("q1", "d1"),
    ("q2", "d2"),
    ("q3", "d1"),
  ]
  texts = {document.id: document.contents for document in data.documents}
  assert texts == {
    "d1": "Apple A red fruit.",
    "d2": "The sea is salty.",
    "d3": "Pear A green fruit.",
  }
  assert len(data.documents) == 3
  assert {q.id: q.text for q in data.queries}["q2"] == "salt water"


def test_judgements_of_another_set_are_refused(prepared, tmp_path):
  data_dir, _ = prepared
  header = "query-id\tcorpus-id\tscore\n"
  (tmp_path / "test.tsv").write_text(header + "q1\td7\t1\n")
  with pytest.raises(
    ValueError, match="test.tsv:2: expected the id of a known"
  ):
    tfds_beir.read("scifact", tmp_path, data_dir=data_dir)
