"""Norms and sums from factors against gradients written out in NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax import optim
from synthq_jax.optim.bookkeeping import rules, sums

BATCH, ROWS, COLUMNS = 3, 7, 4


def outer(seed, positions):
  random = np.random.default_rng(seed)
  return rules.Outer(
    jnp.asarray(random.normal(size=(BATCH, 1, positions, ROWS)), jnp.float32),
    jnp.asarray(
      random.normal(size=(BATCH, 1, positions, COLUMNS)), jnp.float32
    ),
  )


def rows(seed, positions):
  random = np.random.default_rng(seed)
  return rules.Rows(
    jnp.asarray(random.integers(-1, 3, size=(BATCH, positions)), jnp.int32),
    jnp.asarray(random.normal(size=(BATCH, positions, COLUMNS)), jnp.float32),
  )


def gradients(uses):
  """Per-example gradients [batch, rows, columns], position by position."""
  total = np.zeros((BATCH, ROWS, COLUMNS))
  for use in uses:
    for b, t in itertools.product(range(BATCH), range(use.right.shape[-2])):
      if isinstance(use, rules.Outer):
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


def without_allowance(uses, squares):
  return 0.0


@pytest.mark.parametrize("uses", CASES.values(), ids=CASES.keys())
def test_squared_norms_are_those_of_the_summed_gradient(uses, monkeypatch):
  expected = np.sum(gradients(uses) ** 2, axis=(1, 2))
  found = rules.compute_squared_norms(uses)
  assert np.all(found >= (1 - 1e-6) * expected)
  np.testing.assert_allclose(found, expected, rtol=1e-4)
  monkeypatch.setattr(rules, "compute_allowance", without_allowance)
  np.testing.assert_allclose(
    rules.compute_squared_norms(uses), expected, rtol=1e-5
  )


@pytest.mark.parametrize("uses", CASES.values(), ids=CASES.keys())
def test_weighted_sums_are_those_of_the_summed_gradient(uses):
  weights = np.array([0.5, 0.0, 2.0])
  expected = np.einsum("b,bpq->pq", weights, gradients(uses))
  total = rules.compute_weighted_sum(
    uses, jnp.asarray(weights, jnp.float32), (1, ROWS, COLUMNS)
  )
  np.testing.assert_allclose(total[0], expected, rtol=1e-4, atol=1e-5)


def test_half_precision_factors_are_summed_in_float32():
  """Weights and sums rounded to bfloat16 are off by 1e-3, each example's own."""
  uses = [rules.Outer(*[x.astype(jnp.bfloat16) for x in outer(4, 5)])]
  weights = np.array([0.3, 0.7, 1.1], np.float32)
  exact = [rules.Outer(*[np.asarray(x, np.float32) for x in uses[0]])]
  expected = np.einsum("b,bpq->pq", weights, gradients(exact))
  total = rules.compute_weighted_sum(
    uses, jnp.asarray(weights), (1, ROWS, COLUMNS)
  )
  np.testing.assert_allclose(total[0], expected, atol=1e-4)
  rounded = np.asarray(jnp.asarray(expected, jnp.bfloat16), np.float32)
  assert np.abs(rounded - expected).max() > 1e-3


def test_what_chunks_of_examples_round_away_is_added_at_the_end():
  """One after the other, 2^24 and many times 1 make 2^24 in float32."""
  chunks = 65
  values = np.zeros((chunks, sums.CHUNK), np.float32)
  values[0, 0], values[1:, 0] = 2.0**24, 1.0
  for more in (0, 1):  # a last chunk that is not full
    batch = jnp.asarray(np.append(values, np.ones(more, np.float32)))
    total = sums.sum_in_chunks(jnp.sum, batch)
    assert abs(float(total) - 2.0**24 - 64 - more) <= 1.0


def test_an_example_of_weight_zero_adds_nothing_even_if_not_finite():
  left, right = outer(0, 2)
  use = rules.Outer(left.at[1].set(np.inf), right.at[1].set(np.nan))
  weights = jnp.array([1.0, 0.0, 1.0])
  total = rules.compute_weighted_sum([use], weights, (1, ROWS, COLUMNS))
  clean = rules.compute_weighted_sum([outer(0, 2)], weights, (1, ROWS, COLUMNS))
  np.testing.assert_array_equal(total, clean)


def cancelling(seed, positions, width, rest):
  """Contributions of about `width` that cancel each other but for `rest`."""
  random = np.random.default_rng(seed)
  left = random.normal(size=(positions, width))
  right = random.normal(size=(positions, width))
  moved = left + rest * random.normal(size=left.shape)
  return rules.Outer(
    jnp.asarray(np.concatenate([left, moved])[None, None], jnp.float32),
    jnp.asarray(np.concatenate([right, -right])[None, None], jnp.float32),
  )


def norm_in_double(use):
  left, right = (np.asarray(part[0, 0], np.float64) for part in use)
  return np.linalg.norm(left.T @ right)


