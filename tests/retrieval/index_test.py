import dataclasses

import faiss
import numpy as np
import pytest
import watched as watched_lib

from synthq_jax.retrieval import index


def oracle(vectors, queries, k):
  """All inner products in float64, ties by position."""
  scores = queries.astype(np.float64) @ vectors.T.astype(np.float64)
  order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
  return np.take_along_axis(scores, order, axis=1), order


def normal(rows, dim, seed):
  rng = np.random.default_rng(seed)
  return rng.normal(size=(rows, dim)).astype(np.float32)


@pytest.mark.parametrize("num_queries", [1, 64])
@pytest.mark.parametrize("k", [10, 150])
def test_the_best_are_found_in_order(num_queries, k):
  vectors, queries = normal(700, 24, 0), normal(num_queries, 24, 1)
  scores, places = index.exact(vectors).search(queries, k)
  expected, order = oracle(vectors, queries, k)
  np.testing.assert_array_equal(places, order)
  np.testing.assert_allclose(scores, expected, rtol=1e-12)


@pytest.mark.parametrize("num_queries", [1, 64])
@pytest.mark.parametrize("k", [3, 200])
def test_equal_scores_stand_by_position_also_across_the_border(num_queries, k):
  # Integers: every sum is exact, so ties are ties. 600 documents, 60 distinct.
  rng = np.random.default_rng(2)
  distinct = rng.integers(-3, 4, size=(60, 6)).astype(np.float32)
  vectors = distinct[rng.integers(60, size=600)]
  queries = rng.integers(-3, 4, size=(num_queries, 6)).astype(np.float32)
  scores, places = index.exact(vectors).search(queries, k)
  expected, order = oracle(vectors, queries, k)
  np.testing.assert_array_equal(scores, expected)
  np.testing.assert_array_equal(places, order)


def test_one_query_alone_gives_what_it_gives_among_many():
  vectors = normal(400, 16, 4) + 5  # nearly one direction: close scores
  vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
  queries = vectors[:100]
  searched = index.exact(vectors)
  scores, places = searched.search(queries, k=30)
  for i in (0, 37, 99):
    alone = searched.search(queries[i : i + 1], k=30)
    np.testing.assert_array_equal(alone[0][0], scores[i])
    np.testing.assert_array_equal(alone[1][0], places[i])


def test_scores_closer_than_single_precision_are_told_apart():
  # In float32 all of these products round to the same sum.
  vectors = np.zeros((100, 2), np.float32)
  vectors[:, 0] = 1
  vectors[:, 1] = np.arange(100) * 1e-10
  query = np.ones((1, 2), np.float32)
  rough, _ = faiss.knn(query, vectors, 5, metric=faiss.METRIC_INNER_PRODUCT)
  assert len(set(rough[0])) == 1
  scores, places = index.exact(vectors).search(query, k=5)
  np.testing.assert_array_equal(places[0], [99, 98, 97, 96, 95])
  assert (np.diff(scores[0]) < 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_vectors_that_are_not_finite_are_refused(bad):
  vectors = normal(5, 4, 7)
  vectors[2, 1] = bad
  with pytest.raises(ValueError, match="expected finite vectors"):
    index.exact(vectors)
  with pytest.raises(ValueError, match="expected finite queries"):
    index.exact(normal(5, 4, 7)).search(vectors, k=1)


def test_no_more_candidates_are_held_than_fit_into_memory(monkeypatch):
  vectors, queries = normal(700, 24, 0), normal(90, 24, 1)
  vectors[:350] = queries[0]  # ties, for which the search is widened
  searched = index.exact(vectors)
  watched = watched_lib.Watched(searched.flat)
  expected = searched.search(queries, 10)
  monkeypatch.setattr(index, "_FOUND", 1000)
  found = dataclasses.replace(searched, flat=watched).search(queries, 10)
  np.testing.assert_array_equal(found, expected)
  assert all(rows * width <= 1000 for rows, width in watched.asked)
  assert max(width for _, width in watched.asked) > 350


def test_bad_shapes_are_refused():
  with pytest.raises(ValueError, match=r"got shape \(0, 4\)"):
    index.exact(np.zeros((0, 4), np.float32))
  with pytest.raises(ValueError, match=r"two axes, got shape \(4,\)"):
    index.exact(np.zeros(4, np.float32))
  with pytest.raises(ValueError, match="dim=4, got k=1 and dim=3"):
    index.exact(normal(5, 4, 7)).search(normal(1, 3, 7), k=1)
  with pytest.raises(ValueError, match="k >= 1 .* got k=0"):
    index.exact(normal(5, 4, 7)).search(normal(1, 4, 7), k=0)


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


@pytest.mark.parametrize("block", [1, 700])
@pytest.mark.parametrize("depth", [4, 100])
@pytest.mark.parametrize("large", [0.0, 0.5])
def test_blocks_and_widths_change_no_result(large, depth, block, monkeypatch):
  rng = np.random.default_rng(depth)
  owners, vectors, queries = data(rng, large)
  vectors = vectors.round()  # ties
  built = index.exact(vectors)
  expected = at_once(built, queries.round(), owners, depth)
  monkeypatch.setattr(index, "_FOUND", block)
  scores, found = index.search_documents(built, queries.round(), owners, depth)
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
  scores, found = index.search_documents(watched, queries, owners, 5)
  expected = at_once(watched.built, queries, owners, 5)
  np.testing.assert_array_equal(scores, expected[0])
  np.testing.assert_array_equal(found, expected[1])
  assert max(width for _, width in watched.asked) > 120
  assert {rows for rows, width in watched.asked if width > 40} == {1}


def test_no_queries_find_nothing():
  built = index.exact(np.eye(3, dtype=np.float32))
  none = np.zeros((0, 3), np.float32)
  scores, found = index.search_documents(built, none, np.array([0, 0, 1]), 9)
  assert scores.shape == found.shape == (0, 2)
