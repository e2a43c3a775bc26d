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


def logit_oracle(
  loss, batch, *, params=PARAMS, encoders=(encode, encode), **masks
):
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
  for method in (optim.Logit(), optim.Batch(), optim.Row()):
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


def test_logit_on_a_t5_equals_the_oracle():
  encoder, params = tiny_t5()
  rng = np.random.default_rng(0)
  batch = {
    "queries": jnp.asarray(rng.integers(1, 32, size=(8, 4)), jnp.int32),
    "documents": jnp.asarray(rng.integers(1, 32, size=(8, 7)), jnp.int32),
  }
  (total, _), (oracle, aux) = (
    call(
      make(optim.Logit(norms=norms), clip=1.0, encoders=(encoder, encoder)),
      batch,
      params=params,
    )
    for norms in ("exact", "sequential")
  )
  assert_close(total, oracle)
  assert np.min(aux.norms) > 1.0


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
    return (
      encode(params, batch["queries"]) @ encode(params, batch["documents"]).T
    )

  naive = jax.make_jaxpr(jax.jacrev(all_at_once))(PARAMS)
  assert max(sizes(naive.jaxpr)) >= size**2 * PARAMS["w"].size


# Neighbours. Encoders of one parameter turn a point on a circle: all clipped
# gradients lie on one line, so that they can add up.


def turn(params, x):
  angle = params * x[:, 0]
  return jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)


SIZE = 6
TURN = jnp.float32(1.0)
NAMES = {
  "add": ("ADD_OR_REMOVE_ONE", "pair"),
  "replace": ("REPLACE_ONE", "pair"),
  "zero out a query": ("REPLACE_SPECIAL", "query"),
  "replace a query": ("REPLACE_ONE", "query"),
}
# What another batch has of its first pair: its query and document exchanged,
# the query zeroed out, the pair absent.
CHANGES = {
  "add": (False, False, False, True),
  "replace": (True, True, False, False),
  "zero out a query": (False, False, True, False),
  "replace a query": (True, False, False, False),
}


def moved(fn, change, points):
  """How far one record moves the sum."""
  exchange_query, exchange_document, zero_out, absent = change
  q, d, others = points  # [SIZE] each
  first = jnp.arange(SIZE) == 0
  padding = jnp.zeros(SIZE, bool)
  sums = []
  for queries, documents, has_query, is_padding in (
    (q, d, ~padding, padding),
    (
      jnp.where(first & exchange_query, others[0], q),
      jnp.where(first & exchange_document, others[1], d),
      ~(first & zero_out),
      first & absent,
    ),
  ):
    batch = {
      "queries": queries[:, None],
      "documents": documents[:, None],
      "has_query": has_query,
      "example_id": jnp.arange(SIZE),
      "public_negatives": points[2, 2:, None],
    }
    total, _ = fn(TURN, batch, is_padding_example=is_padding)
    sums.append(total)
  return jnp.abs(sums[0] - sums[1])


def random_starts(rng, count):
  spread = 10.0 ** rng.uniform(-1, 2, size=(count, 1, 1))
  return rng.normal(size=(count, 3, SIZE)) * spread


def worst_starts(rng, count):
  """Points near the pattern that attains softmax's bound for adding a pair.

  All rows have their documents opposite; the newcomer's document is where their
  queries are, and its query where their documents are. Many turns make the
  gradients long.
  """
  turns = 2 * np.pi * rng.integers(-30, 30, size=(count, 3, SIZE))
  queries, documents = np.zeros(SIZE), np.full(SIZE, np.pi)
  queries[0], documents[0] = np.pi, 0.0
  others = np.zeros(SIZE)
  others[1] = np.pi
  points = np.stack([queries, documents, others])[None] + turns
  return points + rng.normal(size=points.shape) * 0.02


def climb(fn, starts, change, steps=60):
  """Improves each start by random steps that are kept where they help."""
  distance = jax.vmap(lambda points: moved(fn, change, points))

  def step(state, key):
    points, best = state
    where, near, far = jax.random.split(key, 3)
    shape = points.shape
    by = jax.random.normal(near, shape) * 0.05
    by += 2 * jnp.pi * jax.random.randint(far, shape, -10, 10)
    tried = points + (jax.random.uniform(where, shape) < 0.15) * by
    found = distance(tried)
    points = jnp.where((found > best)[:, None, None], tried, points)
    return (points, jnp.maximum(found, best)), None

  state = (starts, jnp.full(len(starts), -1.0))
  state, _ = jax.lax.scan(
    step, state, jax.random.split(jax.random.key(0), steps)
  )
  return state[1]


