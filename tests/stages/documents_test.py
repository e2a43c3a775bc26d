import hashlib
import json
import types

import numpy as np
import pytest

from synthq_jax.data import collection, passages, shipped
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.models import t5_checkpoints
from synthq_jax.runtime import fingerprints, model_files, prepared_files
from synthq_jax.runtime import queries as queries_lib

TEXTS = ["red apples", "a " * 40, "pears", "sea", "blue"]
DOCUMENTS = [
  collection.Document(f"d{i}", text, title="Ü" * (i == 2))
  for i, text in enumerate(TEXTS)
]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_start_that_is_no_number_is_refused_before_any_private_step(
  tmp_path, bad
):
  params, config = t5_checkpoints.load(shipped.DIRECTORY)
  params["encoder"]["encoder_norm"]["scale"][3] = bad
  t5_checkpoints.save(tmp_path / "t5", params, config)
  prepared = types.SimpleNamespace(vocab_size=8, token_ids=config.token_ids)
  with pytest.raises(ValueError, match="tensor encoder/encoder_norm/scale"):
    model_files.load_public(tmp_path / "t5", prepared)


def test_files_in_folders_and_behind_links_are_part_of_a_fingerprint(tmp_path):
  """A BERT's weights may lie in 0_Transformer, T5X's in a store elsewhere."""
  folder, store = tmp_path / "bert", tmp_path / "store"
  (folder / "0_Transformer").mkdir(parents=True)
  (folder / ".git").mkdir()
  store.mkdir()
  (folder / "linked").symlink_to(store)
  of_folder = lambda: fingerprints.of_folder(folder)  # noqa: E731
  found = [of_folder()]
  for place in (folder / "0_Transformer/weights", store / "weights"):
    for content in ("one", "two"):
      place.write_text(content)
      found.append(of_folder())
  assert len(set(found)) == 5
  (folder / ".git" / "index").write_text("")
  assert of_folder() == found[-1]


def test_a_checkpoint_behind_a_link_has_files(tmp_path):
  (tmp_path / "store").mkdir()
  (tmp_path / "store" / "weights").write_text("")
  made = tmp_path / "t5" / "checkpoint_3"
  made.mkdir(parents=True)
  (made / "checkpoint").write_text("")
  (made / "state").symlink_to(tmp_path / "store")
  names = [path.name for path in t5_checkpoints.files(tmp_path / "t5")]
  assert names == ["checkpoint", "weights"]


def write(folder, length=8):
  folder.mkdir()
  state = hashlib.sha256()
  written = prepared_files.write_documents(
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
  read = prepared_files.read_documents(tmp_path / "a")
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
    prepared_files.read_documents(tmp_path / name).tokens for name in "ab"
  )
  cut = passages.TruncatedRows(rows, length)
  before = np.array(rows[:])
  assert (len(cut), cut.shape) == (len(DOCUMENTS), (len(DOCUMENTS), length))
  for some in (slice(None), [3, 0, 3], np.array([1])):
    np.testing.assert_array_equal(cut[some], expected[some])
  np.testing.assert_array_equal(rows[:], before)


def test_texts_of_owners_are_streamed(tmp_path):
  write(tmp_path / "a")
  found = queries_lib.read_document_texts(
    tmp_path / "a" / "corpus.jsonl", [0, 0, 3, 4, 4]
  )
  assert list(found) == ["red apples", "red apples", "sea", "blue", "blue"]
