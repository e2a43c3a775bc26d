"""Caches on disk: what goes in comes out, complete or not at all."""

import gc
import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synthq_jax.data import token_cache
from synthq_jax.privacy import sampling

NAMES = st.text(
  st.characters(blacklist_characters="\n", blacklist_categories=["Cs"]),
  max_size=6,
)


def write(place, rows, names, *, vocab_size=100, block=3):
  length = rows.shape[1]
  with token_cache.writing(place, length, vocab_size=vocab_size) as writer:
    for start in range(0, len(rows), block):
      part = slice(start, start + block)
      writer.append(rows[part], names[part])
  return token_cache.load(place)


@pytest.fixture
def place(tmp_path):
  return tmp_path / "cache"


@pytest.fixture
def small(place):
  rows = np.arange(40).reshape(10, 4)
  return write(place, rows, [f"d{n}" for n in range(10)]), rows


@settings(deadline=None, max_examples=40)
@given(
  names=st.lists(NAMES, max_size=9),
  length=st.integers(1, 5),
  block=st.integers(1, 4),
  wide=st.booleans(),
  seed=st.integers(0, 99),
)
def test_records_come_back_as_they_were(
  tmp_path_factory, names, length, block, wide, seed
):
  vocab_size = 70_000 if wide else 1 << 16
  rng = np.random.default_rng(seed)
  rows = rng.integers(0, vocab_size, (len(names), length))
  place = tmp_path_factory.mktemp("caches") / "cache"
  cache = write(place, rows, names, vocab_size=vocab_size, block=block)
  assert len(cache) == len(names)
  assert list(cache.ids) == names
  chosen = rng.integers(0, len(names), 7) if names else np.zeros(0, int)
  taken = cache.tokens[chosen]
  assert taken.dtype == np.int32
  np.testing.assert_array_equal(taken, rows[chosen])
  stored = os.path.getsize(place / "tokens.npy") - 128
  assert stored == rows.size * (4 if wide else 2)


def test_rows_are_a_number_a_slice_a_mask_or_an_array(small):
  cache, rows = small
  column = cache.tokens
  assert column.shape == rows.shape
  for index in (
    3,
    -1,
    slice(2, 5),
    rows[:, 0] > 11,
    np.array([7, 0, 7]),
    np.array([-1, 9, -10]),
    np.array([], int),
    np.array([3], np.uint8),
  ):
    np.testing.assert_array_equal(column[index], rows[index])
    assert column[index].dtype == np.int32
  with pytest.raises(IndexError):
    column[np.array([10])]
  assert cache.ids[-1] == "d9"
  assert cache.ids[1:3] == ["d1", "d2"]


def test_rows_are_mapped_where_they_cannot_be_read(small, monkeypatch):
  cache, rows = small
  monkeypatch.delattr(os, "preadv")
  chosen = np.array([9, 0, 4])
  np.testing.assert_array_equal(cache.tokens[chosen], rows[chosen])


def test_a_file_that_shrinks_while_it_is_open_is_no_silent_row(small, place):
  cache, _ = small
  os.truncate(place / "tokens.npy", 200)
  with pytest.raises(OSError, match="tokens.npy: the file became shorter"):
    cache.tokens[np.array([9])]


def test_poisson_batches_of_a_cache_are_those_of_the_array(small):
  cache, rows = small
  sampler = sampling.Poisson(
    num_examples=10, expected_batch_size=4, max_batch_size=8
  )
  sizes = set()
  for step in range(20):
    batch = sampler.batch(seed=5, step=step)
    taken = sampler.take({"inputs": cache.tokens}, batch)
    np.testing.assert_array_equal(taken["is_padding_example"], batch.is_padding)
    taken = taken["inputs"]
    real = ~batch.is_padding
    for alone in (batch, batch.indices):  # whose padding was a row of zeros
      with pytest.raises(TypeError, match=r"call sampler\.take"):
        cache.tokens[np.asarray(alone)]
    np.testing.assert_array_equal(taken[real], rows[batch.indices[real]])
    assert not taken[~real].any()
    sizes.add(int(np.sum(~batch.is_padding)))
  assert len(sizes) > 2


