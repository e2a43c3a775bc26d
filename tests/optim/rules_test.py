"""Norms and sums from factors against gradients written out in NumPy."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax.optim import _rules

BATCH, ROWS, COLUMNS = 3, 7, 4


def outer(seed, positions):
  random = np.random.default_rng(seed)
  return _rules.Outer(
    jnp.asarray(random.normal(size=(BATCH, 1, positions, ROWS)), jnp.float32),
    jnp.asarray(
      random.normal(size=(BATCH, 1, positions, COLUMNS)), jnp.float32
    ),
  )


def rows(seed, positions):
  random = np.random.default_rng(seed)
  return _rules.Rows(
    jnp.asarray(random.integers(-1, 3, size=(BATCH, positions)), jnp.int32),
    jnp.asarray(random.normal(size=(BATCH, positions, COLUMNS)), jnp.float32),
  )


def gradients(uses):
  """Per-example gradients [batch, rows, columns], position by position."""
  total = np.zeros((BATCH, ROWS, COLUMNS))
  for use in uses:
    for b, t in itertools.product(range(BATCH), range(use.right.shape[-2])):
      if isinstance(use, _rules.Outer):
        total[b] += np.outer(use.left[b, 0, t], use.right[b, 0, t])
      elif use.ids[b, t] >= 0:
        total[b, use.ids[b, t]] += use.right[b, t]
  return total


CASES = {
  "one product": [outer(0, 5)],
  "one lookup": [rows(1, 6)],
  "two products": [outer(0, 5), outer(2, 2)],
  "two lookups": [rows(1, 6), rows(3, 4)],
  "tied": [rows(1, 6), rows(3, 4), outer(0, 5), outer(2, 2)],
}


@pytest.mark.parametrize("uses", CASES.values(), ids=CASES.keys())
def test_squared_norms_are_those_of_the_summed_gradient(uses):
  expected = np.sum(gradients(uses) ** 2, axis=(1, 2))
  np.testing.assert_allclose(_rules.squared_norms(uses), expected, rtol=1e-5)


@pytest.mark.parametrize("uses", CASES.values(), ids=CASES.keys())
def test_weighted_sums_are_those_of_the_summed_gradient(uses):
  weights = np.array([0.5, 0.0, 2.0])
  expected = np.einsum("b,bpq->pq", weights, gradients(uses))
  total = _rules.weighted_sum(
    uses, jnp.asarray(weights, jnp.float32), (1, ROWS, COLUMNS)
  )
  np.testing.assert_allclose(total[0], expected, rtol=1e-4, atol=1e-5)


def test_an_example_of_weight_zero_adds_nothing_even_if_not_finite():
  left, right = outer(0, 2)
  use = _rules.Outer(left.at[1].set(np.inf), right.at[1].set(np.nan))
  weights = jnp.array([1.0, 0.0, 1.0])
  total = _rules.weighted_sum([use], weights, (1, ROWS, COLUMNS))
  clean = _rules.weighted_sum([outer(0, 2)], weights, (1, ROWS, COLUMNS))
  np.testing.assert_array_equal(total, clean)
