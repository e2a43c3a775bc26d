"""Ranks of a collection, part by part, stopped anywhere."""

import numpy as np
import pytest

from synthq_jax.models import static_vectors
from synthq_jax.retrieval import encode
from synthq_jax.stages import filter_queries

# Texts of one token: its vector, in the table, is that of the text.
CONFIG = static_vectors.StaticConfig(vocab_size=82, emb_dim=12)
DOCUMENTS = np.arange(2, 52).reshape(50, 1)
OWNERS = np.sort(np.random.default_rng(3).integers(0, 50, 30))
QUERIES = np.arange(52, 82).reshape(30, 1)


def table():
  """A document's own direction; a query's is near that of its document."""
  rng = np.random.default_rng(0)
  rows = rng.normal(size=(CONFIG.vocab_size, CONFIG.emb_dim))
  rows /= np.linalg.norm(rows, axis=1, keepdims=True)
  noise = rng.normal(size=(30, CONFIG.emb_dim)) * 0.4
  rows[QUERIES[:, 0]] = rows[DOCUMENTS[OWNERS, 0]] + noise
  return rows / np.linalg.norm(rows, axis=1, keepdims=True)


PARAMS = {"token_embedder": {"embedding": table().astype(np.float32)}}


@pytest.fixture(name="encoded")
def _encoded(monkeypatch):
  """Rows that were encoded; asking for more than `limit` calls is a kill."""
  state, real = {"rows": [], "limit": None}, encode.encode

  def counted(params, config, tokens, **options):
    state["rows"].append(tokens[:, 0].tolist())
    if state["limit"] is not None and len(state["rows"]) > state["limit"]:
      raise KeyboardInterrupt
    return real(params, config, tokens, **options)

  monkeypatch.setattr(encode, "encode", counted)
  monkeypatch.setattr(filter_queries, "_PART", 8)
  return state


def ranks(directory, owners=OWNERS):
  return filter_queries.own_ranks(
    PARAMS, CONFIG, QUERIES, DOCUMENTS, owners,
    directory=directory, description="x", batch_size=4)  # fmt: skip


def oracle():
  scores = table()[QUERIES[:, 0]] @ table()[DOCUMENTS[:, 0]].T
  own = scores[np.arange(30), OWNERS]
  return np.sum(scores > own[:, None], axis=1)


def test_ranks_over_parts_are_ranks_over_the_whole_collection(
  tmp_path, encoded
):
  found = ranks(tmp_path)
  assert found.tolist() == oracle().tolist()
  assert 0.3 < np.mean(found == 0) < 1
  assert all(len(rows) <= 8 for rows in encoded["rows"])


def test_wrong_positions_of_documents_are_seen_in_the_ranks(tmp_path, encoded):
  shifted = ranks(tmp_path, (OWNERS + 1) % 50)
  assert np.mean(shifted == 0) < np.mean(oracle() == 0) / 3


def test_a_kill_costs_one_part_and_changes_nothing(tmp_path, encoded):
  whole = ranks(tmp_path / "whole")
  parts = len(encoded["rows"])
  assert parts == 7 + 4
  for limit in range(parts):
    encoded.update(rows=[], limit=limit)
    with pytest.raises(KeyboardInterrupt):
      ranks(tmp_path / str(limit))
    encoded.update(rows=[], limit=None)
    assert ranks(tmp_path / str(limit)).tolist() == whole.tolist()
    assert len(encoded["rows"]) == parts - limit


def test_a_kill_between_ranks_changes_nothing(tmp_path, encoded, monkeypatch):
  whole = ranks(tmp_path / "whole")
  count, calls = filter_queries.ranks.count_better, []

  def stopping(*args):
    calls.append(1)
    if len(calls) == 10:  # in the second part of the queries
      raise KeyboardInterrupt
    return count(*args)

  with monkeypatch.context() as patch:
    patch.setattr(filter_queries.ranks, "count_better", stopping)
    with pytest.raises(KeyboardInterrupt):
      ranks(tmp_path / "cut")
  assert len(list((tmp_path / "cut/ranks").glob("*.npy"))) == 1
  assert ranks(tmp_path / "cut").tolist() == whole.tolist()


def test_half_a_part_is_made_again(tmp_path, encoded):
  whole = ranks(tmp_path)
  path = tmp_path / "queries" / "block_00001.npy"
  path.write_bytes(path.read_bytes()[:100])
  for found in (tmp_path / "ranks").iterdir():
    found.unlink()
  assert ranks(tmp_path).tolist() == whole.tolist()
