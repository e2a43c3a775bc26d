"""Adafactor, private and not, beside T5X's own numbers.

The numbers in t5x_adafactor.json were made by T5X's Adafactor (the file says
where and how); where T5X is installed, they are made again.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax import optim

RECORDED = pathlib.Path(__file__).with_name("t5x_adafactor.json")
STEPS = 5
CLIP = 1e6
SHAPES = {"matrix": (6, 8), "tall": (9, 4), "vector": (5,), "large": (128, 130)}

CASES = {
  "defaults": {},
  "all axes factored": {"min_dim_size_to_factor": 4},
  "absolute steps": {"multiply_by_parameter_scale": False},
  "no clipping": {"clipping_threshold": None, "decay_rate": 0.5},
}
"""Options by T5X's names."""


def wave(shape, seed, scale):
  """Numbers that depend on no random generator."""
  values = np.sin(1.0 + seed + 0.7 * (seed + 1) * np.arange(np.prod(shape)))
  return jnp.asarray(scale * values.reshape(shape), jnp.float32)


def params():
  return {k: wave(s, i, 0.3) for i, (k, s) in enumerate(SHAPES.items())}


def gradients(step):
  return {
    name: wave(shape, 10 * (step + 1) + i, 10.0 ** (step - 3)) ** 3
    for i, (name, shape) in enumerate(SHAPES.items())
  }


def learning_rate(step):
  return 1e-2 / np.sqrt(1.0 + step)


def shown(params):
  """Each parameter's first entries, its mean and its root mean square."""
  found = {}
  for name, value in params.items():
    value = np.asarray(value, np.float64)
    numbers = [
      *value.reshape(-1)[:40],
      np.mean(value),
      np.mean(value**2) ** 0.5,
    ]
    found[name] = [float(f"{number:.9g}") for number in numbers]
  return found


def run_t5x(adafactor, options):
  """Runs T5X's module of that name."""
  tx, now = adafactor.Adafactor(learning_rate=0.0, **options), params()
  state = tx.init_state(now)
  for step in range(STEPS):
    rates = tx.hyper_params.replace(learning_rate=learning_rate(step))
    now, state = tx.apply_gradient(rates, now, state, gradients(step))
  return shown(now)


def recorded(name):
  return json.loads(RECORDED.read_text())["cases"][name]


def run_ours(make, options):
  tx, now = make(lambda step: 1e-2 / jnp.sqrt(1.0 + step), **options), params()
  state, update = tx.init(now), jax.jit(tx.update)
  for step in range(STEPS):
    updates, state = update(gradients(step), state, now)
    now = jax.tree.map(jnp.add, now, updates)
  return now


def without_noise(learning_rate, **options):
  return optim.dp_adafactor(
    learning_rate,
    l2_sensitivity=CLIP,
    noise_multiplier=0.0,
    denominator=1.0,
    key=jax.random.key(0),
    **options,
  )


def assert_same(got, expected):
  for name in SHAPES:
    np.testing.assert_allclose(
      got[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name
    )


@pytest.mark.parametrize("name", CASES)
def test_private_without_noise_and_plain_make_the_steps_of_t5x(name):
  private = run_ours(without_noise, CASES[name])
  assert_same(shown(private), recorded(name))
  if name == "defaults":
    plain = run_ours(optim.adafactor, {})
    jax.tree.map(np.testing.assert_array_equal, private, plain)


@pytest.mark.parametrize("name", CASES)
def test_t5x_still_makes_the_recorded_numbers(name):
  adafactor = pytest.importorskip("t5x.adafactor", reason="T5X not installed")
  assert_same(run_t5x(adafactor, CASES[name]), recorded(name))
