"""A user with several records is one example: what it can move, attained."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax import optim
from synthq_jax.optim import users
from synthq_jax.privacy import accounting, sampling

CLIP, MOST, DIM = 0.7, 4, 6
STRATEGIES = ("vmap", "bookkeeping", "ghost")


def loss_fn(params, batch):
  """A dense layer and its square, so that gradients are no constants."""
  outputs = jnp.tanh(batch["x"] @ params["kernel"])  # [record, 3]
  return jnp.sum(jnp.square(outputs - batch["y"]), axis=1)


def params():
  rng = np.random.default_rng(1)
  return {"kernel": jnp.asarray(rng.normal(size=(DIM, 3)), jnp.float32)}


def records_of(counts, seed=2):
  """Returns records, and a number for the user of each, not in order."""
  rng = np.random.default_rng(seed)
  owners = rng.permutation(np.repeat(np.arange(len(counts)), counts))
  x = rng.normal(size=(len(owners), DIM)).astype(np.float32)
  y = rng.normal(size=(len(owners), 3)).astype(np.float32)
  return {"x": x, "y": y}, owners


@functools.cache
def jitted(strategy, clip):
  return jax.jit(
    optim.clipped_grad(
      users.mean_loss(loss_fn), l2_clip_norm=clip, strategy=strategy
    )
  )


def clipped_sum(records, owners, *, strategy="vmap", most=MOST, clip=CLIP):
  grad_fn = jitted(strategy, clip)
  total, _ = grad_fn(params(), users.grouped(records, owners, most))
  return np.asarray(total["kernel"])


mean_gradient = jax.jit(jax.grad(lambda p, own: jnp.mean(loss_fn(p, own))))


def oracle(records, owners, clip=CLIP):
  """The mean gradient of each user, formed one by one and clipped."""
  total = 0.0
  for user in np.unique(owners):
    own = {k: v[owners == user] for k, v in records.items()}
    gradient = np.asarray(mean_gradient(params(), own)["kernel"])
    total = total + gradient * min(1, clip / np.linalg.norm(gradient))
  return total


@pytest.mark.parametrize(
  ("strategy", "clip"), [*((way, CLIP) for way in STRATEGIES), ("vmap", 1e3)]
)
def test_a_users_mean_gradient_is_clipped_once(strategy, clip):
  records, owners = records_of([1, 4, 2, 3, 1])
  found = clipped_sum(records, owners, strategy=strategy, clip=clip)
  np.testing.assert_allclose(
    found, oracle(records, owners, clip), rtol=2e-5, atol=2e-5
  )


@pytest.mark.parametrize(
  ("strategy", "count"), [*((way, MOST) for way in STRATEGIES), ("vmap", 1)]
)
def test_a_user_with_aligned_records_moves_the_sum_by_the_clip_norm(
  strategy, count
):
  """And not by as many clip norms as it has records."""
  records, owners = records_of([2, 4, 3])
  rng = np.random.default_rng(5)
  one = rng.normal(size=DIM).astype(np.float32)
  aligned = {
    "x": np.tile(one, (count, 1)),
    "y": np.full((count, 3), 1e3, np.float32),
  }
  both = {k: np.concatenate([records[k], aligned[k]]) for k in records}
  with_it = np.concatenate([owners, np.full(count, 9)])
  moved = clipped_sum(both, with_it, strategy=strategy) - clipped_sum(
    records, owners, strategy=strategy
  )
  # Attained, so a smaller sensitivity would be a false claim.
  assert np.linalg.norm(moved) == pytest.approx(CLIP, rel=1e-4)
  grad_fn = optim.clipped_grad(users.mean_loss(loss_fn), l2_clip_norm=CLIP)
  assert grad_fn.sensitivity("ADD_OR_REMOVE_ONE") == CLIP


def test_padding_of_a_user_counts_nothing():
  records, owners = records_of([1, 3])
  narrow = clipped_sum(records, owners, most=3)
  wide = clipped_sum(records, owners, most=11)
  np.testing.assert_allclose(wide, narrow, rtol=1e-5, atol=1e-6)


def test_one_record_that_is_not_finite_takes_its_user_out_and_nobody_else():
  records, owners = records_of([2, 3, 1])
  broken = {k: v.copy() for k, v in records.items()}
  broken["x"][np.flatnonzero(owners == 1)[0]] = np.nan
  left = {k: v[owners != 1] for k, v in records.items()}
  np.testing.assert_allclose(
    clipped_sum(broken, owners),
    clipped_sum(left, owners[owners != 1]),
    rtol=1e-5,
    atol=1e-6,
  )


def test_a_user_has_one_key_and_other_masks_for_each_record():
  def noisy(params, batch, key):
    noise = jax.random.normal(key, batch["x"].shape)
    return jnp.sum(params[None] * noise * batch["x"], axis=1)

  batch = users.grouped({"x": np.ones((4, 2))}, np.array([0, 0, 0, 1]), 3)
  batch["example_id"] = np.array([7, 8])
  grad_fn = optim.clipped_grad(
    users.mean_loss(noisy), l2_clip_norm=1e3, strategy="vmap"
  )
  total, _ = grad_fn(jnp.ones(2), batch, key=jax.random.key(3))
  key = jax.random.fold_in(jax.random.key(3), 7)
  first = jax.random.normal(key, (3, 2)).mean(axis=0)
  key = jax.random.fold_in(jax.random.key(3), 8)
  second = jax.random.normal(key, (3, 2))[0]
  np.testing.assert_allclose(total, first + second, rtol=1e-5)


def test_more_records_than_are_declared_are_refused():
  records, owners = records_of([1, 5])
  with pytest.raises(ValueError, match="at most 4 records of a user, got more"):
    users.grouped(records, owners, MOST)


@pytest.mark.parametrize(
  ("records", "owners", "match"),
  [
    ({"x": np.ones(4)}, [0, 1, 2], r"shape \(3,\) and records\['x'\] of shape"),
    ({"x": np.ones(2), "y": np.ones(3)}, [0, 1], r"records\['y'\]"),
    ({"x": np.ones(3)}, [0.0, np.nan, np.nan], "got records without one"),
    ({"x": np.ones(2)}, np.array(["a", None], object), "records without one"),
    ({"x": np.ones(2)}, np.array(["a", ""]), "records without one"),
    ({"x": np.ones(2)}, [0, -1], "records without one"),
    ({"x": np.ones(2)}, ["ann", " NaN"], "records without one"),
    ({"x": np.ones(2)}, [b"ann", b""], "records without one"),
    ({"x": np.ones(2)}, np.array([b"ann", b"NULL"], object), "without one"),
    ({"x": np.ones(2)}, [b"ann", b"Ann"], "differ in zeros, letter case"),
    ({"x": np.ones(2)}, ["ann", "Ann"], "differ in zeros, letter case"),
    ({"x": np.ones(2)}, ["17", "017 "], "differ in zeros, letter case"),
    (
      {"x": np.ones(2)},
      np.array(["7", 7], object),
      "one type, got numbers, text",
    ),
  ],
)
def test_records_and_owners_that_do_not_fit_are_refused(records, owners, match):
  """Records beyond the owners were lost; people without an id were one user."""
  with pytest.raises(ValueError, match=match) as error:
    users.grouped(records, owners, MOST)
  assert "\n" not in str(error.value)


def test_ids_of_records_are_no_ids_of_users():
  """They ended in "fold_in accepts a scalar"."""
  records = {"x": np.ones((3, 2)), "example_id": np.arange(3)}
  batch = users.grouped(records, np.array([0, 0, 1]), 2)
  grad_fn = optim.clipped_grad(
    users.mean_loss(lambda p, b, key: b["x"] @ p), l2_clip_norm=1.0
  )
  with pytest.raises(ValueError, match="one example_id for each of 2 examples"):
    grad_fn(jnp.ones(2), batch, key=jax.random.key(0))


def test_records_that_were_drawn_one_by_one_are_no_users():
  """A user of 8 records was in 41% of the steps, where 6.4% were claimed."""
  sampler = sampling.Poisson.with_margin(
    num_examples=4000, expected_batch_size=256
  )
  owners = np.arange(4000) // 8
  drawn = sampler.batch(3, 0)
  rows, _ = drawn.to_arrays(padding_index=0)
  batch = sampler.take({"x": np.zeros(4000)}, drawn)
  with pytest.raises(ValueError, match="group the records first, and draw"):
    users.grouped(batch, owners[rows], 8)

  share = np.mean(
    [np.unique(owners[_real(sampler.batch(3, i))]).size for i in range(20)]
  )
  assert share / 500 == pytest.approx(1 - (1 - 0.064) ** 8, abs=0.02)
  noise = 0.9801  # of epsilon 3 for a record in 60 steps

  def compute(sampler):
    return accounting.epsilon(
      noise_multiplier=noise, delta=1 / 8000, sampler=sampler, steps=60
    )

  assert compute(sampler) == pytest.approx(3.0, abs=0.01)
  of_users = sampling.Poisson.with_margin(
    num_examples=500, expected_batch_size=round(500 * 0.4109)
  )
  assert compute(of_users) == pytest.approx(21.14, abs=0.01)


def _real(drawn):
  return drawn.indices[~drawn.is_padding]


def test_records_may_be_lists_and_trees():
  batch = users.grouped(
    {"x": [5, 6, 7], "tokens": {"ids": np.arange(6).reshape(3, 2)}},
    ["b", "a", "b"],
    most=2,
  )
  assert batch["x"].tolist() == [[6, 6], [5, 7]]
  assert batch["tokens"]["ids"][1].tolist() == [[0, 1], [4, 5]]


@pytest.mark.parametrize(
  ("loss", "fields", "match"),
  [
    (lambda p, b: (p * b["x"], b["x"]), {}, "no second value"),
    (lambda p, b: jnp.mean(p * b["x"]), {}, "no mean over the batch"),
    (lambda p, b: p * b["x"], {users.WEIGHTS}, "group the records"),
  ],
)
def test_losses_and_batches_that_are_not_of_users_are_refused(
  loss, fields, match
):
  batch = users.grouped({"x": np.arange(4.0)}, [0, 0, 1, 1], most=2)
  batch = {name: x for name, x in batch.items() if name not in fields}
  fn = optim.clipped_grad(users.mean_loss(loss), l2_clip_norm=1.0)
  with pytest.raises(ValueError, match=match):
    fn(1.0, batch)
