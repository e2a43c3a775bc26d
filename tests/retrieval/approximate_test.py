import dataclasses
import functools

import faiss
import numpy as np
import pytest

from synthq_jax.retrieval import index

_IVFPQ = index.IVFPQ(
  lists=64, subquantizers=16, bits=6, probes=16, rerank=50, seed=0
)
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
def built(config):
  return config.build(collection()[0])


def recall(index_, **changed):
  """Recall@10 of an index searched with another configuration."""
  config = dataclasses.replace(index_.config, **changed)
  _, queries, best = collection()
  _, found = dataclasses.replace(index_, config=config).search(queries, 10)
  rows = zip(found, best, strict=True)
  return np.mean([len(set(a) & set(b)) / 10 for a, b in rows])


def test_the_nearest_vectors_would_be_the_wrong_ones():
  documents, queries, best = collection()
  nearest = faiss.IndexFlatL2(_DIM)
  nearest.add(documents)
  _, found = nearest.search(queries, 10)
  rows = zip(found, best, strict=True)
  assert np.mean([len(set(a) & set(b)) / 10 for a, b in rows]) < 0.1


def test_ivfpq_finds_nearly_all_and_more_with_more_probes():
  index_ = built(_IVFPQ)
  one, some, all_ = (recall(index_, probes=n) for n in (1, 16, 64))
  assert one < 0.85 and some > 0.98 and all_ >= some


def test_scoring_candidates_again_makes_up_for_short_codes():
  index_ = built(_IVFPQ)
  assert 0.75 < recall(index_, rerank=0) < 0.9 < recall(index_, rerank=30)


def test_hnsw_finds_nearly_all_and_more_with_more_candidates():
  index_ = built(_HNSW)
  few, many = recall(index_, ef_search=10), recall(index_, ef_search=200)
  assert 0.7 < few < 0.96 < 0.98 < many


@pytest.mark.parametrize("config", [_IVFPQ, _HNSW], ids=["ivfpq", "hnsw"])
def test_results_are_in_order_and_their_scores_are_those_of_the_documents(
  config,
):
  documents, queries, _ = collection()
  scores, places = built(config).search(queries, 20)
  assert scores.shape == places.shape == (200, 20)
  assert (np.diff(scores, axis=1) <= 0).all()
  exact = np.einsum(
    "qd,qkd->qk",
    queries.astype(np.float64),
    documents[places].astype(np.float64),
  )
  tolerance = 1e-12 if config.rerank else 1e-5
  np.testing.assert_allclose(scores, exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
  "config",
  [
    index.IVFPQ(lists=32, subquantizers=4, bits=4, probes=1, seed=0),
    # So few links that parts of the graph are out of reach.
    index.HNSW(links=2, ef_construction=2, ef_search=2, seed=0),
  ],
  ids=["ivfpq", "hnsw"],
)
@pytest.mark.parametrize("k", [150, 400, 1000])
def test_every_query_gets_all_it_asked_for(config, k):
  index_ = config.build(clustered(400, 2))
  scores, places = index_.search(clustered(30, 3), k)
  assert places.shape == scores.shape == (30, min(k, 400))
  assert all(len(set(row)) == min(k, 400) for row in places)
  assert places.min() >= 0 and np.isfinite(scores).all()


@pytest.mark.parametrize("config", [_IVFPQ, _HNSW], ids=["ivfpq", "hnsw"])
def test_equal_scores_stand_by_position(config):
  config = dataclasses.replace(config, rerank=200)
  kinds = np.random.default_rng(5).integers(-2, 3, (20, _DIM))
  documents = kinds[np.random.default_rng(6).integers(20, size=300)]
  _, places = config.build(documents.astype("f4")).search(
    documents[:20].astype("f4"), 150
  )
  scores = np.take_along_axis(documents[:20] @ documents.T, places, axis=1)
  order = np.lexsort((places, -scores), axis=1)
  np.testing.assert_array_equal(order, np.tile(np.arange(150), (20, 1)))


@pytest.mark.parametrize("config", [_IVFPQ, _HNSW], ids=["ivfpq", "hnsw"])
def test_the_seed_alone_decides_the_index(config):
  documents = clustered(600, 4)

  def content(seed):
    made = dataclasses.replace(config, seed=seed).build(documents)
    return faiss.serialize_index(made.inner).tobytes()

  assert content(1) == content(1)
  assert content(1) != content(2)


def test_training_uses_the_whole_sample():
  # faiss would take 256 vectors a list, drawn by itself.
  documents = clustered(600, 4)
  config = dataclasses.replace(_IVFPQ, lists=1, probes=1, training_sample=600)
  index_ = config.build(documents)  # faiss keeps no reference to it
  quantizer = faiss.downcast_index(index_.inner.quantizer)
  mean = documents.astype(np.float64).mean(axis=0)
  np.testing.assert_allclose(
    quantizer.reconstruct(0), mean / np.linalg.norm(mean), atol=1e-5
  )


