"""Ranks of one document per query, counted over blocks."""

import numpy as np
import pytest

from synthq_jax.retrieval import index, ranks


def unit(rng, rows, dim=16):
  vectors = rng.normal(size=(rows, dim))
  vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
  return vectors.astype(np.float32)


def counted(queries, documents, owners, block):
  scores = ranks.own_scores(queries, documents[owners])
  return sum(
    ranks.count_better(queries, scores, documents[start : start + block])
    for start in range(0, len(documents), block)
  )


@pytest.fixture(name="made")
def _made():
  rng = np.random.default_rng(0)
  documents = unit(rng, 150)
  owners = np.sort(rng.integers(0, 150, 60))
  queries = documents[owners] + 1.2 * unit(rng, 60)
  return queries, documents, owners


@pytest.mark.parametrize("block", [1, 7, 64, 150, 1000])
def test_ranks_are_positions_in_a_sorted_list_for_any_block(made, block):
  queries, documents, owners = made
  order = np.argsort(-(queries.astype(float) @ documents.T), axis=1)
  expected = np.argmax(order == owners[:, None], axis=1)
  found = counted(queries, documents, owners, block)
  assert found.tolist() == expected.tolist()
  assert 0 < np.mean(found == 0) < 1 and found.max() > 2


def test_ranks_below_k_are_what_an_exact_search_finds(made):
  queries, documents, owners = made
  _, top = index.exact(documents).search(queries, 5)
  expected = [own in row for own, row in zip(owners, top, strict=True)]
  found = counted(queries, documents, owners, 40) < 5
  assert found.tolist() == expected


def test_tiles_change_nothing(made, monkeypatch):
  queries, documents, owners = made
  whole = counted(queries, documents, owners, 64)
  monkeypatch.setattr(ranks, "_TILE", 100)
  assert counted(queries, documents, owners, 64).tolist() == whole.tolist()


def test_the_own_document_of_another_query_has_another_rank(made):
  queries, documents, owners = made
  right = counted(queries, documents, owners, 64)
  wrong = counted(queries, documents, np.roll(owners, 9), 64)
  assert np.mean(right < 5) > 0.5 > np.mean(wrong < 5)


def test_documents_with_equal_vectors_share_the_best_rank():
  rng = np.random.default_rng(1)
  documents = unit(rng, 40, 64)
  documents[17] = documents[3]
  query = documents[3:4] + 0.1 * unit(rng, 1, 64)
  for own in (3, 17):
    assert counted(query, documents, np.array([own]), 8).tolist() == [0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_vectors_of_a_training_that_diverged_are_refused(made, bad):
  queries, documents, owners = made
  queries = queries.copy()
  queries[3, 2] = bad
  with pytest.raises(ValueError, match="diverged"):
    counted(queries, documents, owners, 64)


def test_a_query_needs_one_document_of_its_own(made):
  queries, documents, _ = made
  with pytest.raises(ValueError, match="one own document"):
    ranks.own_scores(queries, documents)
