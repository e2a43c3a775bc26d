"""The graph finds most of the best, in order, for every query."""

import dataclasses
import functools

import faiss
import numpy as np
import pytest

from synthq_jax.retrieval import index

_HNSW = index.HNSW(links=8, ef_construction=40, ef_search=200, seed=0)
_DIM = 32


@pytest.fixture(autouse=True)
def _one_thread():
  """Threads that wait for each other are slow on a busy machine."""
  before = faiss.omp_get_max_threads()
  faiss.omp_set_num_threads(1)
  yield
  faiss.omp_set_num_threads(before)


def clustered(rows, seed):
  """Vectors around 50 centres, of lengths that differ.

  So the nearest ones are not those with the largest inner products.
  """
  centres = np.random.default_rng(99).normal(size=(50, _DIM))
  rng = np.random.default_rng(seed)
  vectors = centres[rng.integers(50, size=rows)]
  vectors = vectors + 0.6 * rng.normal(size=(rows, _DIM))
  return (vectors * np.exp(0.5 * rng.normal(size=(rows, 1)))).astype("f4")


@functools.cache
def collection():
  """Documents, queries, and the ten best of each."""
  documents, queries = clustered(8000, 0), clustered(200, 1)
  return documents, queries, index.exact(documents).search(queries, 10)[1]


@functools.cache
def built():
  return _HNSW.build(collection()[0])


def recall(candidates):
  """Recall@10 with so many candidates."""
  _, queries, best = collection()
  graph = dataclasses.replace(built(), ef_search=candidates)
  rows = zip(graph.search(queries, 10)[1], best, strict=True)
  return np.mean([len(set(a) & set(b)) / 10 for a, b in rows])


def test_the_nearest_vectors_would_be_the_wrong_ones():
  documents, queries, best = collection()
  nearest = faiss.IndexFlatL2(_DIM)
  nearest.add(documents)
  _, found = nearest.search(queries, 10)
  rows = zip(found, best, strict=True)
  assert np.mean([len(set(a) & set(b)) / 10 for a, b in rows]) < 0.1


def test_it_finds_nearly_all_and_more_with_more_candidates():
  few, many = recall(10), recall(200)
  assert 0.7 < few < 0.96 < 0.98 < many


def test_results_are_in_order_and_their_scores_are_those_of_the_documents():
  documents, queries, _ = collection()
  scores, places = built().search(queries, 20)
  assert scores.shape == places.shape == (200, 20)
  assert (np.diff(scores, axis=1) <= 0).all()
  exact = np.einsum(
    "qd,qkd->qk",
    queries.astype(np.float64),
    documents[places].astype(np.float64),
  )
  np.testing.assert_allclose(scores, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", [150, 400, 1000])
def test_every_query_gets_all_it_asked_for(k):
  # So few links that parts of the graph are out of reach.
  config = index.HNSW(links=2, ef_construction=2, ef_search=2, seed=0)
  scores, places = config.build(clustered(400, 2)).search(clustered(30, 3), k)
  assert places.shape == scores.shape == (30, min(k, 400))
  assert all(len(set(row)) == min(k, 400) for row in places)
  assert places.min() >= 0 and np.isfinite(scores).all()


def test_equal_scores_stand_by_position():
  kinds = np.random.default_rng(5).integers(-2, 3, (20, _DIM))
  documents = kinds[np.random.default_rng(6).integers(20, size=300)]
  _, places = _HNSW.build(documents.astype("f4")).search(
    documents[:20].astype("f4"), 150
  )
  scores = np.take_along_axis(documents[:20] @ documents.T, places, axis=1)
  order = np.lexsort((places, -scores), axis=1)
  np.testing.assert_array_equal(order, np.tile(np.arange(150), (20, 1)))


def test_the_seed_alone_decides_the_index():
  documents = clustered(600, 4)

  def content(seed):
    made = dataclasses.replace(_HNSW, seed=seed).build(documents)
    return faiss.serialize_index(made.inner).tobytes()

  assert content(1) == content(1)
  assert content(1) != content(2)


def test_no_documents_and_numbers_that_are_none_are_refused():
  documents = clustered(100, 7)
  with pytest.raises(ValueError, match=r"got shape \(0, 32\); encode some"):
    _HNSW.build(documents[:0])
  documents[70, 3] = np.nan
  with pytest.raises(ValueError, match="expected finite vectors"):
    _HNSW.build(documents)


@pytest.mark.parametrize(
  ("name", "value"),
  [("links", 1), ("ef_search", 0), ("ef_construction", 0), ("seed", -1)],
)
def test_bad_settings_are_refused(name, value):
  with pytest.raises(ValueError, match=f"got {name}={value}"):
    dataclasses.replace(_HNSW, **{name: value})


def test_bad_searches_are_refused():
  queries = collection()[1]
  with pytest.raises(ValueError, match="dim=32, got k=1 and dim=3"):
    built().search(queries[:, :3], 1)
  with pytest.raises(ValueError, match="k >= 1 .* got k=0"):
    built().search(queries, 0)
