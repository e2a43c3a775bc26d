import dataclasses
import itertools
import pathlib
import threading

import jax
import numpy as np
import pytest
import random_t5

from synthq_jax.models import (
  device_rows,
  dual_encoder,
  encoders,
  static_vectors,
  t5_config,
)
from synthq_jax.retrieval import encode, vector_files

_CONFIG = t5_config.get("tiny")


def _params():
  return random_t5.params(_CONFIG)


def _tokens(count=23, longest=32):
  rng = np.random.default_rng(0)
  tokens = rng.integers(2, _CONFIG.vocab_size, (count, longest))
  lengths = rng.integers(0, longest + 1, count)
  tokens[np.arange(longest) >= lengths[:, None]] = 0
  return tokens.astype(np.int32)


def test_batched_vectors_equal_unbatched_ones_in_order():
  tokens = _tokens()
  vectors = encode.encode(_params(), _CONFIG, tokens, batch_size=4)
  unbatched = jax.jit(dual_encoder.encode, static_argnums=1)
  expected = unbatched(_params(), _CONFIG, tokens)
  assert vectors.dtype == np.float32
  np.testing.assert_allclose(vectors, expected, atol=2e-6)


_STATIC = static_vectors.StaticConfig(vocab_size=_CONFIG.vocab_size, emb_dim=16)


def _table():
  weights = np.ones(_CONFIG.vocab_size)
  return static_vectors.init(jax.random.key(0), _STATIC, weights)


@pytest.mark.parametrize("of", [(_params, _CONFIG), (_table, _STATIC)])
@pytest.mark.parametrize("devices", [1, 8])
def test_a_row_keeps_its_exact_vector_whatever_stands_around_it(devices, of):
  """What is private of one row is decided by its vector, to the last bit."""
  tokens, generator = _tokens(count=257, longest=24), np.random.default_rng(2)

  def vectors(rows):
    params, shape = of
    return encode.encode(
      params(),
      shape,
      tokens[rows],
      batch_size=8,
      devices=jax.devices()[:devices],
    )

  whole = vectors(np.arange(257))
  for count in (1, 3, 8, 31, 257):
    rows = generator.permutation(257)[:count]
    np.testing.assert_array_equal(vectors(rows), whole[rows])


def test_batches_of_a_shape_run_at_once_on_the_cores_of_a_cpu(monkeypatch):
  """All but the first of a shape, whose program is compiled once."""
  tokens = _tokens(count=90)
  monkeypatch.setattr(device_rows, "CPU_TOKENS", 128)
  monkeypatch.setattr(device_rows, "count_cores", lambda: 1)
  expected = encode.encode(_params(), _CONFIG, tokens)
  original, meeting, alone, met = encode._encode, threading.Barrier(2), [], []
  numbers = itertools.count()

  def meet(params, rows, **options):
    if threading.current_thread() is threading.main_thread():
      alone.append(rows.shape)
    elif next(numbers) < 2:  # waits for another batch
      met.append(meeting.wait(timeout=60))
    return original(params, rows, **options)

  monkeypatch.setattr(device_rows, "count_cores", lambda: 3)
  monkeypatch.setattr(encode, "_encode", meet)
  done = []
  vectors = encode.encode(_params(), _CONFIG, tokens, progress=done.append)
  np.testing.assert_array_equal(vectors, expected)
  assert alone == [(4, 32), (8, 16)]
  assert sorted(met) == [0, 1]
  assert sum(done) == 90


def test_a_batch_that_fails_in_a_thread_ends_the_encoding(monkeypatch):
  def fail(params, rows, **options):
    if threading.current_thread() is not threading.main_thread():
      raise MemoryError("no room")
    return original(params, rows, **options)

  original = encode._encode
  monkeypatch.setattr(device_rows, "CPU_TOKENS", 128)
  monkeypatch.setattr(device_rows, "count_cores", lambda: 2)
  monkeypatch.setattr(encode, "_encode", fail)
  with pytest.raises(MemoryError, match="no room"):
    encode.encode(_params(), _CONFIG, _tokens(count=90))


def test_eight_devices_give_each_row_the_numbers_of_one():
  tokens = _tokens(count=90)
  one = encode.encode(_params(), _CONFIG, tokens, batch_size=4)
  # 4 rows for each device, after rounding up.
  eight = encode.encode(
    _params(), _CONFIG, tokens, batch_size=31, devices=jax.devices()
  )
  np.testing.assert_array_equal(eight, one)


def test_a_batch_is_split_over_the_devices(monkeypatch):
  shapes = []

  def noted(params, config, tokens, **options):
    shapes.append(tokens.shape)
    return dual_encoder.encode(params, config, tokens, **options)

  monkeypatch.setitem(encoders._OF_TOKENS, type(_CONFIG), noted)
  tokens = _tokens(count=6, longest=11)
  encode.encode(
    _params(), _CONFIG, tokens, batch_size=10, devices=jax.devices()[:3]
  )
  assert shapes == [(4, 11)]


