"""One contract for all private optimizers, and dp_aggregate."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from synthq_jax import optim

KEY = jax.random.key(2)
NOISE = dict(l2_sensitivity=0.5, noise_multiplier=2.0, denominator=8.0, key=KEY)
PARAMS = {"w": jnp.ones((3, 4)), "b": jnp.full(4, 0.1)}
SUM = {"w": jnp.full((3, 4), 2.0), "b": jnp.full(4, -1.0)}

PAIRS = {
  "adafactor": (optim.dp_adafactor, optim.adafactor),
  "adam": (optim.dp_adam, optax.adam),
}
each = pytest.mark.parametrize("name", PAIRS)


def steps(transform, gradients, count):
  state, updates = transform.init(PARAMS), []
  for _ in range(count):
    update, state = jax.jit(transform.update)(gradients, state, PARAMS)
    updates.append(update)
  return updates


@each
def test_without_noise_it_is_the_plain_optimizer_on_the_public_mean(name):
  private, plain = PAIRS[name]
  mean = jax.tree.map(lambda x: x / 8.0, SUM)
  got = steps(private(0.1, **(NOISE | {"noise_multiplier": 0.0})), SUM, 2)
  expected = steps(plain(0.1), mean, 2)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, expected
  )


@each
def test_with_noise_it_is_the_plain_optimizer_on_the_private_mean(name):
  private, plain = PAIRS[name]
  noise = NOISE | {"noise_multiplier": 40.0}
  (mean,) = steps(optim.privatize(**noise), SUM, 1)
  (got,) = steps(private(0.1, **noise), SUM, 1)
  (expected,) = steps(plain(0.1), mean, 1)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, expected
  )
  (without,) = steps(plain(0.1), jax.tree.map(lambda x: x / 8.0, SUM), 1)
  assert not np.allclose(got["w"], without["w"], rtol=1e-2)


@each
def test_moments_are_float32_whatever_the_parameters_are(name):
  """In bfloat16 a second moment never decays, and a state changes its type."""
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
  private = PAIRS[name][0](0.1, **NOISE)
  states = {}
  for kind, params in {"half": half, "whole": PARAMS}.items():
    first = private.init(params)
    (state, _), _ = jax.lax.scan(
      lambda now, _: ((private.update(SUM, now[0], now[1])[1], now[1]), None),
      (first, params),
      length=3,
    )
    states[kind] = state
  jax.tree.map(
    lambda a, b: (
      np.testing.assert_allclose(a, b, rtol=1e-2),
      a.dtype == b.dtype or pytest.fail(f"{a.dtype} for {b.dtype}"),
    ),
    *jax.tree.map(_plain, (states["half"], states["whole"])),
  )


def _plain(leaf):
  is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
  return jax.random.key_data(leaf) if is_key else leaf


@each
def test_a_schedule_is_followed(name):
  private, _ = PAIRS[name]
  quiet = NOISE | {"noise_multiplier": 0.0}
  schedule = optim.schedules.linear(0.1, steps=2)
  first, second, third = steps(private(schedule, **quiet), SUM, 3)
  one, two, _ = steps(private(0.1, **quiet), SUM, 3)
  np.testing.assert_allclose(first["w"], one["w"], rtol=1e-6)
  np.testing.assert_allclose(second["w"], two["w"] / 2, rtol=1e-5)
  np.testing.assert_array_equal(third["w"], np.zeros((3, 4)))


def test_adam_refuses_a_decay_of_one():
  with pytest.raises(ValueError, match="b2"):
    optim.dp_adam(0.1, **NOISE, b2=1.0)


STACKED = {
  "w": jnp.array([[3.0, 0.0], [0.1, 0.2], [np.nan, 0.0], [9.0, 9.0]]),
  "b": jnp.array([4.0, 0.0, 1.0, 9.0]),
}


def test_stacked_gradients_are_clipped_over_all_leaves_and_summed():
  transform = optim.dp_aggregate(
    l2_clip_norm=1.0, noise_multiplier=0.0, denominator=2.0, key=KEY
  )
  padding = jnp.array([False, False, False, True])
  mean, _ = transform.update(
    STACKED, transform.init(None), is_padding_example=padding
  )
  np.testing.assert_allclose(mean["w"], [(0.6 + 0.1) / 2, 0.1], rtol=1e-6)
  np.testing.assert_allclose(mean["b"], 0.4, rtol=1e-6)


def test_stacked_gradients_that_do_not_say_what_is_padding_are_refused():
  """A record that takes the place of padding moved the sum by two clip norms."""
  transform = optim.dp_aggregate(
    l2_clip_norm=1.0, noise_multiplier=0.0, denominator=1.0, key=KEY
  )
  state = transform.init(None)
  padding, record = jnp.array([[9.0], [9.0]]), jnp.array([[-9.0], [9.0]])
  for marked, moved in ((None, 2.0), ([True, True], 1.0)):
    before, _ = transform.update(
      padding, state, is_padding_example=marked and jnp.array(marked)
    )
    after, _ = transform.update(
      record, state, is_padding_example=marked and jnp.array([False, True])
    )
    assert jnp.abs(after - before) == moved
  with pytest.raises(ValueError, match="None if every row is a record"):
    transform.update(padding, state)


def test_a_mask_of_stacked_gradients_has_a_flag_for_each():
  transform = optim.dp_aggregate(
    l2_clip_norm=1.0, noise_multiplier=0.0, denominator=1.0, key=KEY
  )
  state, stacked = transform.init(None), jnp.array([[0.5], [0.25]])
  total, _ = transform.update(stacked, state, is_padding_example=[True, False])
  assert total == 0.25  # a list, too
  for mask in (False, [False], [[True], [False]], [True] * 3):
    with pytest.raises(ValueError, match="one flag for each example"):
      transform.update(stacked, state, is_padding_example=mask)


def test_no_gradient_in_half_precision_is_longer_than_the_clip_norm():
  """A norm that bfloat16 rounds down leaves up to .4 percent too much."""
  number = 16
  lengths = jnp.linspace(2.0, 3.0, number)[:, None]
  own = jax.random.normal(KEY, (number, 5))
  own = own * lengths / jnp.linalg.norm(own, axis=1, keepdims=True)
  rows = jnp.arange(number)  # a row of the sum for each gradient
  stacked = jnp.zeros((number, number, 5), jnp.bfloat16)
  stacked = stacked.at[rows, rows].set(own.astype(jnp.bfloat16))
  transform = optim.dp_aggregate(
    l2_clip_norm=1.0, noise_multiplier=0.0, denominator=1.0, key=KEY
  )
  total, _ = transform.update(
    {"w": stacked}, transform.init(None), is_padding_example=None
  )
  norms = jnp.linalg.norm(total["w"].astype(jnp.float32), axis=1)
  np.testing.assert_allclose(norms, 1.0, rtol=1e-5)


def test_stacked_gradients_get_the_noise_of_privatize():
  arguments = dict(noise_multiplier=3.0, denominator=2.0, key=KEY)
  transform = optim.dp_aggregate(l2_clip_norm=0.5, **arguments)
  zeros = jax.tree.map(jnp.zeros_like, STACKED)
  noise, _ = transform.update(
    zeros, transform.init(None), is_padding_example=None
  )
  plain = optim.privatize(l2_sensitivity=0.5, **arguments)
  template = jax.tree.map(lambda x: x[0], zeros)
  expected, _ = plain.update(template, plain.init(None))
  np.testing.assert_array_equal(noise["w"], expected["w"])


def test_a_clip_norm_out_of_range_is_refused():
  with pytest.raises(ValueError, match="l2_clip_norm"):
    optim.dp_aggregate(
      l2_clip_norm=0.0, noise_multiplier=1.0, denominator=1.0, key=KEY
    )
