"""The in-batch softmax loss against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax.losses import contrastive

RANDOM = np.random.default_rng(0)
SIMILARITY = RANDOM.uniform(-1, 1, size=(3, 5)).astype(np.float32)


def oracle(temperature, dropped=()):
  losses = []
  for i in range(3):
    kept = [j for j in range(5) if (i, j) not in dropped]
    exponents = np.exp(SIMILARITY[i, kept] / temperature)
    losses.append(np.log(np.sum(exponents)) - SIMILARITY[i, i] / temperature)
  return np.array(losses)


def softmax(temperature=0.5, **masks):
  masks = {name: jnp.asarray(value) for name, value in masks.items()}
  return contrastive.softmax(
    jnp.asarray(SIMILARITY), temperature=temperature, **masks
  )


@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_it_is_minus_the_log_probability_of_the_own_document(temperature):
  np.testing.assert_allclose(
    softmax(temperature), oracle(temperature), rtol=1e-5, atol=1e-6
  )


def test_padding_rows_cost_nothing_and_are_nobodys_negatives():
  losses = softmax(is_padding_example=[False, True, False])
  expected = oracle(0.5, dropped={(0, 1), (2, 1)})
  expected[1] = 0.0
  np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_padding_documents_are_dropped():
  losses = softmax(is_padding_document=[False] * 4 + [True])
  dropped = {(i, 4) for i in range(3)}
  np.testing.assert_allclose(losses, oracle(0.5, dropped), rtol=1e-5)


def test_duplicates_are_dropped_from_their_row_alone():
  mask = np.zeros((3, 5), bool)
  mask[0, 2] = mask[1, 1] = True  # A row's own column cannot be dropped.
  np.testing.assert_allclose(
    softmax(duplicate_mask=mask), oracle(0.5, {(0, 2)}), rtol=1e-5
  )


def test_weights_multiply_the_losses():
  np.testing.assert_allclose(
    softmax(weights=[2.0, 0.0, 1.0]), oracle(0.5) * [2, 0, 1], rtol=1e-5
  )


def test_dropped_columns_have_a_gradient_of_exactly_zero():
  mask = np.zeros((3, 5), bool)
  mask[0, 2] = True
  padding = jnp.array([False, True, False])

  def loss(similarity):
    return jnp.sum(
      contrastive.softmax(
        similarity,
        temperature=0.5,
        duplicate_mask=jnp.asarray(mask),
        is_padding_example=padding,
      )
    )

  gradient = np.asarray(jax.grad(loss)(jnp.asarray(SIMILARITY)))
  assert np.isfinite(gradient).all()
  zero = gradient == 0
  expected = mask | np.array([[False], [True], [False]])
  expected[:, 1] = True
  np.testing.assert_array_equal(zero, expected)


def test_a_bad_temperature_or_shape_is_refused():
  with pytest.raises(ValueError, match="temperature=0"):
    softmax(temperature=0.0)
  with pytest.raises(ValueError, match=r"shape=\(3, 2\)"):
    contrastive.softmax(jnp.ones((3, 2)), temperature=1.0)
