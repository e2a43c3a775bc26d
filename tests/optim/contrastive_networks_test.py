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

SIZE, CHUNK = 8, 44
LENGTH = 3  # tokens of a query and of a document


@dataclasses.dataclass(frozen=True)
class Network:
  """An encoder, its parameters, examples to draw, and a clip norm for them."""

  encode: Callable[..., jax.Array]
  params: Any
  draw: Callable[..., np.ndarray]
  clip: float

  def make(self, loss, size):
    return optim.contrastive_clipped_grad(
      self.encode,
      self.encode,
      loss=loss,
      l2_clip_norm=self.clip,
      method=optim.Logit(),
      max_batch_size=size,
    )


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


def pair_gradients(network):
  """All similarities, and their gradients one by one, [query, column, entry]."""
  batch = base_batch(network)

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


FIELDS = {"pair": ("queries", "documents"), "query": ("queries",)}


def base_batch(network):
  rng = np.random.default_rng(1)
  return {name: network.draw(rng, SIZE) for name in FIELDS["pair"]}


def sums(network, fn):
  """A function from records in the last place to their sums [record, entry].

  A record is "no pair", which is padding, "no query", which takes its row out,
  or what takes the place of the last query and document.
  """
  base = base_batch(network)
  last = jnp.arange(SIZE) == SIZE - 1

  def total(record):
    batch = {
      name: jnp.asarray(values).at[-1].set(record[name])
      for name, values in base.items()
    }
    batch["has_query"] = ~(last & record["no query"])
    summed, _ = fn(
      network.params, batch, is_padding_example=last & record["no pair"]
    )
    return jnp.concatenate([x.ravel() for x in jax.tree.leaves(summed)])

  run = jax.jit(lambda records: jax.lax.map(total, records, batch_size=11))
  own = {name: x[-1] for name, x in base.items()}
  own |= {"no query": False, "no pair": False}

  def of(records):
    # In chunks of one size, so that it is compiled once.
    filled = [own | record for record in records]
    filled += [own] * (-len(filled) % CHUNK)
    chunks = [filled[i : i + CHUNK] for i in range(0, len(filled), CHUNK)]
    found = [
      np.asarray(run(jax.tree.map(lambda *x: np.stack(x), *chunk)))
      for chunk in chunks
    ]
    return np.concatenate(found)[: len(records)]

  return of


def at_random(network, unit):
  rng = np.random.default_rng(2)
  return [
    {name: network.draw(rng) for name in FIELDS[unit]} for _ in range(200)
  ]


def by_hand(network, unit):
  """Records that repeat, exchange and oppose what others of the batch hold."""
  base = base_batch(network)
  rng = np.random.default_rng(3)
  pool = network.draw(rng, 200)
  q, d = base["queries"], base["documents"]
  examples = np.concatenate([pool, q[:-1], d[:-1]])
  vectors = np.asarray(jax.jit(network.encode)(network.params, examples))
  vectors, queries, documents = np.split(vectors, [200, 200 + SIZE - 1])
  queries, documents = queries.mean(axis=0), documents.mean(axis=0)
  far_query, near_query = pool[np.argsort(vectors @ queries)[[0, -1]]]
  far_document, near_document = pool[np.argsort(vectors @ documents)[[0, -1]]]
  records = [
    (d[0], q[0]),  # exchanged
    (q[0], d[0]),  # repeated
    (q[1], q[1]),  # alike
    (d[2], d[2]),
    (near_document, near_query),  # draws all rows, and is drawn by all columns
    (near_document, far_query),
    (far_document, near_query),
    (far_document, far_query),
    (0 * q[0], near_query),  # nothing
    (near_document, 0 * d[0]),
  ]
  # A query's record has its first value alone.
  return [dict(zip(FIELDS[unit], one, strict=False)) for one in records]


def bred(records, moved, count):
  """Records that take each field from one of the ten that moved furthest."""
  rng = np.random.default_rng(0)
  best = [records[i] for i in np.argsort(moved)[::-1][:10]]
  fresh = [records[i] for i in rng.integers(len(records), size=count)]
  return [
    {
      name: (fresh[k] if rng.random() < 0.3 else best[rng.integers(10)])[name]
      for name in best[0]
    }
    for k in range(count)
  ]


def largest_moves(network, of, unit):
  """How far records move the sum at most: when they go, and when exchanged."""
  absent = {"no pair" if unit == "pair" else "no query": True}
  records = at_random(network, unit) + by_hand(network, unit)
  found = of([absent, *records])
  changes = found[1:] - found[:1]
  if unit == "pair":
    more = bred(records, np.linalg.norm(changes, axis=1), CHUNK)
    changes = np.r_[changes, of(more) - found[:1]]
  products = changes @ changes.T
  squares = np.diagonal(products)
  between = squares[:, None] + squares[None, :] - 2 * products
  return np.sqrt(squares.max()), np.sqrt(between.max())


@pytest.mark.parametrize("network", [embedding_net, of_t5])
def test_no_record_moves_the_sum_further_than_its_sensitivity(network):
  network, loss = network(), losses.Softmax(temperature=0.5)
  fn = network.make(loss, SIZE)
  of = sums(network, fn)

  # The sum is that of all gradients, clipped one by one.
  similarity, gradients = pair_gradients(network)
  weights = np.asarray(loss.weights(similarity), np.float64)
  norms = np.linalg.norm(gradients, axis=2)
  assert 0.3 < np.mean(norms > network.clip) < 0.95
  factors = weights * np.minimum(1, network.clip / norms)
  expected = np.einsum("ij,ijp->p", factors, gradients)
  error = np.abs(of([{}])[0] - expected).max()
  assert error <= 1e-5 * np.abs(expected).max()

  for unit in FIELDS:
    gone, exchanged = largest_moves(network, of, unit)
    for relation, moved in (
      ("ADD_OR_REMOVE_ONE", gone),
      ("REPLACE_SPECIAL", gone),
      ("REPLACE_ONE", exchanged),
    ):
      limit = fn.sensitivity(relation, unit)
      print(f"{relation} {unit}: {moved / limit:.3f} of {limit:.3f}")
      assert 0 < moved <= limit * (1 + 1e-5)