class Unread:
  """Tokens of which only short slices may be read."""

  def __init__(self, tokens, most):
    self.tokens, self.most, self.seen = tokens, most, []

  def __len__(self):
    return len(self.tokens)

  def __getitem__(self, rows):
    part = self.tokens[rows]
    assert isinstance(rows, slice) and len(part) <= self.most
    self.seen.append((rows.start, rows.stop))
    return part


def _write(directory, tokens=None, **changed):
  arguments = {"block_rows": 5, "batch_size": 4, **changed}
  tokens = _tokens() if tokens is None else tokens
  params = arguments.pop("params", _params())
  config = arguments.pop("config", _CONFIG)
  encode.to_files(params, config, tokens, directory, **arguments)


def _content(directory):
  return {p.name: p.read_bytes() for p in pathlib.Path(directory).iterdir()}


def test_files_hold_the_vectors_of_all_shards_in_order(tmp_path):
  tokens, done = Unread(_tokens(), 5), []
  for shard in (1, 0):
    _write(tmp_path, tokens, shard=shard, num_shards=2, progress=done.append)
  assert sum(done) == 23
  assert tokens.seen == [(10, 15), (15, 20), (20, 23), (0, 5), (5, 10)]
  vectors = vector_files.open_vectors(tmp_path, 23)
  expected = encode.encode(_params(), _CONFIG, _tokens(), batch_size=4)
  np.testing.assert_array_equal(np.asarray(vectors), expected)


def test_a_run_that_was_stopped_goes_on_and_ends_like_one_that_was_not(
  tmp_path, monkeypatch
):
  _write(tmp_path / "whole")
  stopped = []

  def stop(rows):
    stopped.append(rows)
    if sum(stopped) > 12:
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    _write(tmp_path / "cut", progress=stop)
  assert len(_content(tmp_path / "cut")) == 4  # two blocks
  encoded = []
  real = encode.encode

  def counted(params, config, tokens, **others):
    encoded.append(len(tokens))
    return real(params, config, tokens, **others)

  monkeypatch.setattr(encode, "encode", counted)
  done = []
  _write(tmp_path / "cut", progress=done.append)
  assert encoded == [5, 5, 3] and sum(done) == 23
  assert _content(tmp_path / "cut") == _content(tmp_path / "whole")
  encoded.clear()
  _write(tmp_path / "cut")
  assert not encoded


def test_damaged_blocks_are_made_again_and_no_others(tmp_path):
  _write(tmp_path)
  before = _content(tmp_path)
  path = tmp_path / "block_00003.npy"
  path.write_bytes(path.read_bytes()[:-1] + b"x")
  whole = {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
  _write(tmp_path)
  assert _content(tmp_path) == before
  for other, time in whole.items():
    again = other.stem == path.stem
    assert (other.stat().st_mtime_ns != time) == again


def _other_params():
  params = jax.tree.map(np.copy, _params())
  params["encoder"]["encoder_norm"]["scale"][0] += 1
  return params


@pytest.mark.parametrize(
  "changed",
  [
    {"params": _other_params()},
    {
      "config": dataclasses.replace(_CONFIG, mlp_activations=("relu", "linear"))
    },
    {"tokens": _tokens()[::-1]},
  ],
  ids=["params", "config", "tokens"],
)
def test_blocks_of_something_else_are_made_again(tmp_path, changed):
  _write(tmp_path / "old")
  before = _content(tmp_path / "old")
  _write(tmp_path / "old", **changed)
  _write(tmp_path / "new", **changed)
  after, new = _content(tmp_path / "old"), _content(tmp_path / "new")
  assert new.items() <= after.items() and not new.items() & before.items()


def test_an_encoder_never_shares_a_folder_with_another(tmp_path):
  for shard, params in enumerate([_params(), _other_params()]):
    _write(tmp_path, params=params, shard=shard, num_shards=2)
  with pytest.raises(ValueError, match="of one encoder, got several"):
    vector_files.open_vectors(tmp_path, 23)
  for shard in range(2):
    _write(tmp_path, params=_other_params(), shard=shard, num_shards=2)
  expected = encode.encode(_other_params(), _CONFIG, _tokens(), batch_size=4)
  found = np.asarray(vector_files.open_vectors(tmp_path, 23))
  np.testing.assert_array_equal(found, expected)


def test_shards_that_do_not_exist_and_no_rows_are_refused(tmp_path):
  for shard, num_shards in ((2, 2), (-1, 2), (0, 0)):
    with pytest.raises(ValueError, match=f"shard in .*, got shard={shard}"):
      _write(tmp_path, shard=shard, num_shards=num_shards)
  with pytest.raises(ValueError, match="got rows=0"):
    _write(tmp_path, np.zeros((0, 8), np.int32))
  with pytest.raises(ValueError, match="expected devices, got none"):
    _write(tmp_path, devices=[])
  assert not _content(tmp_path)