def check_neighbours(fn, relations, least):
  """Random and adversarial neighbours; `least` of the bound is reached."""
  rng = np.random.default_rng(1)
  starts = np.concatenate([random_starts(rng, 200), worst_starts(rng, 20)])
  climbed = jax.jit(functools.partial(climb, fn, starts.astype(np.float32)))
  for relation in relations:
    limit = fn.sensitivity(*NAMES[relation])
    worst = np.max(climbed(CHANGES[relation]))
    assert worst <= limit * (1 + 1e-5), relation
    assert worst >= least * limit, relation


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
  check_neighbours(fn, NAMES, 0.65)


# Rows, groups and batches.


def row_gradients(batch, gradients="all", public=False):
  """Each row's gradient of the whole loss, [row, parameter]."""

  def similarity(params):
    q, d = encode(params, batch["queries"]), encode(params, batch["documents"])
    if gradients == "query":
      d = jax.lax.stop_gradient(d)
    others = d
    if public:
      others = encode(params, batch["public_negatives"])
    if gradients != "all":
      others = jax.lax.stop_gradient(others)
    own, rest = jnp.sum(q * d, axis=1, keepdims=True), q @ others.T
    if not public:
      rest = jnp.where(jnp.eye(len(q), dtype=bool), -jnp.inf, rest)
    return jnp.concatenate([own, rest], axis=1)

  def rows(params):
    logits = similarity(params) / 0.5
    return jax.nn.logsumexp(logits, axis=1) - logits[:, 0]

  leaves = jax.tree.leaves(jax.jit(jax.jacrev(rows))(PARAMS))
  return np.concatenate(
    [np.asarray(x, np.float64).reshape(len(x), -1) for x in leaves], axis=1
  )


@pytest.mark.parametrize("gradients", ["all", "pair", "query"])
@pytest.mark.parametrize("negatives", ["batch", "public"])
def test_rows_are_clipped_whole(gradients, negatives):
  batch = make_batch(6)
  batch["public_negatives"] = make_batch(5, seed=3)["documents"]
  each = row_gradients(batch, gradients, negatives == "public")
  norms = np.linalg.norm(each, axis=1)
  clip = float(np.median(norms))
  fn = make(optim.Row(negatives=negatives, gradients=gradients), clip=clip)
  total, aux = call(fn, batch)
  expected = (np.minimum(1, clip / norms)[:, None] * each).sum(axis=0)
  assert_close(total, expected)
  np.testing.assert_allclose(aux.norms, norms, rtol=1e-5)


@pytest.mark.parametrize("gradients", ["all", "pair", "query"])
@pytest.mark.parametrize("negatives", ["batch", "public"])
def test_no_neighbour_moves_rows_further_than_their_sensitivity(
  gradients, negatives
):
  method = optim.Row(negatives=negatives, gradients=gradients)
  fn = make(
    method, losses.Softmax(temperature=0.05), size=SIZE, encoders=(turn, turn)
  )
  protected = ["zero out a query", "replace a query"]
  if negatives == "public":
    protected += ["add", "replace"]
  check_neighbours(fn, protected, 0.95)


@pytest.mark.parametrize("negatives", ["batch", "public"])
@pytest.mark.parametrize("gradients", ["pair", "query"])
def test_cheap_rows_are_the_same_in_microbatches(gradients, negatives):
  """All at once, they take the forward pass that made the weights."""
  hard = 2 if negatives == "batch" else 0
  batch = make_batch(6, seed=3, hard=hard)
  if negatives == "public":
    batch["public_negatives"] = make_batch(5, seed=4)["documents"]
  batch["queries"] = batch["queries"].at[1].set(jnp.nan)
  padding = np.arange(6) == 4
  method = optim.Row(negatives=negatives, gradients=gradients)
  loss = losses.Softmax(temperature=0.05, hard_negatives=hard)
  whole, aux = call(make(method, loss), batch, padding)
  parts, others = call(make(method, loss, microbatch_size=2), batch, padding)
  assert_close(whole, flat(parts))
  np.testing.assert_allclose(aux.norms, others.norms, rtol=1e-5)
  assert np.sum(np.asarray(aux.norms) > CLIP) >= 2
  assert aux.norms[1] == aux.norms[4] == 0.0


