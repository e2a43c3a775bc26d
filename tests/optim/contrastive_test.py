"""Clipped contrastive gradients against plain ones, pair by pair."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax import optim
from synthq_jax.losses import contrastive as losses
from synthq_jax.models import dual_encoder, t5, t5_config
from synthq_jax.optim import _group

FEATURES, HIDDEN, DIM = 6, 10, 4
CLIP = 2.0
LOSSES = {
  "softmax": losses.Softmax(temperature=0.5),
  "two directions": losses.Softmax(temperature=0.5, directions=2),
  "sigmoid": losses.Sigmoid(temperature=0.5, max_batch_size=8),
  "spreadout": losses.Spreadout(),
}


def encode(params, x):
  x = jnp.tanh(x @ params["w"] + params["b"][None]) @ params["v"]
  return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def make_params(seed=0):
  rng = np.random.default_rng(seed)
  shapes = {"w": (FEATURES, HIDDEN), "b": (HIDDEN,), "v": (HIDDEN, DIM)}
  return {
    name: jnp.asarray(rng.normal(size=shape), jnp.float32)
    for name, shape in shapes.items()
  }


PARAMS = make_params()


def make_batch(size, seed=0, hard=0):
  rng = np.random.default_rng(seed)

  def draw(*shape):
    return jnp.asarray(rng.normal(size=(*shape, FEATURES)), jnp.float32)

  batch = {"queries": draw(size), "documents": draw(size)}
  if hard:
    batch["negatives"] = draw(size, hard)
  return batch


def make(method, loss="softmax", *, size=8, clip=CLIP, encoders=None, **more):
  query, document = encoders or (encode, encode)
  return optim.contrastive_clipped_grad(
    query,
    document,
    loss=LOSSES.get(loss, loss),
    l2_clip_norm=clip,
    method=method,
    max_batch_size=size,
    **more,
  )


@functools.cache
def jitted(fn):
  return jax.jit(lambda params, batch, padding: fn(
    params, batch, is_padding_example=padding
  ))  # fmt: skip


def call(fn, batch, padding=None, params=PARAMS):
  size = len(batch["queries"])
  padding = np.zeros(size, bool) if padding is None else np.asarray(padding)
  return jitted(fn)(params, batch, padding)


def flat(tree):
  leaves = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
  return np.concatenate(leaves)


def distance(a, b):
  return np.linalg.norm(flat(a) - flat(b))


def pair_gradients(batch, params=PARAMS, encoders=(encode, encode)):
  """All gradients of similarities as they stand, [query, column, parameter]."""
  columns = batch["documents"]
  if "negatives" in batch:
    hard = batch["negatives"].reshape(-1, FEATURES)
    columns = jnp.concatenate([columns, hard])

  def similarity(params):
    q, d = encoders[0](params, batch["queries"]), encoders[1](params, columns)
    return q @ d.T

  jacobian = jax.tree.leaves(jax.jit(jax.jacrev(similarity))(params))
  shape = (len(batch["queries"]), len(columns))
  gradients = [np.asarray(x, np.float64).reshape(*shape, -1) for x in jacobian]
  return np.concatenate(gradients, axis=2), similarity(params)


def logit_oracle(loss, batch, *, params=PARAMS, encoders=(encode, encode), **masks):
  """Algorithm 1 of Logit-DP with everything in memory."""
  gradients, similarity = pair_gradients(batch, params, encoders)
  weights = np.asarray(loss.weights(similarity, **masks), np.float64)
  norms = np.linalg.norm(gradients, axis=2)
  assert np.mean(norms > CLIP) > 0.1 and np.mean(norms < CLIP) > 0.1
  factors = np.minimum(1, CLIP / norms)
  return np.einsum("ij,ijp->p", weights * factors, gradients)


def assert_close(tree, expected, tolerance=1e-5):
  difference = np.linalg.norm(flat(tree) - flat(expected))
  assert difference <= tolerance * np.linalg.norm(flat(expected))


# Logit: similarities.


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("norms", ["exact", "sequential"])
def test_logit_clips_weighs_and_sums_gradients_of_similarities(loss, norms):
  batch = make_batch(7)
  total, aux = call(make(optim.Logit(norms=norms), loss), batch)
  assert_close(total, logit_oracle(LOSSES[loss], batch))
  assert aux.norms.shape == aux.losses.shape == (7,)


def test_logit_with_hard_negatives_padding_and_duplicates():
  loss = losses.Softmax(temperature=0.5, hard_negatives=2)
  batch = make_batch(6, hard=2)
  padding = np.array([False, True, False, False, True, False])
  ids = np.array([3, 8, 3, 4, 9, 5])
  negatives = np.array([[1, 2], [7, 7], [6, -1], [3, 1], [7, 7], [0, 2]])
  all_ids = np.concatenate([ids, negatives.ravel()])
  duplicate = ids[:, None] == all_ids[None, :]
  duplicate[:, :6] &= ~np.eye(6, dtype=bool)
  duplicate[:, 6 + 5] = True  # The missing one, -1.
  assert duplicate[0, 2] and duplicate[0, 6 + 6]
  expected = logit_oracle(
    loss, batch, is_padding_example=padding, is_duplicate=jnp.asarray(duplicate)
  )
  fn = make(optim.Logit(), loss)
  batch |= {"document_ids": ids, "negative_ids": negatives}
  # Padding counts for nothing, whatever it holds.
  for name in ("queries", "documents", "negatives"):
    batch[name] = batch[name].at[jnp.array([1, 4])].set(jnp.nan)
  total, aux = call(fn, batch, padding)
  assert_close(total, expected)
  np.testing.assert_array_equal(aux.losses[padding], [0, 0])
  np.testing.assert_array_equal(aux.norms[padding], [0, 0])


@pytest.mark.parametrize("size", [8, 16, 64])
@pytest.mark.parametrize("memory_bytes", [0, 2**30])
def test_exact_norms_give_what_the_sequential_oracle_gives(size, memory_bytes):
  batch = make_batch(size, seed=size)
  exact = make(optim.Logit(memory_bytes=memory_bytes), size=size)
  oracle = make(optim.Logit(norms="sequential"), size=size)
  assert_close(call(exact, batch)[0], call(oracle, batch)[0])


def both_towers(params):
  return {"query": params, "document": jax.tree.map(lambda x: 0.5 * x, params)}


SEPARATE = (
  lambda params, x: encode(params["query"], x),
  lambda params, x: encode(params["document"], x),
)


def test_separate_towers_have_no_cross_term():
  batch, params = make_batch(7), both_towers(PARAMS)
  expected = logit_oracle(
    LOSSES["softmax"], batch, params=params, encoders=SEPARATE
  )
  total, _ = call(make(optim.Logit(), encoders=SEPARATE), batch, params=params)
  assert_close(total, expected, 2e-5)


@pytest.mark.parametrize("size", [3, 7])  # fewer and more than dimensions
def test_bounds_are_the_sums_of_both_encoders_norms(size):
  batch = make_batch(size)
  loss = LOSSES["softmax"]
  halves = [
    pair_gradients(batch, encoders=encoders)[0]
    for encoders in (
      (encode, lambda params, x: jax.lax.stop_gradient(encode(params, x))),
      (lambda params, x: jax.lax.stop_gradient(encode(params, x)), encode),
    )
  ]
  norms = sum(np.linalg.norm(half, axis=2) for half in halves)
  _, similarity = pair_gradients(batch)
  factors = np.asarray(loss.weights(similarity)) * np.minimum(1, CLIP / norms)
  expected = np.einsum("ij,ijp->p", factors, sum(halves))
  total, aux = call(make(optim.Logit(norms="bound")), batch)
  assert_close(total, expected, 3e-5)
  assert np.all(np.asarray(aux.norms) >= norms.max(axis=1) * (1 - 1e-6))


def test_microbatches_change_no_number():
  batch = make_batch(7, hard=1)
  loss = losses.Softmax(temperature=0.5, hard_negatives=1)
  padding = [False] * 6 + [True]
  for method in (optim.Logit(), optim.Logit(norms="bound"), optim.Batch(),
                 optim.Row()):  # fmt: skip
    whole, _ = call(make(method, loss), batch, padding)
    parts, _ = call(make(method, loss, microbatch_size=3), batch, padding)
    assert_close(parts, whole)


@functools.cache
def tiny_t5():
  config = t5_config.T5Config(
    vocab_size=32, emb_dim=8, num_heads=2, head_dim=4, mlp_dim=12,
    num_encoder_layers=1, num_decoder_layers=1,
  )  # fmt: skip
  shapes = jax.eval_shape(
    functools.partial(t5.init_params, config), jax.random.key(0)
  )
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda leaf: rng.normal(size=leaf.shape).astype(np.float32) / 2, shapes
  )

  def encode(params, tokens):
    return dual_encoder.encode(params, config, tokens)

  return encode, dual_encoder.encoder_params(params)


@pytest.mark.parametrize("norms", ["exact", "bound"])
def test_logit_on_a_t5_equals_the_oracle(norms):
  encoder, params = tiny_t5()
  rng = np.random.default_rng(0)
  batch = {
    "queries": jnp.asarray(rng.integers(1, 32, size=(8, 4)), jnp.int32),
    "documents": jnp.asarray(rng.integers(1, 32, size=(8, 7)), jnp.int32),
  }
  clip = 1.0 if norms == "exact" else 1e3  # where nothing is clipped
  total, oracle = (
    call(
      make(optim.Logit(norms=n), clip=clip, encoders=(encoder, encoder)),
      batch,
      params=params,
    )
    for n in (norms, "sequential")
  )
  assert_close(total[0], oracle[0])
  assert np.min(oracle[1].norms) > 1.0


def sizes(jaxpr):
  for equation in jaxpr.eqns:
    for var in equation.outvars:
      yield var.aval.size
    for value in equation.params.values():
      for inner in value if isinstance(value, (tuple, list)) else [value]:
        inner = getattr(inner, "jaxpr", inner)
        if hasattr(inner, "eqns"):
          yield from sizes(inner)


@pytest.mark.parametrize("norms", ["exact", "bound"])
def test_no_array_has_an_axis_for_pairs_and_one_for_parameters(norms):
  size, batch = 16, make_batch(16)
  entries = sum(leaf.size for leaf in PARAMS.values())
  fn = make(optim.Logit(norms=norms), size=size)
  largest = max(sizes(jax.make_jaxpr(fn)(PARAMS, batch).jaxpr))
  assert largest <= 2 * size * entries * DIM < size**2 * entries

  def all_at_once(params):
    return encode(params, batch["queries"]) @ encode(params, batch["documents"]).T

  naive = jax.make_jaxpr(jax.jacrev(all_at_once))(PARAMS)
  assert max(sizes(naive.jaxpr)) >= size**2 * PARAMS["w"].size


# Neighbours. Encoders of one parameter turn a point on a circle: all clipped
# gradients lie on one line, so that they can add up.


def turn(params, x):
  angle = params * x[:, 0]
  return jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)


SIZE = 6
TURN = jnp.float32(1.0)
RELATIONS = ["add", "replace", "zero out query", "replace query"]
NAMES = {
  "add": ("ADD_OR_REMOVE_ONE", "pair"),
  "replace": ("REPLACE_ONE", "pair"),
  "zero out query": ("REPLACE_SPECIAL", "query"),
  "replace query": ("REPLACE_ONE", "query"),
}


def moved(fn, relation, points):
  """How far one record moves the sum: points are [side, query or document]."""
  queries, documents, others = points  # [SIZE] each
  a = {"queries": queries, "documents": documents}
  b = dict(a)
  first = jnp.arange(SIZE) == 0
  padding = jnp.zeros(SIZE, bool)
  a["has_query"] = b["has_query"] = ~padding
  if relation.startswith("replace"):
    b["queries"] = jnp.where(first, others[0], queries)
  if relation == "replace":
    b["documents"] = jnp.where(first, others[1], documents)
  if relation == "zero out query":
    b["has_query"] = ~first
  absent = first if relation == "add" else padding
  sums = []
  for batch, pad in ((a, padding), (b, absent)):
    batch = batch | {n: batch[n][:, None] for n in ("queries", "documents")}
    sums.append(fn(TURN, batch, is_padding_example=pad)[0])
  return jnp.abs(sums[0] - sums[1])


def worst_start(rng, relation):
  """Points near the pattern that attains softmax's bound for adding a pair.

  All rows have their documents opposite; the newcomer's document is where their
  queries are, and its query where their documents are. Many turns make the
  gradients long.
  """
  turns = 2 * np.pi * rng.integers(-200, 200, size=(3, SIZE))
  queries, documents = np.zeros(SIZE), np.full(SIZE, np.pi)
  queries[0], documents[0] = np.pi, 0.0
  others = np.zeros(SIZE)
  others[1] = np.pi
  points = np.stack([queries, documents, others]) + turns
  return points + rng.normal(size=points.shape) * 0.02


def climb(fn, relation, starts, steps=60):
  """Improves each start by random steps that are kept where they help."""
  distance = jax.vmap(functools.partial(moved, fn, relation))

  def step(state, key):
    points, best = state
    where, sign, size = jax.random.split(key, 3)
    shape = points.shape
    near = jax.random.normal(size, shape) * 0.05
    far = 2 * jnp.pi * jax.random.randint(sign, shape, -50, 50)
    chosen = jax.random.uniform(where, shape) < 0.15
    tried = points + chosen * (near + far)
    found = distance(tried)
    better = found > best
    points = jnp.where(better[:, None, None], tried, points)
    return (points, jnp.maximum(found, best)), None

  start = (starts, distance(starts))
  keys = jax.random.split(jax.random.key(0), steps)
  (_, best), _ = jax.lax.scan(step, start, keys)
  return best


def check_neighbours(fn, least):
  """Random and adversarial neighbours; `least` of the bound is reached."""
  for relation in RELATIONS:
    limit = fn.sensitivity(*NAMES[relation])
    rng = np.random.default_rng(1)
    spread = 10.0 ** rng.uniform(-1, 3, size=(200, 1, 1))
    random = rng.normal(size=(200, 3, SIZE)) * spread
    distances = jax.jit(jax.vmap(functools.partial(moved, fn, relation)))
    assert np.max(distances(random.astype(np.float32))) <= limit * (1 + 1e-5)
    starts = np.stack([worst_start(rng, relation) for _ in range(20)])
    climbed = jax.jit(functools.partial(climb, fn, relation))
    worst = np.max(climbed(starts.astype(np.float32)))
    print(relation, worst / limit)
    assert least * limit <= worst <= limit * (1 + 1e-5), relation


@pytest.mark.parametrize(
  "loss",
  [
    losses.Softmax(temperature=1.0),
    losses.Sigmoid(temperature=1.0, max_batch_size=SIZE),
    losses.Spreadout(),
  ],
  ids=["softmax", "sigmoid", "spreadout"],
)
def test_no_neighbour_moves_logit_further_than_its_sensitivity(loss):
  fn = make(optim.Logit(), loss, size=SIZE, encoders=(turn, turn))
  check_neighbours(fn, 0.5)
