"""The naive clipping of a whole batch's gradient."""

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax import optim

Relation = dp_accounting.NeighboringRelation


def coupled(params, batch, is_real):
  """The gradient is the sum of x over real examples, times their number."""
  x = jnp.where(is_real[:, None], batch["x"], 0.0)
  return jnp.sum(is_real) * jnp.sum(x @ params["w"])


PARAMS = {"w": jnp.zeros(2)}


def test_a_long_gradient_is_clipped_and_a_short_one_is_left_alone():
  grad_fn = optim.batch_clipped_grad(coupled, l2_clip_norm=1.0)
  gradient, aux = grad_fn(PARAMS, {"x": jnp.array([[3.0, 0.0], [0.0, 4.0]])})
  np.testing.assert_allclose(gradient["w"], [0.6, 0.8], rtol=1e-6)
  np.testing.assert_allclose(aux.norm, 10.0)
  gradient, _ = grad_fn(PARAMS, {"x": jnp.array([[0.1, 0.0], [0.0, 0.2]])})
  np.testing.assert_allclose(gradient["w"], [0.2, 0.4], rtol=1e-6)


def test_one_example_attains_the_sensitivity_of_twice_the_clip_norm():
  grad_fn = optim.batch_clipped_grad(coupled, l2_clip_norm=1.0)
  x = jnp.array([[5.0, 0.0], [-90.0, 0.0]])
  sums = [
    grad_fn(PARAMS, {"x": x}, is_padding_example=jnp.array([False, padding]))[0]
    for padding in (True, False)
  ]
  moved = np.linalg.norm(sums[0]["w"] - sums[1]["w"])
  for relation in Relation:
    np.testing.assert_allclose(moved, grad_fn.sensitivity(relation), rtol=1e-6)


def test_a_gradient_that_is_not_finite_becomes_zero():
  grad_fn = optim.batch_clipped_grad(coupled, l2_clip_norm=1.0)
  gradient, aux = jax.jit(grad_fn)(PARAMS, {"x": jnp.array([[np.nan, 1.0]])})
  np.testing.assert_array_equal(gradient["w"], [0.0, 0.0])
  assert not np.isfinite(aux.norm)


def test_a_gradient_that_is_not_finite_is_zero_where_the_loss_is():
  """A root at 0: the sum would be nan, and so tell of one example."""

  def root(params, batch, is_real):
    x = jnp.where(is_real[:, None], batch["x"], 0.0)
    return jnp.sum(jnp.sqrt(jnp.abs(x @ params["w"])))

  grad_fn = optim.batch_clipped_grad(root, l2_clip_norm=1.0)
  gradient, aux = jax.jit(grad_fn)(PARAMS, {"x": jnp.array([[1.0, 2.0]])})
  assert np.isfinite(aux.loss) and not np.isfinite(aux.norm)
  np.testing.assert_array_equal(gradient["w"], [0.0, 0.0])


def test_a_clip_norm_out_of_range_is_refused():
  with pytest.raises(ValueError, match="l2_clip_norm"):
    optim.batch_clipped_grad(coupled, l2_clip_norm=0.0)
