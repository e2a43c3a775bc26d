import numpy as np
import pytest

from synthq_jax.data import blocks
from synthq_jax.retrieval import vector_files
from synthq_jax.stages import _search


def _vectors(rows=23):
  rng = np.random.default_rng(0)
  return rng.normal(size=(rows, 4)).astype(np.float32)


def _write(directory, numbers=range(5), rows=23, made_of="encoder tokens"):
  files, vectors = vector_files.files(directory), _vectors(rows)
  parts = vector_files.of_shard(rows, block_rows=5, shard=0, num_shards=1)
  for number in numbers:
    files.write(number, vectors[parts[number]], made_of=made_of)
  return files


@pytest.mark.parametrize("num_shards", [1, 3, 9])
def test_shards_hold_every_block_once_in_order(num_shards):
  shards = [
    vector_files.of_shard(23, block_rows=5, shard=s, num_shards=num_shards)
    for s in range(num_shards)
  ]
  assert [number for shard in shards for number in shard] == list(range(5))
  assert max(map(len, shards)) - min(map(len, shards)) <= 1
  parts = [part for shard in shards for part in shard.values()]
  rows = np.concatenate([np.arange(23)[part] for part in parts])
  np.testing.assert_array_equal(rows, np.arange(23))


@pytest.mark.parametrize("rows", [20, 23])
def test_parts_are_those_of_the_whole(tmp_path, rows):
  _write(tmp_path, range(-(-rows // 5)), rows)
  whole, vectors = _vectors(rows), vector_files.open_vectors(tmp_path, rows)
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


def test_too_few_or_too_many_vectors_are_refused(tmp_path):
  with pytest.raises(ValueError, match="expected 23 vectors, got 0; finish"):
    vector_files.open_vectors(tmp_path / "nothing", 23)
  _write(tmp_path, [0, 1, 3, 4])
  with pytest.raises(ValueError, match="expected 23 vectors, got 18; finish"):
    vector_files.open_vectors(tmp_path, 23)
  _write(tmp_path)
  with pytest.raises(ValueError, match="expected 20 vectors, got 23; .*delete"):
    vector_files.open_vectors(tmp_path, 20)


def test_damaged_files_are_refused(tmp_path):
  _write(tmp_path)
  path = tmp_path / "block_00002.npy"
  whole = path.read_bytes()
  for damage in (
    lambda: path.write_bytes(whole[:-4]),
    lambda: path.unlink(),
    lambda: np.save(path, _vectors()[:4]),
  ):
    damage()
    with pytest.raises(ValueError, match="block_00002.npy|expected 23 vectors"):
      vector_files.open_vectors(tmp_path, 23)


def test_blocks_of_two_encoders_are_never_mixed(tmp_path):
  _write(tmp_path, [0, 2, 4])
  _write(tmp_path, [1, 3], made_of="other tokens")  # at the same time
  with pytest.raises(
    ValueError, match="of one encoder, got several, or .*; delete"
  ):
    vector_files.open_vectors(tmp_path, 23)
  _write(tmp_path, [1, 3], made_of="encoder other")  # of blocks of other tokens
  assert len(vector_files.open_vectors(tmp_path, 23)) == 23


def test_a_block_counts_only_while_its_mark_describes_it(tmp_path):
  files = _write(tmp_path)

  def has(made_of):
    return files.read(1, made_of=made_of) is not None

  assert has("encoder tokens") and not has("encoder other") and not has("")
  np.save(tmp_path / "block_00001.npy", _vectors()[:5] + 1)
  assert not has("encoder tokens")
  (tmp_path / "block_00001.sha256").write_bytes(b"\xff" * 70)
  assert not has("encoder tokens")
  (tmp_path / "block_00001.sha256").unlink()
  assert not has("encoder tokens")


def test_a_kill_between_the_two_files_leaves_no_block(tmp_path, monkeypatch):
  files = _write(tmp_path)

  def killed(*args):
    raise KeyboardInterrupt

  monkeypatch.setattr(blocks.artifacts, "write_atomically", killed)
  with pytest.raises(KeyboardInterrupt):
    files.write(1, _vectors()[:5], made_of="encoder new")
  for made_of in ("encoder tokens", "encoder new"):
    assert files.read(1, made_of=made_of) is None
  with pytest.raises(ValueError, match="of one encoder, got several"):
    vector_files.open_vectors(tmp_path, 23)


def test_links_that_a_kill_has_cut_short_are_completed(tmp_path, monkeypatch):
  """Blocks that were not linked were encoded again: hours, of millions."""
  old, new = tmp_path / "vectors_a", tmp_path / "vectors_b"
  _write(old)
  _write(new, [0], made_of="other encoder")  # the kill came after one block
  own = vector_files.files(new).path(0).read_bytes()
  monkeypatch.setattr(_search, "_BLOCK", 5)
  _search.link_earlier(new, 13)
  assert sorted(path.name for path in new.glob("*.npy")) == [
    f"block_{number:05}.npy" for number in range(3)
  ]
  assert vector_files.files(new).path(0).read_bytes() == own
  for number in (1, 2):
    made = vector_files.files(new).read(number, made_of="encoder tokens")
    np.testing.assert_array_equal(made, _vectors()[number * 5 :][:5])


@pytest.mark.parametrize("lost", [None, 2, 3])
def test_a_collection_that_became_shorter_has_no_blocks_too_many(
  tmp_path, lost
):
  """After a kill, a block behind a gap stayed, and no search opened them."""
  folder = _write(tmp_path)
  if lost is not None:
    for path in folder.paths(lost):
      path.unlink()
  vector_files.shorten(tmp_path, 10, block_rows=5)
  found = vector_files.open_vectors(tmp_path, 10)
  np.testing.assert_array_equal(found, _vectors()[:10])
  assert len([*tmp_path.iterdir()]) == 4  # two blocks and their marks
