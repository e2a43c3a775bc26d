"""Clipped similarities of real encoders: the embedding net and a T5's."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_t5

from synthq_jax import optim
from synthq_jax.losses import contrastive as losses
from synthq_jax.models import dual_encoder, image_encoders
from synthq_jax.optim.bookkeeping import rules

SIZE = 8
LENGTH = 3  # tokens of a query and of a document


@dataclasses.dataclass(frozen=True)
class Network:
  """An encoder, its parameters, examples to draw, and a clip norm for them."""

  encode: Callable[..., jax.Array]
  params: Any
  draw: Callable[..., np.ndarray]
  clip: float


def blobs(rng, *shape):
  """Images of a few bright places."""
  at = rng.uniform(0, 8, size=(*shape, 3, 2, 1, 1))
  rows, columns = np.indices((8, 8))
  square = (at[..., 0, :, :] - rows) ** 2 + (at[..., 1, :, :] - columns) ** 2
  places = np.exp(-square) * rng.choice([-3, 3], size=(*shape, 3, 1, 1))
  return places.sum(axis=-3)[..., None].astype(np.float32)


@pytest.fixture(autouse=True, scope="module")
def _without_allowance():
  """What norms add for their rounding has tests of its own (rules_test)."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(rules, "compute_allowance", lambda uses, squares: 0.0)
    yield


@functools.cache
def embedding_net():
  net = image_encoders.EmbeddingNet()
  rng = np.random.default_rng(0)
  params = net.init(jax.random.key(3), blobs(rng, 1))
  return Network(net.apply, params, blobs, 9.0)


@functools.cache
def of_t5():
  """A T5's encoder, of which the layer is trained."""
  config = random_t5.config(emb_dim=16, mlp_dim=24)
  frozen = dual_encoder.encoder_params(random_t5.params(config))

  def encode(layer, tokens):
    encoder = frozen["encoder"] | {"layers_0": layer}
    return dual_encoder.encode(frozen | {"encoder": encoder}, config, tokens)

  def draw(rng, *shape):
    return rng.integers(3, config.vocab_size, size=(*shape, LENGTH)).astype(
      np.int32
    )

  layer = jax.tree.map(jnp.asarray, frozen["encoder"]["layers_0"])
  return Network(encode, layer, draw, 2.1)


def flat(tree):
  leaves = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
  return np.concatenate(leaves)


def pair_gradients(network, batch):
  """All similarities, and their gradients one by one, [query, column, entry]."""

  def similarity(params, pair):
    query, document = pair
    q = network.encode(params, query[None])
    return jnp.sum(q * network.encode(params, document[None]))

  i, j = np.indices((SIZE, SIZE)).reshape(2, -1)
  of_one = functools.partial(jax.value_and_grad(similarity), network.params)
  values, gradients = jax.jit(lambda pairs: jax.lax.map(of_one, pairs))(
    (batch["queries"][i], batch["documents"][j])
  )
  entries = [
    np.asarray(x, np.float64).reshape(SIZE, SIZE, -1)
    for x in jax.tree.leaves(gradients)
  ]
  return values.reshape(SIZE, SIZE), np.concatenate(entries, axis=2)


@pytest.mark.parametrize("network", [embedding_net, of_t5])
def test_the_sum_is_that_of_all_gradients_clipped_one_by_one(network):
  network, loss = network(), losses.Softmax(temperature=0.5)
  fn = optim.contrastive_clipped_grad(
    network.encode,
    network.encode,
    loss=loss,
    l2_clip_norm=network.clip,
    method=optim.Logit(),
    max_batch_size=SIZE,
  )
  rng = np.random.default_rng(1)
  batch = {name: network.draw(rng, SIZE) for name in ("queries", "documents")}
  total, _ = jax.jit(fn)(network.params, batch)
  similarity, gradients = pair_gradients(network, batch)
  weights = np.asarray(loss.weights(similarity), np.float64)
  norms = np.linalg.norm(gradients, axis=2)
  assert 0.3 < np.mean(norms > network.clip) < 0.95
  factors = weights * np.minimum(1, network.clip / norms)
  expected = np.einsum("ij,ijp->p", factors, gradients)
  error = np.abs(flat(total) - expected).max()
  assert error <= 1e-5 * np.abs(expected).max()
