import functools

import jax
import numpy as np
import pytest

from synthq_jax.models import dual_encoder, t5, t5_config
from synthq_jax.retrieval import encode

_CONFIG = t5_config.get("tiny")


@functools.cache
def _params():
  """Random parameters, without the initialisers, which compile slowly."""
  shapes = jax.eval_shape(
    functools.partial(t5.init_params, _CONFIG), jax.random.key(0)
  )
  rng = np.random.default_rng(0)

  def fill(path, leaf):
    noise = rng.normal(size=leaf.shape).astype(np.float32)
    if path[-1].key == "kernel":
      return noise / leaf.shape[0] ** 0.5
    return 1 + 0.1 * noise if path[-1].key == "scale" else noise

  return jax.tree.map_with_path(fill, shapes)


def _tokens(count=23, longest=32):
  rng = np.random.default_rng(0)
  tokens = rng.integers(2, _CONFIG.vocab_size, (count, longest))
  lengths = rng.integers(0, longest + 1, count)
  tokens[np.arange(longest) >= lengths[:, None]] = 0
  return tokens.astype(np.int32)


@pytest.mark.parametrize("batch_size", [4, 64])
def test_batched_vectors_equal_unbatched_ones_in_order(batch_size):
  tokens = _tokens()
  vectors = encode.encode(_params(), _CONFIG, tokens, batch_size=batch_size)
  unbatched = jax.jit(dual_encoder.encode, static_argnums=1)
  expected = unbatched(_params(), _CONFIG, tokens)
  assert vectors.dtype == np.float32
  np.testing.assert_allclose(vectors, expected, atol=2e-6)


def test_a_row_keeps_its_exact_vector_whatever_stands_around_it():
  tokens = _tokens()
  vectors = encode.encode(_params(), _CONFIG, tokens, batch_size=4)
  part = encode.encode(_params(), _CONFIG, tokens[7:12], batch_size=4)
  np.testing.assert_array_equal(part, vectors[7:12])


def test_progress_adds_up_and_no_rows_give_no_vectors():
  done = []
  encode.encode(
    _params(), _CONFIG, _tokens(), batch_size=4, progress=done.append
  )
  assert sum(done) == 23
  empty = encode.encode(_params(), _CONFIG, np.zeros((0, 8), np.int32))
  assert empty.shape == (0, _CONFIG.emb_dim)
