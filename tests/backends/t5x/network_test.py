"""Our T5 beside T5X's own network, on the same parameters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from synthq_jax.models import t5, t5_config

network = pytest.importorskip(
  "t5x.examples.t5.network", reason="T5X is not installed: see docs/t5x.md"
)


def outcome(model, dtype):
  """Logits, and gradient of the mean loss, of one model in one precision."""
  config = dataclasses.replace(t5_config.get("demo"), dtype=dtype)
  rng = np.random.default_rng(0)
  inputs = rng.integers(2, config.vocab_size, (8, 40))
  inputs[1, 20:] = 0
  targets = rng.integers(2, config.vocab_size, (8, 16))
  begun = t5.shift_right(jnp.asarray(targets))
  params = t5.init_params(config, jax.random.key(0))

  def apply(params):
    if model == "ours":
      return t5.Transformer(config).apply({"params": params}, inputs, begun)
    fields = {field.name for field in dataclasses.fields(network.T5Config)}
    shape = {k: v for k, v in vars(config).items() if k in fields}
    theirs = network.T5Config(**shape, float32_attention_logits=True)
    return network.Transformer(theirs).apply(
      {"params": params}, inputs, begun, targets, enable_dropout=False
    )

  def loss(params):
    logits = apply(params).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.mean(losses), logits

  with jax.numpy_rank_promotion("allow"):  # T5X's network asks for it
    gradient, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
  return logits, jnp.concatenate(
    [jnp.ravel(leaf) for leaf in jax.tree.leaves(gradient)]
  )


def test_numbers_are_those_of_t5x_and_no_farther_off_in_half_precision():
  exact = outcome("T5X's", "float32")
  for ours, theirs in zip(outcome("ours", "float32"), exact, strict=True):
    assert np.linalg.norm(ours - theirs) < 1e-5 * np.linalg.norm(theirs)
  far = {
    model: [
      np.linalg.norm(half - full) / np.linalg.norm(full)
      for half, full in zip(outcome(model, "bfloat16"), exact, strict=True)
    ]
    for model in ("ours", "T5X's")
  }
  for ours, theirs in zip(*far.values(), strict=True):
    assert 1e-4 < ours < 1.2 * theirs
