"""Documents by their best passages, against one wide search of all queries."""

import numpy as np
import pytest
import watched as watched_lib

from synthq_jax.retrieval import best_passages, index


def at_once(built, queries, owners, depth):
  """All passages of all queries, of which each document keeps the first."""
  scores, at = built.search(queries, len(owners))
  rows = []
  for values, places in zip(scores, owners[at], strict=True):
    first = np.sort(np.unique(places, return_index=True)[1])[:depth]
    rows.append((values[first], places[first]))
  values, places = zip(*rows, strict=True)
  return np.stack(values), np.stack(places)


def data(rng, large):
  """300 passages, half of them (or none) of one document, and 40 queries."""
  owners = np.sort(
    np.where(rng.random(300) < large, 3, rng.integers(40, size=300))
  )
  vectors = rng.normal(size=(300, 6)).astype(np.float32)
  queries = rng.normal(size=(40, 6)).astype(np.float32)
  return owners, vectors, queries


@pytest.mark.parametrize("block", [1, 700, 1 << 20])
@pytest.mark.parametrize("depth", [1, 4, 11, 100])
@pytest.mark.parametrize("large", [0.0, 0.5])
def test_blocks_and_widths_change_no_result(large, depth, block, monkeypatch):
  rng = np.random.default_rng(depth)
  owners, vectors, queries = data(rng, large)
  vectors = vectors.round()  # ties
  built = index.exact(vectors)
  expected = at_once(built, queries.round(), owners, depth)
  monkeypatch.setattr(index, "_FOUND", block)
  scores, found = best_passages.documents(built, queries.round(), owners, depth)
  np.testing.assert_array_equal(scores, expected[0])
  np.testing.assert_array_equal(found, expected[1])


def test_a_query_that_finds_one_document_widens_no_other_search():
  """With one document of half of all passages, 400 queries took 25 s for .7."""
  rng = np.random.default_rng(0)
  owners, vectors, queries = data(rng, 0.5)
  vectors[:, 0] = owners == 3
  queries[:, 0] = -9
  queries[7, 0] = 9  # has all passages of document 3 before any other
  watched = watched_lib.Watched(index.exact(vectors))
  scores, found = best_passages.documents(watched, queries, owners, 5)
  expected = at_once(watched.built, queries, owners, 5)
  np.testing.assert_array_equal(scores, expected[0])
  np.testing.assert_array_equal(found, expected[1])
  assert max(width for _, width in watched.asked) > 120
  assert {rows for rows, width in watched.asked if width > 40} == {1}


def test_no_queries_find_nothing():
  built = index.exact(np.eye(3, dtype=np.float32))
  none = np.zeros((0, 3), np.float32)
  scores, found = best_passages.documents(built, none, np.array([0, 0, 1]), 9)
  assert scores.shape == found.shape == (0, 2)
