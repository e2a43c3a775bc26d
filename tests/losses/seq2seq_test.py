"""Cross-entropy against NumPy, and its independence of other examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax.losses import seq2seq

RANDOM = np.random.default_rng(0)
LOGITS = RANDOM.normal(size=(3, 4, 6)).astype(np.float32)
TARGETS = np.array([[5, 1, 2, 3], [4, 0, 0, 0], [0, 0, 0, 0]])


def oracle(logits, targets, weights):
  sums, counts = np.zeros(3), np.zeros(3)
  for i in range(3):
    for t in range(4):
      if targets[i, t] != 0:
        probabilities = np.exp(logits[i, t]) / np.sum(np.exp(logits[i, t]))
        sums[i] -= weights[i, t] * np.log(probabilities[targets[i, t]])
        counts[i] += weights[i, t]
  return sums, counts


def test_a_loss_is_the_mean_over_the_examples_own_target_tokens():
  sums, counts = oracle(LOGITS, TARGETS, np.ones((3, 4)))
  assert counts.tolist() == [4, 1, 0]
  losses = seq2seq.cross_entropy(jnp.asarray(LOGITS), jnp.asarray(TARGETS))
  np.testing.assert_allclose(losses, sums / np.maximum(counts, 1), rtol=1e-5)
  assert losses[2] == 0.0


def test_weights_count_as_parts_of_tokens():
  weights = RANDOM.uniform(size=(3, 4)).astype(np.float32)
  sums, counts = oracle(LOGITS, TARGETS, weights)
  arguments = map(jnp.asarray, (LOGITS, TARGETS, weights))
  losses = seq2seq.cross_entropy(*arguments)
  np.testing.assert_allclose(losses, sums / np.maximum(counts, 1), rtol=1e-5)
  arguments = map(jnp.asarray, (LOGITS, TARGETS, weights))
  losses = seq2seq.cross_entropy(*arguments, normalization="sum")
  np.testing.assert_allclose(losses, sums, rtol=1e-5)


def test_no_other_example_moves_a_loss():
  other_targets = jnp.asarray(TARGETS).at[1:].set(3)
  other_logits = jnp.asarray(LOGITS).at[1:].multiply(7.0)
  for normalization in ("mean", "sum"):
    before, after = (
      seq2seq.cross_entropy(*arguments, normalization=normalization)
      for arguments in (
        (jnp.asarray(LOGITS), jnp.asarray(TARGETS)),
        (other_logits, other_targets),
      )
    )
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_half_precision_logits_give_float32_losses():
  logits = jnp.asarray(LOGITS, jnp.bfloat16)
  losses = seq2seq.cross_entropy(logits, jnp.asarray(TARGETS))
  assert losses.dtype == jnp.float32
  sums, counts = oracle(
    np.asarray(logits, np.float64), TARGETS, np.ones((3, 4))
  )
  np.testing.assert_allclose(losses, sums / np.maximum(counts, 1), rtol=1e-5)


def test_padding_has_no_gradient():
  def loss(logits):
    return jnp.sum(seq2seq.cross_entropy(logits, jnp.asarray(TARGETS)))

  gradient = np.asarray(jax.grad(loss)(jnp.asarray(LOGITS)))
  assert (gradient[TARGETS == 0] == 0).all()
  assert (gradient[TARGETS != 0] != 0).all()


def test_shapes_that_disagree_and_unknown_normalizations_are_refused():
  logits, targets = jnp.asarray(LOGITS), jnp.asarray(TARGETS)
  with pytest.raises(ValueError, match=r"\(3, 4, 6\) and \(3, 3\)"):
    seq2seq.cross_entropy(logits, targets[:, :3])
  with pytest.raises(ValueError, match="weights of shape"):
    seq2seq.cross_entropy(logits, targets, jnp.ones(3))
  with pytest.raises(ValueError, match="normalization='batch'"):
    seq2seq.cross_entropy(logits, targets, normalization="batch")
