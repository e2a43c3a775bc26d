"""Losses that couple examples are refused, others pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax import optim
from synthq_jax.losses import contrastive, seq2seq

PARAMS = {"w": jnp.array([[1.0, 0.5], [-0.5, 2.0]])}
BATCH = {"x": jnp.array([[1.0, 2.0], [0.5, -1.0], [2.0, 0.3]])}


def independent(params, batch):
  return jnp.sum(jnp.tanh(batch["x"] @ params["w"]) ** 2, axis=1)


def batch_norm(params, batch):
  x = batch["x"] @ params["w"]
  return jnp.sum((x - jnp.mean(x, axis=0, keepdims=True)) ** 2, axis=1)


def divided_by_the_batch(params, batch):
  return independent(params, batch) / batch["x"].shape[0]


def in_batch_negatives(params, batch):
  x = batch["x"] @ params["w"]
  return contrastive.softmax(x @ x.T, temperature=1.0)


def test_independent_losses_pass():
  optim.check_independence(independent, PARAMS, BATCH)


def test_the_cross_entropy_of_sequences_passes():
  random = np.random.default_rng(0)
  batch = {
    "logits": jnp.asarray(random.normal(size=(3, 4, 5)), jnp.float32),
    "targets": jnp.array([[1, 2, 3, 4], [2, 0, 0, 0], [0, 0, 0, 0]]),
  }
  optim.check_independence(
    lambda p, b: seq2seq.cross_entropy(p * b["logits"], b["targets"]),
    jnp.array(1.0),
    batch,
  )


@pytest.mark.parametrize(
  "loss_fn",
  [batch_norm, divided_by_the_batch, in_batch_negatives],
  ids=lambda f: f.__name__,
)
def test_coupled_losses_are_refused(loss_fn):
  with pytest.raises(ValueError, match="expected independent losses"):
    optim.check_independence(loss_fn, PARAMS, BATCH)


def test_a_loss_that_becomes_nan_alone_is_refused():
  def loss_fn(params, batch):
    x = batch["x"] @ params["w"]
    return jnp.sum(x, axis=1) / (batch["x"].shape[0] - 1.0) * 0.0 + x[:, 0]

  with pytest.raises(ValueError, match="expected independent losses"):
    optim.check_independence(loss_fn, PARAMS, BATCH)


def test_a_batch_of_equal_examples_cannot_show_it():
  with pytest.raises(ValueError, match="2 different examples"):
    optim.check_independence(independent, PARAMS, {"x": jnp.ones((3, 2))})


def test_a_single_number_is_not_a_loss_per_example():
  with pytest.raises(ValueError, match=r"losses of shape \(3,\)"):
    optim.check_independence(
      lambda p, b: jnp.mean(independent(p, b)), PARAMS, BATCH
    )


def test_random_keys_may_be_part_of_a_batch():
  keys = jax.random.key_data(jax.random.split(jax.random.key(0), 3))
  batch = {"x": BATCH["x"], "key": keys}
  optim.check_independence(independent, PARAMS, batch)


@pytest.mark.parametrize("coupled", [False, True])
def test_half_precision_has_a_tolerance_of_its_own(coupled):
  def loss_fn(params, batch):
    x = batch["x"].astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)
    # What is rounded differently in a batch of another size.
    x = x.astype(jnp.float32) * (1.0 + 1e-3 * batch["x"].shape[0])
    mean = jnp.mean(x, axis=0, keepdims=True) if coupled else 0.0
    return jnp.sum((x - mean) ** 2, axis=1)

  if not coupled:
    return optim.check_independence(loss_fn, PARAMS, BATCH)
  with pytest.raises(ValueError, match="relative 0.02"):
    optim.check_independence(loss_fn, PARAMS, BATCH)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_loss_that_is_never_finite_moves_nothing(value):
  batch = {"x": BATCH["x"].at[1, 0].set(value)}
  optim.check_independence(independent, PARAMS, batch)


def test_the_message_holds_no_value_of_the_batch():
  with pytest.raises(ValueError) as error:
    optim.check_independence(batch_norm, PARAMS, BATCH)
  other = {"x": 3.0 * BATCH["x"]}
  with pytest.raises(ValueError) as another:
    optim.check_independence(batch_norm, PARAMS, other)
  assert str(error.value) == str(another.value)
