"""Adafactor against a plain NumPy version of its paper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax import optim


def rms(x):
  return np.sqrt(np.mean(np.square(x)))


class Oracle:
  """Shazeer and Stern (2018), algorithms 4 to 6, one parameter."""

  def __init__(self, learning_rate, parameter, **options):
    self.learning_rate = learning_rate
    self.parameter = np.asarray(parameter, np.float64)
    self.options = options
    self.rows = self.columns = self.full = 0.0

  def step(self, t, gradient):
    options = self.options
    beta = 1.0 - t**-0.8
    square = gradient**2 + 1e-30
    if gradient.ndim == 2 and min(gradient.shape) >= options["minimum"]:
      self.rows = beta * self.rows + (1 - beta) * square.mean(axis=1)
      self.columns = beta * self.columns + (1 - beta) * square.mean(axis=0)
      moment = np.outer(self.rows, self.columns) / self.rows.mean()
    else:
      moment = self.full = beta * self.full + (1 - beta) * square
    update = gradient / np.sqrt(moment)
    update /= max(1.0, rms(update) / 1.0)
    scale = max(1e-3, rms(self.parameter)) if options["scale"] else 1.0
    self.parameter = self.parameter - self.learning_rate(t) * scale * update


@pytest.mark.parametrize(("minimum", "scale"), [(4, True), (128, False)])
def test_it_makes_the_updates_of_the_paper(minimum, scale):
  random = np.random.default_rng(0)
  start = {
    "matrix": random.normal(size=(4, 6)),
    "flat": random.normal(size=(3, 6)),
    "tiny": 1e-5 * random.normal(size=5),
  }
  params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), start)
  transform = optim.adafactor(
    lambda step: 0.1 / (1.0 + step),
    multiply_by_parameter_scale=scale,
    min_dim_size_to_factor=minimum,
  )
  options = dict(minimum=minimum, scale=scale)
  oracles = {
    k: Oracle(lambda t: 0.1 / t, x, **options) for k, x in start.items()
  }
  state, update = transform.init(params), jax.jit(transform.update)
  for t in range(1, 4):
    gradients = {k: random.normal(size=x.shape) ** 3 for k, x in start.items()}
    updates, state = update(
      jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), gradients),
      state,
      params,
    )
    params = {k: params[k] + updates[k] for k in params}
    for name, oracle in oracles.items():
      oracle.step(t, gradients[name])
      np.testing.assert_allclose(
        params[name], oracle.parameter, rtol=2e-4, atol=2e-7
      )


def test_only_two_long_axes_are_factored():
  params = {"long": jnp.zeros((128, 130)), "thin": jnp.zeros((127, 500))}
  state = optim.adafactor(0.1).init(params)
  shapes = sorted(leaf.shape for leaf in jax.tree.leaves(state) if leaf.ndim)
  assert shapes == [(1,), (1,), (1,), (127, 500), (128,), (130,)]


def test_moments_of_half_precision_parameters_are_float32():
  transform = optim.adafactor(0.1)
  params = jnp.ones((200, 200), jnp.bfloat16)
  state = transform.init(params)
  updates, state = transform.update(params, state, params)
  assert updates.dtype == jnp.float32
  kinds = {leaf.dtype for leaf in jax.tree.leaves(state) if leaf.ndim}
  assert kinds == {jnp.dtype("float32")}


@pytest.mark.parametrize(
  "options",
  [{"decay_rate": 0.0}, {"clipping_threshold": 0.0}],
  ids=str,
)
def test_a_number_out_of_range_is_refused_by_name(options):
  with pytest.raises(ValueError, match=next(iter(options))):
    optim.adafactor(0.1, **options)


def test_parameters_are_needed():
  transform = optim.adafactor(0.1)
  with pytest.raises(ValueError, match="params"):
    transform.update(jnp.ones(3), transform.init(jnp.ones(3)))
