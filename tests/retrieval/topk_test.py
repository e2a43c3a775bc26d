import faiss
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax.retrieval import index, topk


def oracle(queries, documents, k):
  """All inner products in float64, ties by position."""
  scores = queries.astype(np.float64) @ documents.T.astype(np.float64)
  order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
  return np.take_along_axis(scores, order, axis=1), order


def normal(rows, dim, seed):
  rng = np.random.default_rng(seed)
  return rng.normal(size=(rows, dim)).astype(np.float32)


def whole_numbers(rows, dim, seed, distinct=40):
  """Vectors whose products are exact, most of them equal to others."""
  rng = np.random.default_rng(seed)
  kinds = rng.integers(-2, 3, size=(distinct, dim)).astype(np.float32)
  return kinds[rng.integers(distinct, size=rows)]


class Sliced:
  """Vectors that are only ever read by slices, which are noted."""

  def __init__(self, rows):
    self.rows, self.seen = rows, []
    self.shape, self.dtype = rows.shape, rows.dtype

  def __len__(self):
    return len(self.rows)

  def __getitem__(self, part):
    self.seen.append((part.start, min(part.stop, len(self.rows))))
    return self.rows[part]


def assert_same(found, expected):
  np.testing.assert_array_equal(found[1], expected[1])
  np.testing.assert_array_equal(found[0], expected[0])


# Documents, queries, k, block_size, chunk_size and devices: blocks and chunks
# that fit and that do not, a device without documents, k above a block, above
# a device's share and above the collection.
@pytest.mark.parametrize(
  ("rows", "asked", "k", "block", "chunk", "devices"),
  [
    (512, 7, 10, 32, None, 8),
    (509, 7, 10, 32, None, 8),
    (509, 3, 100, 16, 120, 8),
    (509, 3, 100, 16, 121, 3),
    (300, 5, 40, 7, 64, 1),
    (9, 4, 5, 1, None, 8),
    (5, 4, 50, 64, None, 8),
    (1, 1, 1, 1, 1, 2),
  ],
)
def test_ties_stand_by_position_however_the_work_is_cut(
  rows, asked, k, block, chunk, devices
):
  documents, queries = whole_numbers(rows, 3, rows), whole_numbers(asked, 3, 1)
  found = topk.search(
    queries,
    documents,
    k,
    block_size=block,
    chunk_size=chunk,
    devices=jax.devices()[:devices],
  )
  assert_same(found, oracle(queries, documents, k))
  assert found[0].dtype == np.float32 and found[1].dtype == np.int64


@pytest.mark.slow
def test_it_agrees_with_faiss_on_a_hundred_thousand_vectors():
  documents, queries = normal(100_000, 128, 0), normal(300, 128, 1)
  scores, places = topk.search(queries, documents, 100, devices=jax.devices())
  flat = faiss.IndexFlatIP(128)
  flat.add(documents)
  their_scores, their_places = flat.search(queries, 100)
  np.testing.assert_allclose(scores, their_scores, atol=1e-4)
  # Scores that differ in the last bits of float32 may change places.
  exact, best = index.exact(documents).search(queries, 101)
  apart = np.minimum(
    exact[:, :-1] - exact[:, 1:],
    np.diff(-exact, axis=1, prepend=-np.inf)[:, :-1],
  )
  clear = apart > 1e-4
  assert clear.mean() > 0.98
  np.testing.assert_array_equal(places[clear], their_places[clear])
  np.testing.assert_array_equal(places[clear], best[:, :-1][clear])


def test_more_queries_than_are_scored_at_once():
  documents, queries = whole_numbers(50, 4, 2), whole_numbers(2051, 4, 3)
  found = topk.search(queries, documents, 5, devices=jax.devices()[:2])
  assert_same(found, oracle(queries, documents, 5))
  assert topk._in_groups(queries).shape == (3, 684, 4)


