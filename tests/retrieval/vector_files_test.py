import dataclasses
import pickle

import numpy as np
import pytest

from synthq_jax.retrieval import index, vector_files

_LAYOUT = vector_files.Layout(encoder="e", rows=23, dim=4, block_rows=5)


def _vectors(rows=23):
  rng = np.random.default_rng(0)
  return rng.normal(size=(rows, 4)).astype(np.float32)


def _write(directory, numbers=range(5), num_shards=1, layout=_LAYOUT):
  writer = vector_files.Writer(directory, layout, num_shards)
  for number in numbers:
    first, stop = layout.bounds(number)
    writer.write(number, "source", _vectors(layout.rows)[first:stop])
  return writer


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5, 9])
def test_shards_hold_every_block_once_in_order(num_shards):
  shards = [_LAYOUT.of_shard(s, num_shards) for s in range(num_shards)]
  assert [number for shard in shards for number in shard] == list(range(5))
  assert max(map(len, shards)) - min(map(len, shards)) <= 1


@pytest.mark.parametrize("rows", [20, 23])
def test_parts_are_those_of_the_whole(tmp_path, rows):
  layout = dataclasses.replace(_LAYOUT, rows=rows)
  _write(tmp_path, range(layout.num_blocks), layout=layout)
  whole, vectors = _vectors(rows), vector_files.open_vectors(tmp_path)
  assert len(vectors) == rows and vectors.shape == whole.shape
  assert vectors.dtype == whole.dtype
  np.testing.assert_array_equal(np.asarray(vectors), whole)
  np.testing.assert_array_equal(list(vectors), whole)
  for part in (
    *(slice(a, b) for a in range(0, 24) for b in (0, 4, 5, 10, 17, 20, 23, 99)),
    slice(None), slice(-3, None), slice(3, 19, 4), slice(None, None, -1),
    0, -1, 7, [3, 3, 19, 0], np.array([[4, 5], [-1, 9]]),
    np.array([], int), whole[:, 0] > 0,
  ):  # fmt: skip
    got = vectors[part]
    np.testing.assert_array_equal(got, whole[part])
    assert got.dtype == np.float32
  for bad in (rows, -rows - 1, [0, rows]):
    with pytest.raises(IndexError, match=f"expected positions below {rows}"):
      vectors[bad]
  with pytest.raises(IndexError, match="got an array of float"):
    vectors[np.ones(rows)]


def test_a_slice_inside_a_block_is_not_read(tmp_path):
  _write(tmp_path)
  vectors = vector_files.open_vectors(tmp_path)
  assert isinstance(vectors[5:9], np.memmap)
  assert all(isinstance(block, np.memmap) for block in vectors.blocks)


def test_another_process_opens_the_files_again(tmp_path):
  _write(tmp_path)
  vectors = vector_files.open_vectors(tmp_path)
  packed = pickle.dumps(vectors)
  assert len(packed) < 2000  # the places, not the numbers
  np.testing.assert_array_equal(pickle.loads(packed)[:], _vectors())


def test_every_search_takes_them(tmp_path):
  _write(tmp_path)
  whole, vectors = _vectors(), vector_files.open_vectors(tmp_path)
  best = index.exact(whole).search(whole[:6], 3)[1]
  config = index.HNSW(links=4, ef_search=23, seed=0)
  for found in (
    index.exact(vectors).search(whole[:6], 3),
    config.build(vectors).search(whole[:6], 3),
  ):
    np.testing.assert_array_equal(found[1], best)


def test_what_is_missing_is_named_with_its_shards(tmp_path):
  with pytest.raises(ValueError, match="expected blocks of vectors, got none"):
    vector_files.open_vectors(tmp_path / "nothing")
  _write(tmp_path, [0, 1], num_shards=3)
  with pytest.raises(
    ValueError, match="5 blocks, got none for 2, 3, 4; .* shard 1, 2 of 3"
  ):
    vector_files.open_vectors(tmp_path)
  _write(tmp_path, [2, 4], num_shards=3)
  with pytest.raises(ValueError, match="none for 3; .* for shard 2 of 3"):
    vector_files.open_vectors(tmp_path)


def test_damaged_files_are_refused(tmp_path):
  _write(tmp_path)
  path = tmp_path / "block_00002.npy"
  whole = path.read_bytes()
  for damage in (
    lambda: path.write_bytes(whole[:-4]),
    lambda: path.unlink(),
    lambda: np.save(path, _vectors()[:4]),
    lambda: np.save(path, _vectors()[:5].astype(np.float64)),
  ):
    damage()
    with pytest.raises(ValueError, match="block_00002.npy: expected float32"):
      vector_files.open_vectors(tmp_path)


def test_blocks_of_two_encoders_are_never_mixed(tmp_path):
  other = dataclasses.replace(_LAYOUT, encoder="f")
  first = vector_files.Writer(tmp_path, _LAYOUT, 1)
  second = vector_files.Writer(tmp_path, other, 1)  # at the same time
  for number in range(5):
    writer = (first, second)[number % 2]
    start, stop = _LAYOUT.bounds(number)
    writer.write(number, "source", _vectors()[start:stop])
  with pytest.raises(
    ValueError, match="block_0000[024].npy and block_0000[13]"
  ):
    vector_files.open_vectors(tmp_path)
  with pytest.raises(ValueError, match="encoder='e'.*encoder='f'"):
    vector_files.Writer(tmp_path, _LAYOUT, 1)


def test_a_block_counts_only_while_its_record_describes_it(tmp_path):
  writer = _write(tmp_path)
  assert writer.has(1, "source") and not writer.has(1, "other")
  np.save(tmp_path / "block_00001.npy", _vectors()[:5] + 1)
  assert not writer.has(1, "source")


def test_a_kill_between_the_two_files_leaves_no_block(tmp_path, monkeypatch):
  writer = _write(tmp_path)

  def killed(*args):
    raise KeyboardInterrupt

  monkeypatch.setattr(vector_files.artifacts, "write_atomically", killed)
  with pytest.raises(KeyboardInterrupt):
    writer.write(1, "new", _vectors()[:5])
  assert not writer.has(1, "source") and not writer.has(1, "new")
  with pytest.raises(ValueError, match="got none for 1;"):
    vector_files.open_vectors(tmp_path)


def test_vectors_of_another_shape_are_refused(tmp_path):
  writer = vector_files.Writer(tmp_path, _LAYOUT, 1)
  with pytest.raises(ValueError, match=r"shape \(3, 4\) in block 4, got .*\(5"):
    writer.write(4, "source", _vectors()[:5])
  with pytest.raises(ValueError, match="rows >= 1, got rows=0"):
    dataclasses.replace(_LAYOUT, rows=0)
