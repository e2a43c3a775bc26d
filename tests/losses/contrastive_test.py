"""The in-batch softmax loss against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_oracle import Loss

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


ROWS = np.array([False, True, False])
DUPLICATES = np.zeros((3, 5), bool)
DUPLICATES[0, 2] = DUPLICATES[1, 1] = True  # a row's own column stays


@pytest.mark.parametrize(
  ("options", "dropped"),
  [
    ({"temperature": 0.05}, ()),
    ({"duplicate_mask": DUPLICATES}, ((0, 2),)),
  ],
  ids=["cold", "duplicates"],
)
def test_it_is_minus_the_log_probability_of_the_own_document(options, dropped):
  expected = oracle(options.get("temperature", 0.5), dropped)
  np.testing.assert_allclose(softmax(**options), expected, rtol=1e-5, atol=1e-6)


def test_padding_rows_cost_nothing_and_are_nobodys_negatives():
  losses = softmax(is_padding_example=ROWS)
  expected = oracle(0.5, dropped={(0, 1), (2, 1)})
  expected[1] = 0.0
  np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_a_bad_temperature_or_shape_is_refused():
  with pytest.raises(ValueError, match="temperature=0"):
    softmax(temperature=0.0)
  with pytest.raises(ValueError, match=r"shape=\(3, 2\)"):
    contrastive.softmax(jnp.ones((3, 2)), temperature=1.0)


# Losses of pairs, and what the oracle calls them.
LOSSES = {
  "softmax": contrastive.Softmax(temperature=0.5),
  "softmax hard": contrastive.Softmax(temperature=0.5, hard_negatives=2),
  "softmax two directions": contrastive.Softmax(
    temperature=0.7, directions=2, hard_negatives=1
  ),
  "sigmoid": contrastive.Sigmoid(temperature=0.5, max_batch_size=6, bias=-0.3),
  "sigmoid hard": contrastive.Sigmoid(
    temperature=0.5, max_batch_size=6, hard_negatives=2
  ),
  "spreadout": contrastive.Spreadout(),
  "spreadout declared": contrastive.Spreadout(max_batch_size=6),
}
ORACLES = {
  "softmax": Loss("softmax", 0.5),
  "softmax hard": Loss("softmax", 0.5, hard=2),
  "softmax two directions": Loss("softmax", 0.7, directions=2, hard=1),
  "sigmoid": Loss("sigmoid", 0.5, bias=-0.3, declared=6),
  "sigmoid hard": Loss("sigmoid", 0.5, hard=2, declared=6),
  "spreadout": Loss("spreadout"),
  "spreadout declared": Loss("spreadout", declared=6),
}


def columns_of(pairs, n, hard):
  """The columns of documents and hard negatives of some of n pairs."""
  return [*pairs, *(n + i * hard + k for i in pairs for k in range(hard))]


def pair_case(loss, n=4, seed=0):
  """Similarities in (-1, 1) and a mask of duplicates."""
  random = np.random.default_rng(seed)
  columns = n * (1 + getattr(loss, "hard_negatives", 0))
  s = random.uniform(-0.95, 0.95, size=(n, columns)).astype(np.float32)
  return s, random.random(s.shape) < 0.3


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_weights_of_pairs_are_those_of_the_definition(name):
  loss, oracle = LOSSES[name], ORACLES[name]
  s, duplicate = pair_case(loss)
  active = np.ones(len(s), bool)
  for mask in [None, duplicate]:
    masked = duplicate & (mask is not None)
    rows = oracle.rows(s.astype(complex), active, masked).real
    slopes = oracle.weights(s.astype(float), masked=masked)
    losses = jax.jit(loss.losses)(jnp.asarray(s), is_duplicate=mask)
    weights = jax.jit(loss.weights)(jnp.asarray(s), is_duplicate=mask)
    np.testing.assert_allclose(losses, rows, rtol=1e-5)
    np.testing.assert_allclose(weights, slopes, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_padding_changes_nothing_for_the_real_pairs(name):
  loss = LOSSES[name]
  s, duplicate = pair_case(loss, n=3)
  rows = [0, 1, 3]  # Of five: rows 2 and 4 are padding.
  real = np.ix_(rows, columns_of(rows, 5, s.shape[1] // 3 - 1))
  padded = np.full((5, s.shape[1] // 3 * 5), np.nan, np.float32)
  padded[real] = s
  masks = {
    "is_padding_example": ~np.isin(np.arange(5), rows),
    "is_duplicate": np.zeros(padded.shape, bool),
  }
  masks["is_duplicate"][real] = duplicate
  weights = np.array(jax.jit(loss.weights)(jnp.asarray(padded), **masks))
  expected = jax.jit(loss.weights)(jnp.asarray(s), is_duplicate=duplicate)
  np.testing.assert_allclose(weights[real], expected, rtol=1e-5, atol=1e-6)
  weights[real] = 0
  assert (weights == 0).all()
  losses = jax.jit(loss.losses)(jnp.asarray(padded), **masks)
  expected = jax.jit(loss.losses)(jnp.asarray(s), is_duplicate=duplicate)
  np.testing.assert_allclose(losses[np.array(rows)], expected, rtol=1e-5)
  assert (losses[masks["is_padding_example"]] == 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_weights_are_bounded_whatever_the_similarities(name):
  loss = LOSSES[name]
  s, _ = pair_case(loss)
  wild, inside = s.copy(), s.copy()
  wild[0, 1], inside[0, 1] = 7.0, 1.0
  wild[1, 1], inside[1, 1] = -np.inf, -1.0
  wild[2, 0], inside[2, 0] = np.nan, -1.0
  weights = jax.jit(loss.weights)
  expected = np.array(weights(jnp.asarray(inside)))
  expected[2, 0] = 0.0
  np.testing.assert_array_equal(weights(jnp.asarray(wild)), expected)


def test_losses_that_would_void_the_bound_are_refused():
  for name in ["softmax", "sigmoid", "spreadout"]:
    with pytest.raises(ValueError, match=r"hard.negatives"):
      LOSSES[name].weights(jnp.zeros((2, 4)))
  with pytest.raises(ValueError, match="as many hard negatives"):
    LOSSES["softmax hard"].weights(jnp.zeros((2, 5)))
  for name in ["sigmoid", "spreadout declared"]:
    with pytest.raises(ValueError, match="max_batch_size=6"):
      LOSSES[name].weights(jnp.zeros((7, 7)))
    with pytest.raises(ValueError, match="declared_batch_size=6"):
      LOSSES[name].sensitivity(
        max_batch_size=7,
        l2_clip_norm=1.0,
        relation="REPLACE_ONE",
        unit="pair",
      )


@pytest.mark.parametrize(
  ("build", "message"),
  [
    (lambda: contrastive.Softmax(temperature=0.0), "temperature"),
    (lambda: contrastive.Softmax(temperature=1.0, directions=3), "directions"),
    (
      lambda: contrastive.Sigmoid(temperature=1.0, max_batch_size=1),
      "max_batch_size=1",
    ),
    (lambda: contrastive.Spreadout(max_batch_size=1), "max_batch_size=1"),
    (lambda: contrastive.Spreadout(similarity_range=(1, 0)), "range"),
  ],
)
def test_settings_of_losses_out_of_range_are_refused(build, message):
  with pytest.raises(ValueError, match=message):
    build()
