"""Tables of token vectors: what they weigh, what they leave out, their files."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax import optim
from synthq_jax.models import (
  dual_encoder,
  encoders,
  static_vectors,
  t5_checkpoints,
  token_ids,
)
from synthq_jax.optim import strategies

SHAPE = static_vectors.StaticConfig(vocab_size=50, emb_dim=6)
TOKENS = jnp.array([[5, 9, 9, 1, 0], [3, 1, 0, 0, 0], [1, 0, 0, 0, 0]])


def made(shape=SHAPE, seed=0):
  weights = jnp.arange(shape.vocab_size) / shape.vocab_size
  return static_vectors.init(jax.random.key(seed), shape, weights)


def test_a_vector_is_the_direction_of_the_mean_without_eos_and_padding():
  params = made()
  table = np.asarray(params["token_embedder"]["embedding"])
  vectors = static_vectors.encode(params, SHAPE, TOKENS)
  first = table[5] + 2 * table[9]
  np.testing.assert_allclose(vectors[0], first / np.linalg.norm(first), 1e-5)
  np.testing.assert_allclose(
    vectors[1], table[3] / np.linalg.norm(table[3]), 1e-5
  )
  assert not np.any(vectors[2])
  moved = {"token_embedder": {"embedding": jnp.asarray(table).at[:2].add(7.0)}}
  np.testing.assert_array_equal(
    static_vectors.encode(moved, SHAPE, TOKENS), vectors
  )


def test_cosines_are_those_of_weighted_counts_but_for_chance():
  wide = dataclasses.replace(SHAPE, emb_dim=2048)
  rng = np.random.default_rng(0)
  texts = rng.integers(2, 50, (40, 7))
  weights = np.arange(50) / 50
  counts = np.zeros((40, 50))
  for row, text in zip(counts, texts, strict=True):
    np.add.at(row, text, weights[text])
  counts /= np.linalg.norm(counts, axis=1, keepdims=True)
  errors = []
  for seed in range(4):
    vectors = static_vectors.encode(made(wide, seed), wide, jnp.array(texts))
    errors.append(vectors @ vectors.T - counts @ counts.T)
  spread = np.std(np.stack(errors))
  assert 0.3 < spread * np.sqrt(2048) < 1
  assert abs(np.mean(errors)) < 0.2 / np.sqrt(2048)


def test_a_projection_may_be_written_into_the_table():
  params = made() | {
    dual_encoder.PROJECTION: {
      "kernel": jax.random.normal(jax.random.key(1), (6, 6))
    }
  }
  table = params["token_embedder"]["embedding"]
  kernel = params[dual_encoder.PROJECTION]["kernel"]
  merged = {"token_embedder": {"embedding": table @ kernel}}
  np.testing.assert_allclose(
    static_vectors.encode(params, SHAPE, TOKENS),
    static_vectors.encode(merged, SHAPE, TOKENS),
    atol=1e-5,
  )


@pytest.mark.parametrize("projection", [False, True])
def test_what_is_saved_is_loaded(tmp_path, projection):
  params = jax.device_get(made())
  if projection:
    params = dual_encoder.with_projection(params, SHAPE.emb_dim)
  t5_checkpoints.save(tmp_path, params, SHAPE)
  loaded, shape = t5_checkpoints.load(tmp_path)
  assert shape == SHAPE == t5_checkpoints.load_config(tmp_path)
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  t5_checkpoints.convert(tmp_path, tmp_path / "again", format="safetensors")
  assert t5_checkpoints.load(tmp_path / "again")[1] == SHAPE
  for name in ("t5x", "huggingface"):
    with pytest.raises(ValueError, match="expected a T5 .*got static vectors"):
      t5_checkpoints.convert(tmp_path, tmp_path / name, format=name)
    assert not (tmp_path / name).exists()
  with pytest.raises(ValueError, match="params: expected a T5 .*got static"):
    t5_checkpoints.save_huggingface(tmp_path / "hf", params, SHAPE)


def test_a_table_of_another_shape_is_refused(tmp_path):
  other = dataclasses.replace(SHAPE, emb_dim=8)
  t5_checkpoints.save(tmp_path, jax.device_get(made()), other)
  with pytest.raises(ValueError, match="embedding"):
    t5_checkpoints.load(tmp_path)
  with pytest.raises(ValueError, match="emb_dim"):
    static_vectors.StaticConfig(vocab_size=50, emb_dim=0)


@pytest.mark.parametrize("strategy", sorted(strategies.STRATEGIES))
def test_every_strategy_clips_the_table_as_single_examples_are(strategy):
  encode = encoders.of(SHAPE).encode

  def loss_fn(params, batch):
    asked = encode(params, batch["queries"])
    return 1 - jnp.sum(asked * encode(params, batch["documents"]), axis=1)

  params = made()
  rng = np.random.default_rng(1)
  batch = {
    name: jnp.asarray(rng.integers(0, 50, (5, 4)))
    for name in ("queries", "documents")
  }
  optim.check_independence(loss_fn, params, batch)
  grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=0.05, strategy=strategy)
  found, _ = jax.jit(grad_fn)(params, batch)
  total = np.zeros((50, 6))
  gradient = jax.jit(jax.grad(lambda params, one: loss_fn(params, one)[0]))
  for i in range(5):
    single = gradient(params, {k: v[i : i + 1] for k, v in batch.items()})
    values = np.asarray(single["token_embedder"]["embedding"])
    total += values * min(1, 0.05 / np.linalg.norm(values))
  np.testing.assert_allclose(
    found["token_embedder"]["embedding"], total, atol=1e-6
  )


def test_the_end_of_a_text_is_that_of_its_vocabulary():
  """ruT5's is 2; its 1, <s>, is a piece like any other."""
  ids = token_ids.TokenIds(eos=2, unk=3)
  config = dataclasses.replace(SHAPE, token_ids=ids)
  params = static_vectors.init(jax.random.key(0), SHAPE, jnp.ones(50))
  own, other = (
    static_vectors.encode(
      params, shape, jnp.array([[7, 9, 2, 0], [7, 9, 0, 0]])
    )
    for shape in (config, SHAPE)
  )
  np.testing.assert_array_equal(own[0], own[1])
  assert np.abs(other[0] - other[1]).max() > 0.1


def test_special_ids_are_kept_with_a_table(tmp_path):
  ids = token_ids.TokenIds(eos=2, unk=3)
  config = dataclasses.replace(SHAPE, token_ids=ids)
  t5_checkpoints.save(tmp_path, made(), config)
  assert t5_checkpoints.load_config(tmp_path) == config