def test_with_negatives_from_the_batch_removing_a_pair_exceeds_the_clip_norm():
  fn = make(
    optim.Row(), losses.Softmax(temperature=0.05), size=SIZE,
    encoders=(turn, turn),
  )  # fmt: skip
  starts = worst_starts(np.random.default_rng(1), 20).astype(np.float32)
  climbed = jax.jit(functools.partial(climb, fn, starts))
  assert np.max(climbed(CHANGES["add"])) > 3 * fn.l2_clip_norm
  with pytest.raises(ValueError, match="unit='pair'"):
    fn.sensitivity("ADD_OR_REMOVE_ONE", "pair")


def test_public_negatives_that_are_the_rows_own_document_do_not_count():
  batch = make_batch(4)
  batch["public_negatives"] = make_batch(3, seed=3)["documents"]
  batch["public_negatives"] = (
    batch["public_negatives"].at[1].set(batch["documents"][2])
  )
  ids = {
    "document_ids": jnp.arange(4),
    "public_negative_ids": jnp.array([7, 2, 8]),
  }
  fn = make(optim.Row(negatives="public"))
  _, with_ids = call(fn, batch | ids)
  _, without = call(fn, batch)
  same = np.isclose(with_ids.losses, without.losses)
  np.testing.assert_array_equal(same, [True, True, False, True])


def test_a_group_depends_on_the_keys_of_its_records_alone():
  ids = np.array([11, 5, 900, 77, 5_000_000, 3, 42, 8, 13, 14], np.uint32)
  places = functools.partial(_group.assign, count=3, size=2)

  def groups(ids, padding):
    rows = zip(*map(np.asarray, places(jnp.asarray(ids), padding)), strict=True)
    return [tuple(ids[row[is_filled]]) for row, is_filled in rows]

  nobody = jnp.zeros(10, bool)
  whole = groups(ids, nobody)
  assert {len(group) for group in whole} <= {1, 2}  # some are left out
  assert max(len(group) for group in whole) == 2
  assert groups(ids[::-1], nobody) == whole
  for absent in range(10):
    without = groups(ids, nobody.at[absent].set(True))
    changed = [a != b for a, b in zip(whole, without, strict=True)]
    assert sum(changed) <= 1


def test_groups_are_batches_of_their_own():
  batch = make_batch(8)
  ids = np.array([11, 5, 900, 77, 5_000_000, 3, 42, 8], np.uint32)
  fn = make(optim.Group(size=4))
  total, aux = call(fn, batch | {"example_id": jnp.asarray(ids)})
  places, filled = _group.assign(jnp.asarray(ids), jnp.zeros(8, bool), 2, 4)
  expected = 0
  for row, is_real in zip(np.asarray(places), np.asarray(filled), strict=True):
    members = {name: x[row[is_real]] for name, x in batch.items()}
    gradient = row_gradients(members).sum(axis=0)
    expected += gradient * min(1, CLIP / np.linalg.norm(gradient))
  assert_close(total, expected)
  assert aux.losses.shape == aux.norms.shape == (2,)


def test_a_batch_is_clipped_as_one():
  batch = make_batch(8)
  padding = np.arange(8) >= 6
  real = {name: x[:6] for name, x in batch.items()}
  batch["queries"] = batch["queries"].at[7].set(jnp.nan)
  gradient = row_gradients(real).sum(axis=0)
  total, aux = call(make(optim.Batch()), batch, padding)
  norm = np.linalg.norm(gradient)
  assert norm > CLIP
  assert_close(total, gradient * CLIP / norm)
  np.testing.assert_allclose(aux.norms, [norm], rtol=1e-5)


@pytest.mark.parametrize(
  "method", [optim.Batch(), optim.Group(size=3)], ids=["batch", "group"]
)
def test_no_neighbour_moves_groups_or_batches_by_more_than_twice_the_norm(
  method,
):
  fn = make(
    method, losses.Softmax(temperature=0.05), size=SIZE, encoders=(turn, turn)
  )
  for relation in NAMES:
    expected = 4 if method != optim.Batch() and "replace" in relation else 2
    assert fn.sensitivity(*NAMES[relation]) == expected * CLIP
  check_neighbours(fn, ["add", "zero out a query"], 0.95)
  keeps = make(optim.Group(size=3, keeps_group=True))
  assert keeps.sensitivity("REPLACE_ONE", "pair") == 2 * CLIP


# What is not finite, and wrong use.


@pytest.mark.parametrize(
  "method",
  [optim.Logit(), optim.Row(), optim.Row(gradients="pair")],
  ids=["logit", "row", "row of pairs"],
)
def test_a_query_that_is_not_finite_loses_its_row_alone(method):
  batch = make_batch(5)
  fn = make(method)
  has_query = jnp.arange(5) != 2
  expected, _ = call(fn, batch | {"has_query": has_query})
  batch["queries"] = batch["queries"].at[2].set(jnp.nan)
  total, aux = call(fn, batch)
  assert_close(total, expected)
  assert aux.losses[2] == 0


