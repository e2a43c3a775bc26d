"""What rounding, padding and odd derivatives move in contrastive sums."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from synthq_jax import optim
from synthq_jax.losses import contrastive
from synthq_jax.models import dual_encoder
from synthq_jax.privacy import sampling
from synthq_jax.training import dp_step
from tests.red_team import sums


def moved(fn, params, batch, size):
  """How far the first pair moves the sum."""
  fn, padding = jax.jit(fn), np.zeros(size, bool)
  without = padding.copy()
  without[0] = True
  both, less = (
    fn(params, batch, is_padding_example=jnp.array(each))[0]
    for each in (padding, without)
  )
  return float(jnp.linalg.norm(both - less))


@pytest.mark.parametrize(
  "options",
  [
    {"method": optim.Logit()},
    {"method": optim.Logit(norms="bound")},
    {"method": optim.Logit(), "microbatch_size": 96},
  ],
)
def test_lookups_of_many_tokens_do_not_make_logits_sum_drift(options):
  """A running sum over records and tokens: 3 clip norms at this size."""
  size, tokens = 1024, 128
  terms = sums.drifting(size, tokens, size)

  def encode_query(table, features):
    rows = table[jnp.where(features > 5, 1, 0)]
    return jnp.sum(rows * features[..., None], axis=1)

  fn = optim.contrastive_clipped_grad(
    encode_query,
    lambda _, vectors: vectors,
    loss=contrastive.Sigmoid(temperature=1.0, bias=-200.0, max_batch_size=size),
    l2_clip_norm=1.0,
    max_batch_size=size,
    **options,
  )
  away = jnp.tile(jnp.array([[-1.0, 0.0]]), (size, 1))
  batch = {"queries": jnp.array(terms), "documents": away}
  change = moved(fn, jnp.zeros((3, 2)), batch, size)
  assert 0.9 < change < 1.005 * fn.sensitivity("ADD_OR_REMOVE_ONE", "pair")


@pytest.mark.parametrize("gradients", ["all", "pair"])
def test_rows_are_added_without_drift(gradients):
  """One after the other: 1.25 clip norms at 4,096 rows."""
  size = 4096
  terms = sums.drifting(size, 1, size)[:, 0]
  fn = optim.contrastive_clipped_grad(
    lambda scale, x: jnp.stack([scale * x, 0 * x], axis=1),
    lambda _, x: jnp.stack([x, 0 * x], axis=1),
    loss=contrastive.Softmax(temperature=1.0),
    l2_clip_norm=1.0,
    max_batch_size=size,
    method=optim.Row(negatives="public", gradients=gradients),
  )
  batch = {
    "queries": jnp.array(terms),
    "documents": -jnp.ones(size),
    "public_negatives": jnp.array([1.0]),
  }
  change = moved(fn, jnp.float32(0), batch, size)
  assert 0.9 < change < 1.005 * fn.sensitivity("ADD_OR_REMOVE_ONE", "pair")


@pytest.mark.parametrize(
  "method",
  [
    optim.Row(),
    optim.Row(gradients="pair"),
    optim.Logit(),
    optim.Batch(),
  ],
)
def test_a_record_that_is_not_drawn_says_nothing_through_padding(method):
  """Padding repeats record 0: its vector is finite, the vector's derivative not."""

  def encode(kernel, x):
    vector = x @ kernel
    length = jnp.linalg.norm(vector, axis=1, keepdims=True)
    is_some = length > 0
    return jnp.where(is_some, vector / jnp.where(is_some, length, 1.0), 0.0)

  queries, documents = np.random.default_rng(0).normal(size=(2, 64, 4))
  sampler = sampling.Poisson.with_margin(num_examples=64, expected_batch_size=8)
  drawn = (sampler.batch([1], t).to_arrays(padding_index=-1) for t in range(99))
  step = next(t for t, (indices, _) in enumerate(drawn) if 0 not in indices)
  fn = jax.jit(
    optim.contrastive_clipped_grad(
      encode,
      encode,
      loss=contrastive.Softmax(temperature=1.0),
      l2_clip_norm=0.1,
      max_batch_size=sampler.max_batch_size,
      method=method,
    )
  )
  totals = []
  for first in (documents[0], np.zeros(4)):
    documents[0] = first
    records = {"queries": queries, "documents": documents.copy()}
    records = jax.tree.map(np.float32, records)
    batch, is_padding = dp_step.draw(records, sampler, [1], step)
    assert is_padding.any()
    total, _ = fn(jnp.eye(4), batch, is_padding_example=jnp.asarray(is_padding))
    totals.append(np.asarray(total))
  assert np.linalg.norm(totals[0]) > 0.01
  np.testing.assert_array_equal(*totals)


def normalised(g):
  return g / (1e-30 + jnp.linalg.norm(g))


@jax.custom_vjp
def calm_rule(x):
  return x


calm_rule.defvjp(lambda x: (x, None), lambda _, g: (normalised(g),))


def calm_solve(x):
  return jax.lax.custom_linear_solve(
    lambda v: v, x, lambda _, b: b, lambda _, g: normalised(g)
  )


@pytest.mark.parametrize("calm", [calm_rule, calm_solve])
def test_logit_refuses_a_derivative_of_the_users_own(calm):
  """A layer that normalises its cotangent: 2 where .06 was claimed."""

  def encode(kernel, x):
    vector = calm(x @ kernel)
    return vector / jnp.linalg.norm(vector, axis=1, keepdims=True)

  batch = {"queries": jnp.eye(4), "documents": jnp.eye(4)}
  options = {
    "loss": contrastive.Softmax(temperature=1.0),
    "l2_clip_norm": 0.01,
    "max_batch_size": 4,
  }
  fn = optim.contrastive_clipped_grad(
    encode, encode, method=optim.Logit(), **options
  )
  with pytest.raises(ValueError, match="without jax.custom_vjp for Logit"):
    fn(jnp.eye(4), batch)
  rows = optim.contrastive_clipped_grad(
    encode, encode, method=optim.Row(), **options
  )
  total, _ = jax.jit(rows)(jnp.eye(4), batch)
  assert jnp.linalg.norm(total) <= 4 * 0.01 * 1.005


@pytest.mark.parametrize("norms", ["exact", "bound"])
@pytest.mark.parametrize("towers", [1, 2])
def test_logits_norms_allow_for_what_vanishes_but_for_rounding(norms, towers):
  """A query along its document, behind a short vector: 22 clip norms once."""
  dim, norm = 16, 0.001

  def encoder(kernel):
    return lambda params, x: dual_encoder.normalize(x @ params[kernel])

  fn = optim.contrastive_clipped_grad(
    encoder(0),
    encoder(towers - 1),
    loss=contrastive.Sigmoid(temperature=0.3, bias=-8.0, max_batch_size=2),
    l2_clip_norm=norm,
    method=optim.Logit(norms=norms),
    max_batch_size=2,
  )

  def size(params, x):
    total, _ = fn(params, {"queries": x[None], "documents": x[None]})
    return optax.tree.norm(total)

  of_texts = jax.jit(jax.vmap(size, in_axes=(None, 0)))
  texts = np.random.default_rng(0).normal(size=(500, dim))
  for scale in (0.1, 1e-4, 1e-5):
    params = [scale * jnp.eye(dim)] * towers
    sizes = of_texts(params, jnp.array(texts, jnp.float32))
    assert sizes.max() < 0.01 * fn.sensitivity("ADD_OR_REMOVE_ONE", "pair")