@pytest.mark.parametrize("longer", [False, True])
@pytest.mark.parametrize("file", ["tokens.npy", "ids.txt"])
@pytest.mark.usefixtures("small")
def test_a_file_of_another_length_is_refused(place, file, longer):
  path = place / file
  whole = path.read_bytes()
  path.write_bytes(whole + whole[-8:] if longer else whole[:-9])
  with pytest.raises(ValueError, match="write the cache again"):
    token_cache.load(place)


@pytest.mark.usefixtures("small")
def test_a_missing_file_or_manifest_is_refused(place, tmp_path):
  with pytest.raises(ValueError, match="expected the manifest of a token"):
    token_cache.load(tmp_path)
  (place / "ids.txt").unlink()
  with pytest.raises(ValueError, match="files that its manifest describes"):
    token_cache.load(place)
  (place / "manifest.json").write_text('{"format": 0}')
  with pytest.raises(ValueError, match="expected a token cache of format 1"):
    token_cache.load(place)


@pytest.mark.usefixtures("small")
def test_a_cache_of_an_earlier_version_is_read(place):
  """Its manifest describes columns, and notes no size of the ids."""
  manifest = {
    "format": 1, "num_records": 10, "names": {"ids": "digest"},
    "columns": {"tokens": {"length": 4, "dtype": "<u2", "sha256": "digest"}},
  }  # fmt: skip
  (place / "manifest.json").write_text(json.dumps(manifest))
  assert token_cache.load(place).ids[-1] == "d9"


def test_a_cache_goes_to_other_processes(small):
  cache, rows = small
  copy = pickle.loads(pickle.dumps(cache))
  np.testing.assert_array_equal(copy.tokens[:], rows)
  np.testing.assert_array_equal(copy.tokens[np.array([3, 1])], rows[[3, 1]])
  assert copy.ids[2:5] == ["d2", "d3", "d4"]
  assert copy.ids[::4] == ["d0", "d4", "d8"]


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_a_cache_that_is_let_go_closes_its_files(place):
  rows = np.zeros((2, 2), int)
  cache = write(place, rows, ["a", "b"])
  number = cache.tokens._files[0]
  os.fstat(number)
  del cache
  gc.collect()
  with pytest.raises(OSError, match="Bad file descriptor"):
    os.fstat(number)


KILLED = """
import os, sys, numpy as np
from synthq_jax.data import token_cache
with token_cache.writing(sys.argv[1], 2, vocab_size=9) as writer:
  writer.append(np.zeros((3, 2), int), list("abc"))
  os.kill(os.getpid(), 9)
"""


def test_a_kill_leaves_nothing_that_looks_finished(tmp_path):
  place = tmp_path / "cache"
  done = subprocess.run([sys.executable, "-c", KILLED, str(place)], check=False)
  assert done.returncode == -9
  assert not place.exists()
  assert len(list(tmp_path.iterdir())) == 1  # hidden, and replaced:
  assert len(write(place, np.ones((2, 2), int), ["a", "b"])) == 2
  assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.parametrize(
  ("tokens", "ids", "message"),
  [
    (np.zeros((2, 4), int), ["a", "b"], r"shape \(2, 3\)"),
    (np.full((2, 3), -1), ["a", "b"], "got -1 to -1"),
    (np.zeros((2, 3), int), ["a", "b\nc"], "without line feeds"),
  ],
)
def test_a_block_that_does_not_fit_is_refused(tmp_path, tokens, ids, message):
  with pytest.raises(ValueError, match=message):
    with token_cache.writing(tmp_path / "cache", 3, vocab_size=50) as writer:
      writer.append(tokens, ids)
  assert list(tmp_path.iterdir()) == []