def test_documents_on_disk_are_read_once_in_chunks(tmp_path):
  documents, queries = whole_numbers(1000, 8, 4), whole_numbers(5, 8, 5)
  np.save(tmp_path / "vectors.npy", documents)
  mapped = Sliced(np.load(tmp_path / "vectors.npy", mmap_mode="r"))
  found = topk.search(
    queries, mapped, 30, chunk_size=300, devices=jax.devices()[:4]
  )
  assert_same(found, oracle(queries, documents, 30))
  assert mapped.seen == [(0, 252), (252, 504), (504, 756), (756, 1000)]


@pytest.mark.parametrize("rows", [64, 61])
def test_documents_that_are_on_devices_already_are_searched_there(rows):
  documents, queries = whole_numbers(rows, 4, 6), whole_numbers(5, 4, 7)
  placed = jnp.asarray(documents)
  found = topk.search(queries, placed, 9, block_size=5, devices=jax.devices())
  assert_same(found, oracle(queries, documents, 9))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.float64])
def test_other_precisions_of_documents_are_scored_in_float32(dtype):
  documents, queries = normal(200, 16, 8).astype(dtype), normal(4, 16, 9)
  scores, places = topk.search(queries, documents, 6)
  expected, order = oracle(queries, documents.astype(np.float32), 6)
  np.testing.assert_array_equal(places, order)
  np.testing.assert_allclose(scores, expected, rtol=1e-5)


def test_a_zero_with_a_minus_ties_with_one_without():
  documents = np.array([[-1], [1], [-1], [1]], np.float32)
  _, places = topk.search(np.zeros((1, 1), np.float32), documents, 4)
  np.testing.assert_array_equal(places, [[0, 1, 2, 3]])


def test_no_matrix_of_all_queries_and_documents_is_made():
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("documents",))
  groups, queries, dim, documents, k = 4, 1024, 16, 1 << 20, 10

  def shape(*axes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(axes, dtype)

  best = (
    shape(groups, queries, k),
    shape(groups, queries, k, dtype=jnp.int32),
    shape(dtype=bool),
  )
  number = shape(dtype=jnp.int32)
  compiled = topk._search_chunk.lower(
    best, shape(groups, queries, dim), shape(documents, dim), number, number,
    mesh=mesh, block_size=2048,
  ).compile()  # fmt: skip
  needed = compiled.memory_analysis().temp_size_in_bytes
  # A group's scores are 8 MiB a device, the matrix would be 2 GiB a device.
  assert 2**23 <= needed < 2**27


def test_no_queries_give_no_rows():
  scores, places = topk.search(normal(0, 4, 6), normal(7, 4, 5), k=9)
  assert scores.shape == places.shape == (0, 7)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e38])
def test_scores_that_are_not_finite_are_refused(bad):
  documents = normal(50, 4, 10)
  documents[31, 2] = bad
  queries = np.array([[1, -1, 1e3, 1], [1, -1, -1e3, 1]], np.float32)
  for i in range(2):  # also where the one document scores least
    with pytest.raises(ValueError, match="expected finite scores"):
      topk.search(queries[i : i + 1], documents, 1, block_size=8, chunk_size=20)


def test_bad_arguments_are_refused():
  documents, queries = normal(5, 4, 7), normal(1, 4, 7)
  with pytest.raises(ValueError, match=r"got shape \(0, 4\)"):
    topk.search(queries, documents[:0], 1)
  with pytest.raises(ValueError, match=r"got shape \(4,\)"):
    topk.search(queries, documents[0], 1)
  with pytest.raises(ValueError, match="dim=4, got k=1 and dim=3"):
    topk.search(queries[:, :3], documents, 1)
  with pytest.raises(ValueError, match="k >= 1 .* got k=0"):
    topk.search(queries, documents, 0)
  with pytest.raises(ValueError, match="got block_size=0"):
    topk.search(queries, documents, 1, block_size=0)
  with pytest.raises(ValueError, match="chunk_size=0"):
    topk.search(queries, documents, 1, chunk_size=0)
  with pytest.raises(ValueError, match="expected devices, got none"):
    topk.search(queries, documents, 1, devices=[])
  queries[0, 0] = np.nan
  with pytest.raises(ValueError, match="expected finite queries"):
    topk.search(queries, documents, 1)
