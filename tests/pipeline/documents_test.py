import hashlib
import json

import numpy as np
import pytest

from synthq_jax.data import collection, passages, shipped
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.pipeline import inputs
from synthq_jax.pipeline import queries as queries_lib

TEXTS = ["red apples", "a " * 40, "pears", "sea", "blue"]
DOCUMENTS = [
  collection.Document(f"d{i}", text, title="Ü" * (i == 2))
  for i, text in enumerate(TEXTS)
]


def write(folder, length=8):
  folder.mkdir()
  state = hashlib.sha256()
  written = inputs.write_documents(
    iter(DOCUMENTS),
    folder,
    vocabulary_lib.load(shipped.VOCABULARY),
    length=length,
    choose=[3, 1],
    digest=state.update,
  )
  return written, state.hexdigest()


def test_texts_tokens_and_ids_stand_in_the_order_of_the_documents(tmp_path):
  written, _ = write(tmp_path / "a")
  assert written.chosen == [DOCUMENTS[3], DOCUMENTS[1]]
  assert written.cut == 1 / 5
  lines = (tmp_path / "a" / "corpus.jsonl").read_text().splitlines()
  texts = [(line["_id"], line["text"]) for line in map(json.loads, lines)]
  assert texts == [(document.id, document.text) for document in DOCUMENTS]
  read = inputs.read_documents(tmp_path / "a")
  assert read.are_documents and written.num_passages == len(DOCUMENTS)
  np.testing.assert_array_equal(
    read.tokens[:],
    vocabulary_lib.tokenize(
      vocabulary_lib.load(shipped.VOCABULARY),
      [document.contents for document in DOCUMENTS],
      length=8,
    ),
  )
  assert read.ids.tolist() == [document.id for document in DOCUMENTS]


@pytest.mark.parametrize("length", [2, 3, 5, 7])
def test_cut_rows_are_those_of_fewer_columns(tmp_path, length):
  write(tmp_path / "a")
  write(tmp_path / "b", length=length)
  rows, expected = (
    inputs.read_documents(tmp_path / name).tokens for name in "ab"
  )
  cut = passages.Cut(rows, length)
  before = np.array(rows[:])
  assert (len(cut), cut.shape) == (len(DOCUMENTS), (len(DOCUMENTS), length))
  for some in (slice(None), [3, 0, 3], np.array([1])):
    np.testing.assert_array_equal(cut[some], expected[some])
  np.testing.assert_array_equal(rows[:], before)


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_chunks_change_nothing(tmp_path, monkeypatch, chunk):
  whole = write(tmp_path / "whole")
  monkeypatch.setattr(inputs, "_CHUNK", chunk)
  assert write(tmp_path / "parts") == whole
  files = [p for p in (tmp_path / "whole").rglob("*") if p.is_file()]
  assert len(files) == 5
  for path in files:
    other = tmp_path / "parts" / path.relative_to(tmp_path / "whole")
    assert path.read_bytes() == other.read_bytes()


def test_texts_of_owners_are_streamed(tmp_path):
  write(tmp_path / "a")
  found = queries_lib.texts_of(tmp_path / "a" / "corpus.jsonl", [0, 0, 3, 4, 4])
  assert list(found) == ["red apples", "red apples", "sea", "blue", "blue"]
