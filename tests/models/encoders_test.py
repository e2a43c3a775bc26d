"""The protocol of encoders: every kind of net gives unit vectors through it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_t5

from synthq_jax.models import (
  bert,
  encoders,
  image_encoders,
  static_vectors,
  t5_config,
)

TOKENS = jnp.array([[5, 9, 3, 1], [7, 2, 0, 0], [0, 0, 0, 0]])
BERT = bert.BertConfig(
  vocab_size=12, emb_dim=8, num_heads=2, mlp_dim=16, num_layers=1, max_length=8
)
NET = image_encoders.EmbeddingNet()
STATIC = static_vectors.StaticConfig(vocab_size=12, emb_dim=8)
IMAGES = jnp.asarray(np.random.default_rng(0).uniform(size=(3, 8, 8, 1)))


def cases():
  tiny = t5_config.get("tiny")
  yield "t5", tiny, lambda: random_t5.params(tiny), TOKENS, [1, 1, 0]
  yield "bert", BERT, lambda: bert.init_params(BERT, key()), TOKENS, [1, 1, 0]
  yield "static", STATIC, table, TOKENS, [1, 1, 0]
  yield "net", NET, lambda: NET.init(key(), IMAGES)["params"], IMAGES, [1, 1, 1]


def table():
  return static_vectors.init(key(), STATIC, jnp.ones(12))


def key():
  return jax.random.key(0)


@pytest.mark.parametrize("name, shape, params, inputs, lengths", cases())
def test_every_shape_has_an_encoder_that_jit_takes_as_static(
  name, shape, params, inputs, lengths
):
  encoder = encoders.of(shape)
  assert encoders.of(encoder) is encoder and encoder == encoders.of(shape)
  encode = jax.jit(type(encoder).encode, static_argnums=0)
  vectors = encode(encoder, encoder.select(params()), inputs)
  assert vectors.shape == (3, encoder.dim), name
  np.testing.assert_allclose(
    np.linalg.norm(vectors, axis=1), lengths, atol=1e-5
  )


def test_a_t5_and_a_bert_have_another_pooling_and_a_net_has_not():
  tiny = dataclasses.replace(t5_config.get("tiny"))
  assert encoders.of(tiny, pooling="first") != encoders.of(tiny)
  with pytest.raises(ValueError, match="among .*got pooling='last'"):
    encoders.of(tiny, pooling="last")
  with pytest.raises(ValueError, match="T5 or BERT, got pooling='first'"):
    encoders.of(NET, pooling="first")
  with pytest.raises(ValueError, match="T5 or BERT, got pooling='first'"):
    encoders.of(STATIC, pooling="first")
  with pytest.raises(ValueError, match="among .*got pooling='last'"):
    encoders.of(BERT, pooling="last")
