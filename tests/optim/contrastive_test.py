"""Clipped contrastive gradients against plain ones, pair by pair."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax import optim
from synthq_jax.losses import contrastive as losses
from synthq_jax.optim.bookkeeping import jaxprs
from synthq_jax.optim.contrastive import group

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


def double(params, x):
  return 2.0 * encode(params, x)


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


@functools.cache
def similarities(encoders):
  def similarity(params, queries, columns):
    return encoders[0](params, queries) @ encoders[1](params, columns).T

  return jax.jit(similarity), jax.jit(jax.jacrev(similarity))


def pair_gradients(batch, params=PARAMS, encoders=(encode, encode)):
  """All gradients of similarities as they stand, [query, column, parameter]."""
  columns = batch["documents"]
  if "negatives" in batch:
    hard = batch["negatives"].reshape(-1, FEATURES)
    columns = jnp.concatenate([columns, hard])

  similarity, jacobian = similarities(encoders)
  leaves = jax.tree.leaves(jacobian(params, batch["queries"], columns))
  shape = (len(batch["queries"]), len(columns))
  gradients = [np.asarray(x, np.float64).reshape(*shape, -1) for x in leaves]
  return (
    np.concatenate(gradients, axis=2),
    similarity(params, batch["queries"], columns),
  )


def logit_oracle(
  loss, batch, *, params=PARAMS, encoders=(encode, encode), clip=CLIP, **masks
):
  """Algorithm 1 of Logit-DP with everything in memory."""
  gradients, similarity = pair_gradients(batch, params, encoders)
  weights = np.asarray(loss.weights(similarity, **masks), np.float64)
  norms = np.linalg.norm(gradients, axis=2)
  assert 0.1 < np.mean(norms > clip) < 0.9
  factors = np.minimum(1, clip / norms)
  return np.einsum("ij,ijp->p", weights * factors, gradients)


def assert_close(tree, expected, tolerance=1e-5):
  difference = np.linalg.norm(flat(tree) - flat(expected))
  assert difference <= tolerance * np.linalg.norm(flat(expected))


# Logit: similarities.


@pytest.mark.parametrize(
  ("loss", "options"),
  [
    *((loss, {}) for loss in LOSSES),
    ("softmax", {"memory_bytes": 0}),
  ],
)
def test_logit_clips_weighs_and_sums_gradients_of_similarities(loss, options):
  batch = make_batch(7)
  total, aux = call(make(optim.Logit(**options), loss), batch)
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


def sizes(jaxpr):
  for equation in jaxprs.get_equations(jaxpr):
    yield from (var.aval.size for var in equation.outvars)


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
  if negatives == "public":
    batch["public_negatives"] = make_batch(5, seed=3)["documents"]
  each = row_gradients(batch, gradients, negatives == "public")
  norms = np.linalg.norm(each, axis=1)
  clip = float(np.median(norms))
  fn = make(optim.Row(negatives=negatives, gradients=gradients), clip=clip)
  total, aux = call(fn, batch)
  expected = (np.minimum(1, clip / norms)[:, None] * each).sum(axis=0)
  assert_close(total, expected)
  np.testing.assert_allclose(aux.norms, norms, rtol=1e-5)


@pytest.mark.parametrize(
  ("gradients", "negatives"), [("pair", "batch"), ("query", "public")]
)
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
  others = ids | {"public_negative_ids": jnp.array([7, 9, 8])}
  fn = make(optim.Row(negatives="public"))
  _, with_ids = call(fn, batch | ids)
  _, without = call(fn, batch | others)
  same = np.isclose(with_ids.losses, without.losses)
  np.testing.assert_array_equal(same, [True, True, False, True])


def test_a_group_depends_on_the_keys_of_its_records_alone():
  ids = np.array([11, 5, 900, 77, 5_000_000, 3, 42, 8, 13, 14], np.uint32)
  places = functools.partial(group.assign, count=3, size=2)

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
    assert all(ids[absent] not in group for group in without)


def test_groups_are_batches_of_their_own():
  batch = make_batch(8)
  ids = np.array([11, 5, 900, 77, 5_000_000, 3, 42, 8], np.uint32)
  fn = make(optim.Group(size=4))
  total, aux = call(fn, batch | {"example_id": jnp.asarray(ids)})
  places, filled = group.assign(jnp.asarray(ids), jnp.zeros(8, bool), 2, 4)
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


# What is not finite or not of length 1.


@pytest.mark.parametrize(
  "method",
  [optim.Logit(), optim.Row(), optim.Row(gradients="pair")],
  ids=["logit", "row", "row of pairs"],
)
def test_a_query_that_is_not_finite_loses_its_row_alone(method):
  batch = make_batch(5) | {"has_query": jnp.ones(5, bool)}
  fn = make(method)
  expected, _ = call(fn, batch | {"has_query": jnp.arange(5) != 2})
  batch["queries"] = batch["queries"].at[2].set(jnp.nan)
  total, aux = call(fn, batch)
  assert_close(total, expected)
  assert aux.losses[2] == 0


def test_a_document_that_is_not_finite_makes_its_pair_padding():
  batch = make_batch(5) | {"has_query": jnp.ones(5, bool)}
  padding = np.arange(5) == 2
  for method in (optim.Logit(), optim.Row(), optim.Row(gradients="pair")):
    fn = make(method)
    expected, _ = call(fn, batch, padding)
    broken = batch | {"documents": batch["documents"].at[2].set(jnp.inf)}
    broken["documents"] = broken["documents"].at[2, 0].set(jnp.nan)
    assert_close(call(fn, broken)[0], expected)


def test_longer_ones_are_shortened():
  batch = make_batch(7)
  found, _ = call(make(optim.Logit(), encoders=(encode, double)), batch)
  expected, _ = call(make(optim.Logit()), batch)
  assert_close(found, expected)


def encode_tree(params, x):
  """Encodes {"ids", "mask"} as `encode` does an array of both."""
  return encode(params, jnp.concatenate([x["ids"], x["mask"]], axis=1))


@pytest.mark.parametrize(
  ("method", "hard", "microbatch"),
  [
    (optim.Logit(), 1, None),
    (optim.Row(negatives="public", gradients="pair"), 0, 3),
    (optim.Group(size=3), 1, None),
  ],
)
def test_queries_and_documents_may_be_trees_of_arrays(method, hard, microbatch):
  """Tokens and their mask, as most tokenizers return them."""
  loss = losses.Softmax(temperature=0.5, hard_negatives=hard)
  batch = make_batch(6, hard=hard) | {"example_id": np.arange(6)}
  if getattr(method, "negatives", "batch") == "public":
    batch["public_negatives"] = make_batch(5, seed=3)["documents"]
  trees = batch | {
    name: {"ids": x[..., :4], "mask": x[..., 4:]}
    for name, x in batch.items()
    if name != "example_id"
  }
  padding = np.arange(6) == 4
  options = {"clip": 0.5, "microbatch_size": microbatch}
  expected, aux = call(make(method, loss, **options), batch, padding)
  fn = make(method, loss, encoders=(encode_tree, encode_tree), **options)
  total, tree_aux = call(fn, trees, padding)
  assert_close(total, expected, 1e-5)
  assert np.linalg.norm(flat(expected)) > 0.1
  np.testing.assert_allclose(tree_aux.norms, aux.norms, rtol=1e-4, atol=1e-6)


def test_hard_negatives_with_hashed_ids_all_count():
  """Half of all 64-bit hashes are negative once JAX has cut them to 32 bits."""
  hashes = np.array([[2**31 + 5], [2**63 - 7], [-3], [9]])
  batch = make_batch(4, hard=1) | {"document_ids": np.arange(4)}
  fn = make(optim.Batch(), losses.Softmax(temperature=0.5, hard_negatives=1))
  all_count, _ = fn(PARAMS, batch | {"negative_ids": 100 + hashes * 0})
  hashed, _ = fn(PARAMS, batch | {"negative_ids": hashes})
  np.testing.assert_array_equal(flat(hashed), flat(all_count))
  missing, _ = fn(PARAMS, batch | {"negative_ids": np.full((4, 1), -1)})
  assert not np.allclose(flat(missing), flat(all_count))
  # In the type of these ids 65,535 would be -1, and 65,537 the id of row 1.
  small = batch | {"document_ids": np.arange(4, dtype=np.uint16)}
  large = np.array([[65537], [300], [65535], [255]], np.int32)
  mixed, _ = fn(PARAMS, small | {"negative_ids": large})
  np.testing.assert_array_equal(flat(mixed), flat(all_count))
