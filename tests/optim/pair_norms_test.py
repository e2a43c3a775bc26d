"""Norms of the gradients of all similarities, from factors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax.optim.bookkeeping import rules
from synthq_jax.optim.contrastive import encoders, pair_norms, shares

RANDOM = np.random.default_rng(0)
PARAMS = {
  "table": jnp.asarray(RANDOM.normal(size=(24, 4)), jnp.float32),
  "w": jnp.asarray(RANDOM.normal(size=(4, 4)), jnp.float32),
  "scale": jnp.asarray(RANDOM.normal(size=4), jnp.float32),
}
QUERIES = jnp.asarray(RANDOM.integers(0, 24, size=(5, 3)), jnp.int32)
DOCUMENTS = jnp.asarray(RANDOM.integers(0, 24, size=(7, 6)), jnp.int32)


def plain(params, tokens):
  """One lookup, one product of more positions than rows, one odd use."""
  x = (
    jnp.tanh(params["table"][tokens] @ params["w"])
    * params["scale"][None, None]
  )
  x = x.sum(axis=1)
  return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def tied(params, tokens):
  """A table that is looked up and multiplied with, from both sides."""
  x = jnp.tanh(params["table"][tokens]) + params["table"][tokens[:, ::-1] // 2]
  x = jnp.tanh(x @ params["w"]) + jnp.tanh(x @ params["w"].T)
  x = jnp.tanh(x @ params["table"].T).mean(axis=1) @ params["table"]
  return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def twice(params, tokens):
  """A matrix that is used twice in the same way."""
  x = jnp.tanh(params["table"][tokens[:, :2]] @ params["w"])
  x = (x @ params["w"]).sum(axis=1)
  return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def mixed(params, tokens):
  """A table that is looked up, and whose rows are mixed."""
  x = params["table"][tokens[:, 1:3]].sum(axis=1)
  weights = jnp.tanh(x @ params["w"] @ MIX)
  x = jnp.tanh(x) + weights @ params["table"]
  return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def convolved(params, tokens):
  """A convolution, with so few dimensions that Jacobians pay."""
  x = params["table"][tokens[:, :3]]
  x = jax.lax.conv_general_dilated(
    x, jnp.tile(params["w"][None], (3, 1, 1)), (1,), "SAME",
    dimension_numbers=("NHC", "HIO", "NHC"),
  )  # fmt: skip
  x = jnp.tanh(x).sum(axis=1)[:, :3]
  return x / jnp.linalg.norm(x, axis=1, keepdims=True)


MIX = jnp.asarray(RANDOM.normal(size=(4, 24)), jnp.float32)
ENCODERS = {
  "mixed": mixed,
  "convolved": convolved,
  "plain": plain,
  "tied": tied,
  "twice": twice,
}


CASES = pytest.mark.parametrize(
  ("name", "keep_ratio"),
  [
    *((name, 0) for name in ENCODERS),
    # Where all gradients are formed, encoders differ in their shape alone.
    pytest.param("tied", 100, marks=pytest.mark.slow),
  ],
)


@functools.cache
def by_hand(name):
  """The norms of all gradients as they stand: whole, and of each encoder."""
  encoder = ENCODERS[name]

  def similarity(query, document):
    return encoder(query, QUERIES) @ encoder(document, DOCUMENTS).T

  sides = jax.jit(jax.jacrev(similarity, (0, 1)))(PARAMS, PARAMS)
  return [
    np.sqrt(
      sum(
        np.sum(np.square(x).reshape(5, 7, -1), axis=2)
        for x in jax.tree.leaves(gradients)
      )
    )
    for gradients in (jax.tree.map(np.add, *sides), *sides)
  ]


def norms(function, encoder, *, keep_ratio, **options):
  def run(queries, documents):
    towers = encoders.trace_towers(
      encoder, encoder, PARAMS, queries, documents, keep_ratio=keep_ratio
    )
    return function(towers, queries, documents, **options)

  return jax.jit(run)(QUERIES, DOCUMENTS)


@CASES
def test_exact_norms_have_the_cross_terms_of_shared_parameters(
  name, keep_ratio, monkeypatch
):
  # What it adds for rounding has tests of its own.
  monkeypatch.setattr(rules, "compute_allowance", lambda uses, squares: 0.0)
  expected = by_hand(name)[0]
  ways = [{"memory_bytes": 0}]
  if name in ("convolved", "tied"):  # whose Jacobians may pay
    ways += [
      {"memory_bytes": 2**30},
      {"memory_bytes": 0, "microbatch_size": 3},
    ]
  for options in ways:
    found = norms(
      pair_norms.compute_exact, ENCODERS[name], keep_ratio=keep_ratio, **options
    )
    # The rounding of a norm is relative to what it is summed from.
    np.testing.assert_allclose(
      found, expected, rtol=1e-5, atol=1e-6 * expected.max()
    )


@CASES
def test_gram_matrices_give_each_encoders_norms_and_never_less(
  name, keep_ratio
):
  found = norms(
    functools.partial(
      pair_norms._compute_both_norms, memory_bytes=0, share=shares.Share()
    ),
    ENCODERS[name],
    keep_ratio=keep_ratio,
  )
  for one, other in zip(found, by_hand(name)[1:], strict=True):
    # The allowance for rounding shows where a product nearly vanishes.
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * other.max())
    if keep_ratio:  # no factors: the same numbers, added in another order
      other = np.nextafter(other, np.float32(0))
    assert np.all(one >= other)


def test_a_norm_that_nearly_vanishes_is_not_too_small():
  """The Jacobian of a unit vector takes the vector itself to zero."""
  others = plain(PARAMS, QUERIES)
  towers = encoders.trace_towers(plain, plain, PARAMS, QUERIES, DOCUMENTS)

  with jax.enable_x64(True):
    wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), PARAMS)

    def inner(params):
      return jnp.sum(plain(params, QUERIES) * np.asarray(others, float), axis=1)

    jacobian = jax.tree.leaves(jax.jit(jax.jacrev(inner))(wide))
    least = np.sqrt(
      sum(np.sum(np.square(x).reshape(5, -1), 1) for x in jacobian)
    )
  own = functools.partial(pair_norms.compute_encoder_norms, towers.query)
  norms = np.asarray(jax.jit(own, static_argnums=2)(QUERIES, others, 0))
  found = np.diagonal(norms)
  assert np.all(found >= least)
  assert np.all(found < 1e-2 * norms.max())


def test_products_count_parameters_that_one_encoder_alone_uses():
  names = sorted(PARAMS)
  jacobians = []
  for tokens, missing in ((QUERIES, "table"), (DOCUMENTS, "scale")):
    whole = jax.jit(jax.jacrev(plain))(PARAMS, tokens)
    jacobians.append(
      {
        number: jnp.swapaxes(whole[name], 0, 1)
        for number, name in enumerate(names)
        if name != missing
      }
    )
  q, d = plain(PARAMS, QUERIES), plain(PARAMS, DOCUMENTS)
  expected = np.zeros((5, 7))
  for number in range(len(names)):
    gradients = 0.0
    if number in jacobians[0]:
      gradients += np.einsum("ki...,jk->ij...", jacobians[0][number], d)
    if number in jacobians[1]:
      gradients += np.einsum("kj...,ik->ij...", jacobians[1][number], q)
    expected += np.square(gradients).reshape(5, 7, -1).sum(axis=2)
  found = jax.jit(pair_norms.compute_squared_products)(q, d, *jacobians)
  np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("keep_ratio", [0, 100], ids=["factors", "formed"])
def test_what_goes_back_holds_no_copy_of_a_kernel_for_each_example(keep_ratio):
  towers = encoders.trace_towers(
    plain, plain, PARAMS, QUERIES, DOCUMENTS, keep_ratio=keep_ratio
  )
  _, _, pull = encoders.linearize(towers.query, QUERIES)
  (kept,) = pull.args
  assert (4, 4) in [x.shape for x in kept]
  assert (5, 4, 4) not in [x.shape for x in kept]
