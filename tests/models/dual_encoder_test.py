import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_t5

from synthq_jax.models import dual_encoder, t5, t5_config

_CONFIG = t5_config.get("tiny")
_TOKENS = np.array([[5, 9, 3, 1, 0, 0], [7, 2, 8, 4, 6, 1], [0] * 6], np.int32)


def _params():
  return random_t5.params(_CONFIG)


_jitted = jax.jit(dual_encoder.encode, static_argnums=1)


def _encode(params, tokens, config=_CONFIG):
  return _jitted(params, config, tokens)


def test_a_vector_is_the_normalised_mean_over_real_tokens():
  model = t5.Transformer(_CONFIG)
  encode = jax.jit(functools.partial(model.apply, method="encode"))
  outputs = np.asarray(encode({"params": _params()}, _TOKENS))
  vectors = _encode(_params(), _TOKENS)
  for row, length in ((0, 4), (1, 6)):
    mean = outputs[row, :length].mean(axis=0)
    np.testing.assert_allclose(
      vectors[row], mean / np.linalg.norm(mean), atol=1e-6
    )


def test_a_row_of_padding_is_zero_with_finite_gradients():
  def total(params):
    return jnp.sum(_encode(params, _TOKENS) ** 3)

  assert not _encode(_params(), _TOKENS)[2].any()
  subset = dual_encoder.encoder_params(_params())
  gradients = jax.jit(jax.grad(total))(subset)
  leaves = jax.tree.leaves(gradients)
  assert all(np.isfinite(leaf).all() for leaf in leaves)
  assert any(np.asarray(leaf).any() for leaf in leaves)


def test_the_encoder_subset_gives_the_same_vectors_as_the_whole_t5():
  subset = dual_encoder.encoder_params(_params())
  assert sorted(subset) == ["encoder", "token_embedder"]
  np.testing.assert_array_equal(
    _encode(subset, _TOKENS),
    _encode(_params(), _TOKENS),
  )


def test_padding_and_other_rows_do_not_change_a_vector():
  vectors = _encode(_params(), _TOKENS)
  alone = _encode(_params(), _TOKENS[:1, :4])
  np.testing.assert_allclose(alone[0], vectors[0], atol=1e-6)


def test_vectors_are_float32_when_the_model_computes_in_bfloat16():
  config = dataclasses.replace(_CONFIG, dtype="bfloat16")
  vectors = _encode(_params(), _TOKENS, config)
  assert vectors.dtype == jnp.float32
  exact = _encode(_params(), _TOKENS)
  np.testing.assert_allclose(vectors, exact, atol=0.03)
  np.testing.assert_allclose(
    jnp.linalg.norm(vectors, axis=1), [1, 1, 0], atol=1e-6
  )


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_half_precision_neither_overflows_nor_vanishes(kind):
  """float16 gave vectors of 0 for norms above 256, and means of inf."""
  x = np.random.default_rng(0).normal(size=(3, 512)) * [[100], [1e-3], [0]]
  vectors = dual_encoder.normalize(jnp.asarray(x, kind))
  assert vectors.dtype == kind
  norms = np.linalg.norm(np.asarray(vectors, float), axis=1)
  np.testing.assert_allclose(norms, [1.0, 1.0, 0.0], atol=2e-3)
  outputs = jnp.full((1, 601, 2), 200.0, kind)
  tokens = jnp.ones((1, 601), jnp.int32)
  for pooling in dual_encoder.POOLINGS:
    pooled = dual_encoder.pool(outputs, tokens, pooling)
    np.testing.assert_allclose(np.asarray(pooled, float), 200.0, rtol=1e-6)


def test_missing_parts_are_refused():
  with pytest.raises(ValueError, match=r"got \['encoder'\]"):
    dual_encoder.encoder_params({"encoder": {}})
