"""What is prepared for everybody is made without the private queries."""

import dataclasses

import pytest
import small_data
import tiny_runs

from synthq_jax.data import collection
from synthq_jax.pipeline import workspace
from synthq_jax.stages import prepare_data

COUNT = 40
RARE = "zyzzyva"


def write(folder, query_of):
  """Writes a BEIR folder in which only the queries' texts are to differ."""
  rows = [(f"q{i}", f"d{i}", 1) for i in range(COUNT)]
  small_data.write_beir(
    folder,
    {f"d{i}": small_data.document(i) for i in range(COUNT)},
    {f"q{i}": query_of(i) for i in range(COUNT)},
    {"train": rows[:30], "test": rows[30:]},
  )


def prepare(root, query_of):
  write(root / "data", query_of)
  config = prepare_data.Config(
    source=f"beir:{root / 'data'}",
    vocabulary="train",
    vocab_size=60,
    document_length=16,
    query_length=12,
    public_test_documents=20,
  )
  space = workspace.Workspace(root / "run", secret_seed=7)
  return tiny_runs.make(prepare_data.STAGE, config, space)


def shared(root):
  """The bytes of every file that may be shared."""
  folder = root / "run/prepare_data"
  paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
  return {
    path.relative_to(folder).as_posix(): path.read_bytes() for path in paths
  }


def rare_query(number):
  """Holds a word of no document, which all of them say 1,000 times."""
  return f"{number} " + f"{RARE} " * 25


def test_other_private_queries_change_no_bit_of_what_is_shared(tmp_path):
  prepare(tmp_path / "plain", small_data.query)
  prepare(tmp_path / "rare", rare_query)
  expected, found = shared(tmp_path / "plain"), shared(tmp_path / "rare")
  assert {"vocabulary.model", "public_test.npz", "corpus.jsonl"} <= set(found)
  # Names alone: pytest would take minutes to show how large files differ.
  names = expected.keys() | found.keys()
  assert not sorted(n for n in names if found.get(n) != expected.get(n))
  assert RARE.encode() not in found["vocabulary.model"]


def test_a_vocabulary_that_is_trained_on_queries_is_caught(
  tmp_path, monkeypatch
):
  right = prepare_data._vocabulary

  def wrong(config, data, public):
    queries = [
      collection.Document(id=one.id, text=one.text) for one in data.queries
    ]
    both = dataclasses.replace(data, documents=(*data.documents, *queries))
    return right(config, both, public)

  monkeypatch.setattr(prepare_data, "_vocabulary", wrong)
  with pytest.raises(AssertionError):
    test_other_private_queries_change_no_bit_of_what_is_shared(tmp_path)
  model = shared(tmp_path / "rare")["vocabulary.model"]
  assert RARE.encode() in model
