"""Cross-entropy against NumPy, and its independence of other examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax.losses import seq2seq

RANDOM = np.random.default_rng(0)
LOGITS = RANDOM.normal(size=(3, 4, 6)).astype(np.float32)
TARGETS = np.array([[5, 1, 2, 3], [4, 0, 0, 0], [0, 0, 0, 0]])


def oracle(logits, targets):
  sums, counts = np.zeros(3), np.zeros(3)
  for i in range(3):
    for t in range(4):
      if targets[i, t] != 0:
        probabilities = np.exp(logits[i, t]) / np.sum(np.exp(logits[i, t]))
        sums[i] -= np.log(probabilities[targets[i, t]])
        counts[i] += 1
  return sums, counts


def test_a_loss_is_the_mean_over_the_examples_own_target_tokens():
  sums, counts = oracle(LOGITS, TARGETS)
  assert counts.tolist() == [4, 1, 0]
  losses = seq2seq.cross_entropy(jnp.asarray(LOGITS), jnp.asarray(TARGETS))
  np.testing.assert_allclose(losses, sums / np.maximum(counts, 1), rtol=1e-5)
  assert losses[2] == 0.0
  losses = seq2seq.cross_entropy(
    jnp.asarray(LOGITS), jnp.asarray(TARGETS), normalization="sum"
  )
  np.testing.assert_allclose(losses, sums, rtol=1e-5)


def test_half_precision_logits_give_float32_losses():
  logits = jnp.asarray(LOGITS, jnp.bfloat16)
  losses = seq2seq.cross_entropy(logits, jnp.asarray(TARGETS))
  assert losses.dtype == jnp.float32
  sums, counts = oracle(np.asarray(logits, np.float64), TARGETS)
  np.testing.assert_allclose(losses, sums / np.maximum(counts, 1), rtol=1e-5)


def test_what_does_not_count_may_be_infinite():
  """Padding whose logit is masked was no number, and its example was lost."""

  def losses(logits):
    return seq2seq.cross_entropy(logits, jnp.asarray(TARGETS))

  masked = jnp.asarray(LOGITS).at[..., 0].set(-jnp.inf)
  low = jnp.where(jnp.isinf(masked), -100.0, masked)
  np.testing.assert_allclose(losses(masked), losses(low), rtol=1e-6)
  found, expected = (jax.jacrev(losses)(logits) for logits in (masked, low))
  np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int64])
def test_targets_of_any_type_are_the_same_ids(dtype):
  logits = jnp.asarray(RANDOM.normal(size=(1, 2, 70_000)), jnp.float32)
  targets = np.array([[5, 120]])
  states, table = jnp.ones((1, 2, 3)), jnp.asarray(logits[0, :, :300].T)
  table = jnp.pad(table, ((0, 0), (0, 1)))
  for loss in (
    lambda ids: seq2seq.cross_entropy(logits, ids),
    lambda ids: seq2seq.cross_entropy_of_states(states, table, ids),
  ):
    expected = loss(jnp.asarray(targets, jnp.int32))
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(
      loss(jnp.asarray(targets.astype(dtype))), expected
    )


def test_shapes_that_disagree_and_unknown_normalizations_are_refused():
  logits, targets = jnp.asarray(LOGITS), jnp.asarray(TARGETS)
  with pytest.raises(ValueError, match=r"\(3, 4, 6\) and \(3, 3\)"):
    seq2seq.cross_entropy(logits, targets[:, :3])
  with pytest.raises(ValueError, match="normalization='batch'"):
    seq2seq.cross_entropy(logits, targets, normalization="batch")


def states_and_table(vocab_size, length=3, dim=7, dtype=jnp.float32):
  random = np.random.default_rng(1)
  states = jnp.asarray(3 * random.normal(size=(4, length, dim)), dtype)
  table = jnp.asarray(random.normal(size=(vocab_size, dim)), jnp.float32)
  targets = random.integers(1, vocab_size, (4, length))
  targets[1, 1:] = targets[2] = 0
  return states, table, jnp.asarray(targets)


@pytest.mark.parametrize(
  ("vocab_size", "dtype"),
  [
    (8, jnp.float32),
    (4096, jnp.float32),
    (8192, jnp.float32),
    (9001, jnp.float32),
    (9001, jnp.bfloat16),
  ],
)
def test_losses_of_states_are_those_of_their_logits(vocab_size, dtype):
  """Values and gradients, whatever the table's rows are cut into."""
  states, table, targets = states_and_table(vocab_size, dtype=dtype)

  def written(states):
    logits = states.astype(jnp.float32) @ table.T
    return seq2seq.cross_entropy(logits, targets)

  def unwritten(states):
    return seq2seq.cross_entropy_of_states(states, table, targets)

  np.testing.assert_allclose(unwritten(states), written(states), rtol=2e-6)
  got, expected = (jax.jacrev(f)(states) for f in (unwritten, written))
  assert got.dtype == dtype
  rtol = 1e-5 if dtype == jnp.float32 else 1e-2
  np.testing.assert_allclose(
    np.asarray(got, np.float32),
    np.asarray(expected, np.float32),
    rtol=rtol,
    atol=rtol * np.abs(np.asarray(expected, np.float32)).max(),
  )


def test_large_logits_overflow_in_no_block():
  states, table, targets = states_and_table(9001)
  states *= 1e3
  losses = seq2seq.cross_entropy_of_states(states, table, targets)
  expected = seq2seq.cross_entropy(states @ table.T, targets)
  assert np.isfinite(losses).all() and losses.max() > 1e3
  np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize("target", [-1, 9001, 2**31 - 1])
def test_a_target_that_is_no_row_gives_no_number(target):
  states, table, targets = states_and_table(9001)
  losses = seq2seq.cross_entropy_of_states(
    states, table, targets.at[3, 0].set(target)
  )
  assert np.isnan(losses[3]) and np.isfinite(losses[:3]).all()


def test_nothing_of_the_size_of_all_logits_is_in_the_program():
  states, table, targets = states_and_table(9001, length=64)

  def loss(states):
    return seq2seq.cross_entropy_of_states(states, table, targets).sum()

  for kind in (loss, jax.grad(loss)):
    program = jax.jit(kind).lower(states).as_text()
    assert "4x64x4096x" in program
    assert not any(f"4x64x{n}x" in program for n in (9001, 3 * 4096))


def test_a_table_that_is_trained_is_refused():
  """Its gradient would be taken for zero."""
  states, table, targets = states_and_table(8)

  def loss(table, states):
    return seq2seq.cross_entropy_of_states(states, table, targets).sum()

  with pytest.raises(ValueError, match="a table that is not trained"):
    jax.grad(loss)(table, states)
  with pytest.raises(ValueError, match="a table that is not trained"):
    jax.vmap(jax.grad(lambda x: loss(table * x, states)))(jnp.ones(2))
  with pytest.raises(ValueError, match="got shapes"):
    loss(table[:, 1:], states)
