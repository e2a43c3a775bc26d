"""Prompt tuning: the merged checkpoint reads its prompt from tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax.generation import decoding
from synthq_jax.models import prompt, t5, t5_checkpoints, t5_config

CONFIG = t5_config.get("tiny")
PROMPT = prompt.Prompt(length=4)


@pytest.fixture(name="params", scope="module")
def _params():
  tree = t5.init_params(CONFIG, jax.random.key(0))
  return t5_checkpoints.flatten(tree)


@pytest.fixture(name="inputs", scope="module")
def _inputs():
  inputs = np.random.default_rng(0).integers(3, 120, (3, 7)).astype(np.int32)
  inputs[1, 4:] = 0
  return inputs


def trained(params):
  rng = np.random.default_rng(1)
  start = PROMPT.init(params, jax.random.key(1))
  return {k: v + rng.normal(size=v.shape) for k, v in start.items()}


def logits(collections, inputs, config=CONFIG):
  targets = np.random.default_rng(2).integers(3, 120, (3, 5))
  given = {k: t5_checkpoints.unflatten(v) for k, v in collections.items()}
  return t5.Transformer(config).apply(
    given, inputs, t5.shift_right(jnp.asarray(targets))
  )


def with_tokens(inputs):
  head = np.broadcast_to(PROMPT.tokens(128), (len(inputs), 4))
  return np.concatenate([head, inputs], axis=1)


def test_the_merged_checkpoint_says_what_the_trained_model_said(params, inputs):
  vectors = trained(params)
  ours = logits({"params": params, **PROMPT.variables(vectors)}, inputs)
  merged = PROMPT.merge(params, vectors)
  got = logits({"params": merged}, with_tokens(inputs))
  np.testing.assert_allclose(got, ours, rtol=1e-5, atol=1e-5)
  plain = logits({"params": params}, inputs)
  assert np.abs(ours - plain).max() > 1e-2


def test_merging_changes_the_last_rows_of_the_embedding_alone(params):
  merged = PROMPT.merge(params, trained(params))
  for path, leaf in params.items():
    if path == "token_embedder/embedding":
      np.testing.assert_array_equal(merged[path][:-4], leaf[:-4])
      assert np.all(np.any(merged[path][-4:] != leaf[-4:], axis=1))
    else:
      np.testing.assert_array_equal(merged[path], leaf)


def test_padding_before_which_a_prompt_stands_changes_nothing(params, inputs):
  collections = {"params": params, **PROMPT.variables(trained(params))}
  longer = np.pad(inputs, ((0, 0), (0, 5)))
  np.testing.assert_allclose(
    logits(collections, longer),
    logits(collections, inputs),
    rtol=1e-5,
    atol=1e-5,
  )


def test_tied_logits_write_the_same_queries_after_merging(params, inputs):
  config = dataclasses.replace(CONFIG, logits_via_embedding=True)
  tied = {k: v for k, v in params.items() if "logits_dense" not in k}
  vectors = trained(tied)
  collections = {"params": tied, **PROMPT.variables(vectors)}
  ours = logits(collections, inputs, config)
  merged = logits(
    {"params": PROMPT.merge(tied, vectors)}, with_tokens(inputs), config
  )
  np.testing.assert_allclose(
    merged[..., :-4], ours[..., :-4], rtol=1e-5, atol=1e-5
  )
  written = decoding.generate(
    t5_checkpoints.unflatten(PROMPT.merge(tied, vectors)),
    config,
    with_tokens(inputs),
    ids=["a", "b", "c"],
    key=jax.random.key(0),
    sampler=decoding.Greedy(),
    max_length=1,
    forbidden=range(124, 128),
  )
  first = np.argmax(np.asarray(ours)[:, 0, 1:-4], axis=-1) + 1
  np.testing.assert_array_equal(written[:, 0, 0], first)


def test_a_prompt_starts_from_pieces_of_the_vocabulary(params):
  start = np.asarray(PROMPT.init(params, jax.random.key(3))["embedding"])
  rows = params["token_embedder/embedding"]
  found = [np.flatnonzero((rows == row).all(axis=1)) for row in start]
  assert all(len(f) == 1 and 3 <= f[0] < 124 for f in found)
  assert len({int(f[0]) for f in found}) == 4


def test_lengths_out_of_range_are_refused(params):
  with pytest.raises(ValueError, match="length >= 1, got length=0"):
    prompt.Prompt(length=0)
  with pytest.raises(ValueError, match="length=70 for 128 rows"):
    prompt.Prompt(length=70).init(params, jax.random.key(0))