def test_a_document_that_is_not_finite_makes_its_pair_padding():
  batch = make_batch(5)
  padding = np.arange(5) == 2
  for method in (optim.Logit(), optim.Row(), optim.Row(gradients="pair")):
    fn = make(method)
    expected, _ = call(fn, batch, padding)
    broken = batch | {"documents": batch["documents"].at[2].set(jnp.inf)}
    broken["documents"] = broken["documents"].at[2, 0].set(jnp.nan)
    assert_close(call(fn, broken)[0], expected)


def test_similarities_outside_their_range_are_refused_or_brought_back():
  def long(params, x):
    return 3.0 * encode(params, x)

  batch = make_batch(5)
  fn = make(optim.Logit(), encoders=(encode, long))
  with pytest.raises(ValueError, match="longer ones from encode_document"):
    fn(PARAMS, batch)
  # Under jit there are no values to look at: vectors are shortened.
  expected, _ = call(make(optim.Logit()), batch)
  assert_close(call(fn, batch)[0], expected, 1e-4)


def test_vectors_shorter_than_one_are_left_alone():
  def short(params, x):
    return 0.5 * encode(params, x)

  batch, encoders = make_batch(7), (encode, short)
  expected = logit_oracle(LOSSES["softmax"], batch, encoders=encoders)
  assert_close(call(make(optim.Logit(), encoders=encoders), batch)[0], expected)


def test_clipped_grad_refuses_a_contrastive_loss():
  with pytest.raises(TypeError, match="loss_fn"):
    optim.clipped_grad(LOSSES["softmax"].losses, l2_clip_norm=1.0)

  def coupled(params, batch):
    q, d = encode(params, batch["queries"]), encode(params, batch["documents"])
    return LOSSES["softmax"].losses(q @ d.T)

  with pytest.raises(ValueError, match="independent losses"):
    optim.check_independence(coupled, PARAMS, make_batch(4))


@pytest.mark.parametrize(
  ("change", "match"),
  [
    ({"queries": jnp.zeros((9, FEATURES)), "documents": jnp.zeros((9, 6))},
     "max_batch_size=8"),
    ({"documents": jnp.zeros((3, FEATURES))}, "5 queries and 3 documents"),
    ({"negatives": jnp.zeros((5, 2, FEATURES))}, "hard_negatives=0"),
    ({"has_query": jnp.ones(4, bool)}, "has_query"),
  ],
)  # fmt: skip
def test_a_batch_that_was_not_declared_is_refused(change, match):
  with pytest.raises(ValueError, match=match):
    make(optim.Logit())(PARAMS, make_batch(5) | change)


def test_wrong_use_is_refused():
  two = LOSSES["two directions"]
  for make_it, match in (
    (lambda: make(optim.Row(), two), "directions=1"),
    (lambda: make(optim.Row(negatives="public"), "sigmoid"), "Softmax"),
    (lambda: make(optim.Logit(), clip=0.0), "l2_clip_norm"),
    (lambda: make(optim.Logit(), size=0), "max_batch_size"),
    (lambda: make(optim.Logit(), losses.softmax), "Softmax"),
    (lambda: make(optim.Group(size=9)), "size=9"),
    (lambda: optim.Group(size=1), "size=1"),
    (lambda: optim.Logit(norms="fast"), "fast"),
    (lambda: optim.Row(negatives="private"), "private"),
    (lambda: optim.Row(gradients="none"), "none"),
    (lambda: make(optim.Group(size=4))(PARAMS, make_batch(5)), "example_id"),
    (lambda: make(optim.Logit()).sensitivity("REPLACE_ONE", "user"), "user"),
    (lambda: make(optim.Logit())(
      PARAMS, make_batch(5), key=jax.random.key(0)), "dropout"),
    (lambda: make(optim.Row(negatives="public"))(PARAMS, make_batch(5)),
     "public_negatives"),
    (lambda: make(optim.Logit(), two)(
      PARAMS, make_batch(5) | {"has_query": jnp.ones(5, bool)}), "directions"),
  ):  # fmt: skip
    with pytest.raises(ValueError, match=match):
      make_it()
  sequential = make(optim.Logit(norms="sequential"), size=128)
  with pytest.raises(ValueError, match="64 pairs"):
    sequential(PARAMS, make_batch(65))
