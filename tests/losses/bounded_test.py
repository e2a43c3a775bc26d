"""Contrastive losses of one's own: declared bounds are tried, or refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from synthq_jax import optim
from synthq_jax.losses import contrastive

N = 5


def hinge(similarity, is_padding_example, is_duplicate):
  """All violations of a margin, over the declared number of negatives."""
  none = is_padding_example[None, :] | is_duplicate
  none |= jnp.eye(*similarity.shape, dtype=bool)
  gap = similarity - jnp.diagonal(similarity)[:, None] + 0.2
  return jnp.where(none, 0.0, jnp.maximum(gap, 0.0)).sum(axis=1) / (N - 1)


def bounded(losses_fn=hinge, **fields):
  declared = dict(
    max_batch_size=N, pair_weights=3.0, others_change=1.0, query_weights=2.0
  )
  return contrastive.Bounded(losses_fn=losses_fn, **{**declared, **fields})


def test_bounds_that_hold_are_taken_and_no_smaller_ones():
  bounded().check()
  for name in ("pair_weights", "others_change", "query_weights"):
    low = 0.98 * getattr(bounded(), name)
    with pytest.raises(ValueError, match=f"expected {name} <= {low}"):
      bounded(**{name: low}).check()


def encode(params, x):
  x = x @ params
  return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def gradient(loss, method=None):
  return optim.contrastive_clipped_grad(
    encode,
    encode,
    loss=loss,
    l2_clip_norm=0.3,
    method=method or optim.Logit(),
    max_batch_size=N,
  )


def test_neighbours_move_the_sum_by_no_more_than_the_bounds_say():
  """Formal guarantee: B (pair_weights + others_change), twice if replaced."""
  fn = gradient(bounded())
  random = np.random.default_rng(1)
  params = jnp.asarray(random.normal(size=(4, 3)), jnp.float32)
  call = jax.jit(
    lambda batch, pad: fn(params, batch, is_padding_example=pad)[0]
  )
  limits = [fn.sensitivity(r, "pair") for r in ("ADD_OR_REMOVE_ONE",
                                                "REPLACE_ONE")]  # fmt: skip
  assert limits == pytest.approx([1.2, 2.4])
  largest = np.zeros(2)
  for _ in range(60):
    q, d = random.normal(size=(2, N, 4)) ** 3
    d[1:] = -q[1:] + 0.1 * d[1:]  # far from their queries, so all count
    d[0], q[0] = q[1:].sum(0), d[1:].sum(0)
    other = {"queries": q.copy(), "documents": d.copy()}
    other["queries"][0], other["documents"][0] = random.normal(size=(2, 4))
    some = call({"queries": q, "documents": d}, np.zeros(N, bool))
    gone = call({"queries": q, "documents": d}, np.arange(N) == 0)
    next_ = call(other, np.zeros(N, bool))
    largest = np.maximum(
      largest, [optax.tree.norm(some - gone), optax.tree.norm(some - next_)]
    )
  assert (largest <= np.array(limits) * (1 + 1e-5)).all()
  assert largest[0] > 0.25 * limits[0]  # .35 measured


def test_a_loss_that_no_bounds_fit_is_refused_before_it_is_clipped():
  def of_place(similarity, is_padding_example, is_duplicate):
    return jnp.diagonal(similarity) * jnp.arange(len(similarity)) / N

  def sees_padding(similarity, is_padding_example, is_duplicate):
    return similarity.sum(axis=1) / N

  def realised(similarity, is_padding_example, is_duplicate):
    real = jnp.sum(~is_padding_example)
    return hinge(similarity, is_padding_example, is_duplicate) * (N - 1) / real

  def infinite(similarity, is_padding_example, is_duplicate):
    return jnp.sqrt(jnp.diagonal(similarity) + 1)

  for losses_fn, what in (
    (of_place, "rows' order"),
    (sees_padding, "weights of padding"),
    (realised, "others_change"),
    (infinite, "pair_weights"),
  ):
    with pytest.raises(ValueError, match=what):
      gradient(bounded(losses_fn))


def test_hard_negatives_count_with_their_pair():
  def with_hard(similarity, is_padding_example, is_duplicate):
    n = len(similarity)
    own = similarity[:, n:].reshape(n, n, -1)  # [row, pair, hard]
    gap = own - jnp.diagonal(similarity)[:, None, None]
    none = is_padding_example[None, :, None] | is_duplicate[:, n:].reshape(
      gap.shape
    )
    return jnp.where(none, 0.0, gap).sum(axis=(1, 2)) / (2 * N)

  # Row: N 2 / (2 N) and as much on its own; columns: (N - 1) 2 / (2 N).
  good = dict(
    hard_negatives=2, pair_weights=2.8, others_change=0.8, query_weights=2.0
  )
  bounded(with_hard, **good).check()
  for name in ("pair_weights", "others_change", "query_weights"):
    with pytest.raises(ValueError, match=name):
      bounded(with_hard, **{**good, name: 0.98 * good[name]}).check()


def test_units_and_batches_beyond_the_declared_are_refused():
  fn = gradient(bounded(query_weights=None))
  with pytest.raises(ValueError, match="query_weights"):
    fn.sensitivity("ADD_OR_REMOVE_ONE", "query")
  assert gradient(bounded()).sensitivity("REPLACE_ONE", "query") == 1.2
  with pytest.raises(ValueError, match="at most declared_batch_size"):
    bounded().sensitivity(
      max_batch_size=N + 1,
      l2_clip_norm=1.0,
      relation="ADD_OR_REMOVE_ONE",
      unit="pair",
    )
  for wrong in ({"pair_weights": -1.0}, {"others_change": np.nan}):
    with pytest.raises(ValueError, match="bound of"):
      bounded(**wrong)


def test_rows_of_a_loss_that_nobody_knows_are_refused():
  """A row's clip bounds nothing where other rows look at its query."""
  with pytest.raises(ValueError, match="give rows of public negatives"):
    gradient(bounded(), optim.Row())
  gradient(bounded(), optim.Batch())