def test_training_reads_a_sample_and_building_reads_in_blocks(monkeypatch):
  monkeypatch.setattr(index, "_ADDED", 150)
  documents, read = clustered(400, 2), []

  class Rows:
    shape, dtype = documents.shape, documents.dtype

    def __len__(self):
      return len(documents)

    def __getitem__(self, part):
      rows = documents[part]
      read.append(len(rows))
      return rows

  config = dataclasses.replace(
    _IVFPQ, lists=16, bits=4, training_sample=64, rerank=0
  )
  index_ = config.build(Rows())
  assert read == [64, 150, 150, 100]
  assert index_.inner.ntotal == 400 and index_.vectors is None


@pytest.mark.parametrize("config", [_IVFPQ, _HNSW], ids=["ivfpq", "hnsw"])
def test_a_saved_index_answers_the_same(tmp_path, config):
  documents, queries, _ = collection()
  path = tmp_path / "folder" / "documents.faiss"
  built(config).save(path)
  assert [p.name for p in path.parent.iterdir()] == [path.name]
  loaded = index.load(path, config, documents)
  for mine, theirs in zip(
    loaded.search(queries, 10), built(config).search(queries, 10), strict=True
  ):
    np.testing.assert_array_equal(mine, theirs)


def test_a_file_that_is_not_that_index_is_refused(tmp_path):
  path = tmp_path / "documents.faiss"
  with pytest.raises(ValueError, match="documents.faiss: expected a whole"):
    index.load(path, _HNSW)
  built(_HNSW).save(path)
  for config in (_IVFPQ, dataclasses.replace(_HNSW, links=16)):
    with pytest.raises(ValueError, match="got a IndexHNSWFlat of other set"):
      index.load(path, config)
  l2 = faiss.IndexHNSWFlat(_DIM, _HNSW.links)
  l2.hnsw.efConstruction = _HNSW.ef_construction
  l2.add(collection()[0][:9])
  faiss.write_index(l2, str(tmp_path / "l2.faiss"))
  with pytest.raises(ValueError, match="expected an index of inner products"):
    index.load(tmp_path / "l2.faiss", _HNSW)
  path.write_bytes(path.read_bytes()[:-100])
  with pytest.raises(ValueError, match="expected a whole faiss index, got"):
    index.load(path, _HNSW)


def test_reranking_needs_the_vectors_of_the_index(tmp_path):
  path = tmp_path / "documents.faiss"
  built(_IVFPQ).save(path)
  for vectors, got in ((None, "None"), (np.ones((3, 32)), r"\(3, 32\)")):
    with pytest.raises(ValueError, match=f"rerank=50, got {got}"):
      index.load(path, _IVFPQ, vectors)
  index.load(path, dataclasses.replace(_IVFPQ, rerank=0))


def test_too_few_vectors_or_a_dim_that_cannot_be_cut_are_refused():
  documents = clustered(100, 7)
  with pytest.raises(ValueError, match=r"2\*\*bits\)=256 vectors .* got 100"):
    dataclasses.replace(_IVFPQ, bits=8).build(documents)
  with pytest.raises(ValueError, match=r"=200 vectors .* got 100"):
    dataclasses.replace(_IVFPQ, lists=200).build(documents)
  with pytest.raises(ValueError, match=r"=64 vectors .* got 50 of"):
    dataclasses.replace(_IVFPQ, training_sample=50).build(documents)
  with pytest.raises(ValueError, match="divide dim=32, got subquantizers=5"):
    dataclasses.replace(_IVFPQ, subquantizers=5).build(documents)
  with pytest.raises(ValueError, match=r"got shape \(0, 32\); encode some"):
    _HNSW.build(documents[:0])
  documents[70, 3] = np.nan
  for config in (_IVFPQ, _HNSW):
    with pytest.raises(ValueError, match="expected finite vectors"):
      config.build(documents)


def test_bad_settings_and_searches_are_refused():
  for changed in ({"probes": 65}, {"probes": 0}, {"bits": 13}, {"bits": 0}):
    with pytest.raises(
      ValueError, match=r"expected (probes|bits) in \[1, \d+\], got"
    ):
      dataclasses.replace(_IVFPQ, **changed)
  for config, changed in (
    (_IVFPQ, {"lists": 0}),
    (_IVFPQ, {"rerank": -1}),
    (_HNSW, {"links": 1}),
    (_HNSW, {"ef_search": 0}),
  ):
    ((name, value),) = changed.items()
    with pytest.raises(ValueError, match=f"got {name}={value}; change it"):
      dataclasses.replace(config, **changed)
  queries = collection()[1]
  with pytest.raises(ValueError, match="dim=32, got k=1 and dim=3"):
    built(_HNSW).search(queries[:, :3], 1)
  with pytest.raises(ValueError, match="k >= 1 .* got k=0"):
    built(_IVFPQ).search(queries, 0)