@pytest.mark.parametrize("positions", [1, 8, 64])
@pytest.mark.parametrize("width", [16, 256])
def test_norms_of_positions_that_cancel_are_not_too_small(positions, width):
  """A norm that is too small lets a record through with more than C."""
  for rest in (1e-2, 1e-3, 1e-4, 1e-5):
    for seed in range(10):
      use = cancelling(seed, positions, width, rest)
      found = float(rules.compute_squared_norms([use])[0]) ** 0.5
      assert found >= (1 - 1e-6) * norm_in_double(use)


def aligned(seed, positions, width, size):
  """Positions that all point one way, with sizes that add up to little.

  Rounding errors of the products then have one sign, and do not average out.
  """
  random = np.random.default_rng(seed)
  left, right = (np.abs(random.normal(size=width)) for _ in range(2))
  scale = np.exp(random.uniform(-3, 3, positions))
  sizes = np.where(np.arange(positions) % 2, -size, size)
  sizes = sizes * (1 + 0.3 * random.uniform(-1, 1, positions))
  sizes -= sizes.mean()
  sizes[0] += size * 10 ** random.uniform(-3, -0.7)
  left, right = left / np.linalg.norm(left), right / np.linalg.norm(right)
  return rules.Outer(
    jnp.asarray((scale[:, None] * left)[None, None], jnp.float32),
    jnp.asarray(((sizes / scale)[:, None] * right)[None, None], jnp.float32),
  )


@pytest.mark.parametrize("positions, width", [(128, 768), (256, 1088)])
def test_norms_of_aligned_positions_that_cancel_are_not_too_small(
  positions, width, monkeypatch
):
  """Of contributions of 1000 clip norms more than one was left before."""

  def largest_contribution():
    of = jax.jit(lambda use: rules.compute_squared_norms([use]))
    found = [
      max(float(of(use)[0]), 0.0) ** 0.5 / norm
      for use, norm in zip(uses, norms, strict=True)
    ]
    return 1 / min(found) if min(found) else np.inf

  uses = [aligned(seed, positions, width, 1000.0) for seed in range(60)]
  norms = [norm_in_double(use) for use in uses]
  assert largest_contribution() <= 1.0
  monkeypatch.setattr(rules, "compute_allowance", without_allowance)
  assert largest_contribution() > 1.5


@pytest.mark.parametrize("small, large", [(1e-20, 1e17), (1e-30, 1e30)])
def test_norms_of_factors_beyond_the_range_of_float32_are_not_too_small(
  small, large
):
  for left, right in ((small, large), (large, small)):
    use = rules.Outer(
      jnp.full((1, 1, 4, 512), left), jnp.full((1, 1, 4, 512), right)
    )
    found = float(rules.compute_squared_norms([use])[0]) ** 0.5
    assert not found < norm_in_double(use)  # infinite or nan counts as zero
    found = float(rules.compute_squared_norm(use)[0]) ** 0.5
    assert not found < norm_in_double(use)


def test_a_weighted_sum_is_no_longer_than_its_norm_says():
  """The rounding of the sum itself is in the allowance, too."""
  for seed in range(8):
    use = aligned(seed, 128, 256, 1e5)
    for dtype in (jnp.float32, jnp.bfloat16):
      rounded = rules.Outer(*[factor.astype(dtype) for factor in use])
      total = rules.compute_weighted_sum([rounded], jnp.ones(1), (1, 256, 256))
      length = np.linalg.norm(np.asarray(total, np.float64))
      for of in (
        lambda u: rules.compute_squared_norms([u]),
        rules.compute_squared_norm,
      ):
        assert length <= float(of(rounded)[0]) ** 0.5


@jax.jit
@jax.grad
def sum_lengths(table, ids):
  return jnp.linalg.norm(table[ids], axis=-1).sum()


@pytest.mark.parametrize("strategy", ["vmap", "bookkeeping", "ghost"])
def test_a_lookup_that_is_dropped_adds_nothing_even_if_not_finite(strategy):
  """The gradient of a norm at 0 is nan, of a row that reads no parameter."""
  table = jax.random.normal(jax.random.key(0), (8, 4))
  ids = jnp.array([[3, 3, 8], [1, 2, 5]])  # 8 is padding

  def loss_fn(params, batch):
    x = jnp.take(params, batch, axis=0, mode="fill", fill_value=0.0)
    lengths = jnp.linalg.norm(x, axis=-1)
    return jnp.sum(jnp.where(batch < 8, lengths, 0.0), axis=1)

  grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=1.0, strategy=strategy)
  total, aux = jax.jit(grad_fn)(table, ids)
  assert np.isfinite(aux.norms).all()
  expected = sum(
    gradient / max(1.0, np.linalg.norm(gradient))
    for row in np.asarray(ids)
    for gradient in [np.asarray(sum_lengths(table, row[row < 8]))]
  )
  np.testing.assert_allclose(total, expected, atol=1e-5)
