"""FLOPs of a traced step are those that run: tests/benchmarks/tpu_v4.py."""

import jax
import jax.numpy as jnp
import pytest
import tpu_v4

X = jnp.ones((4, 8))
ONE = 2 * 4 * 8 * 4  # FLOPs of X @ X.T


def product(x):
  return x @ x.T


def on_any_processor(x):
  return jax.lax.platform_dependent(x, cpu=product, default=product)


def in_a_loop(x):
  return jax.lax.scan(lambda c, _: (c, product(c)), x, None, length=3)[1]


def in_one_of_two_turns(x):
  return jax.lax.fori_loop(
    0,
    2,
    lambda turn, y: jax.lax.cond(turn == 1, lambda: product(x), lambda: y),
    jnp.zeros((4, 4)),
  )


@pytest.mark.parametrize(
  ("function", "products"),
  [
    (product, 1),
    (on_any_processor, 1),
    (in_a_loop, 3),
    (in_one_of_two_turns, 1),
  ],
)
def test_a_product_counts_as_often_as_it_runs(function, products):
  flops, _ = tpu_v4.count(jax.make_jaxpr(function)(X).jaxpr)
  assert flops == products * ONE
