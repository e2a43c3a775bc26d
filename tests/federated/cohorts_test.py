"""Clients of different sizes in one shape; who takes part, is late or away."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from synthq_jax.federated import cohorts, fedavg, local_training
from synthq_jax.privacy import sampling

KEY = jax.random.key(8)


def client(steps, value):
  return {
    "x": np.full((steps, 2, 3), value, np.float32) + np.arange(3),
    "is_padding": np.zeros((steps, 2), bool),
  }


def loss_fn(params, batch, key):
  del key
  return jnp.sum((batch["x"] - params[None]) ** 2, axis=-1)


UPDATE = local_training.local_training(loss_fn, optax.sgd(0.1, momentum=0.9))
MADE = fedavg.fedavg(UPDATE)
APPLY = jax.jit(MADE.apply)


def after_a_round(cohort):
  return APPLY(MADE.init(jnp.zeros(3)), cohort, KEY)[0].params


def test_missing_steps_and_clients_are_padding():
  cohort = cohorts.stack(
    [client(1, 5.0), client(3, 6.0)], [4, 2], weights=[8, 9], size=3, steps=4
  )
  padded = cohort.batches["is_padding"].all(axis=2)
  np.testing.assert_array_equal(padded.sum(axis=1), [3, 1, 4])
  np.testing.assert_array_equal(cohort.batches["x"][1, :3, 0, 0], [6.0] * 3)
  np.testing.assert_array_equal(cohort.ids, [4, 2, -1])
  np.testing.assert_array_equal(cohort.is_dropped, [False, False, True])
  np.testing.assert_array_equal(cohort.weights, [8.0, 9.0, 0.0])
  assert cohort.weights.dtype == np.float32


def test_padding_changes_no_bit_of_a_round():
  clients = [client(1, 5.0), client(3, 6.0)]
  padded = cohorts.stack(clients, [4, 2], size=5, steps=6)
  expected = after_a_round(cohorts.stack(clients, [4, 2]))
  np.testing.assert_array_equal(after_a_round(padded), expected)


def test_a_straggler_counts_with_the_steps_it_did():
  whole = cohorts.stack([client(4, 5.0), client(4, 9.0)], [0, 1])
  late = cohorts.cut(whole, np.array([4, 2]))
  expected = cohorts.stack([client(4, 5.0), client(2, 9.0)], [0, 1])
  np.testing.assert_array_equal(after_a_round(late), after_a_round(expected))
  assert (after_a_round(late) != after_a_round(whole)).all()


def test_a_straggler_of_no_steps_pulls_the_mean_and_a_dropped_one_does_not():
  whole = cohorts.stack([client(4, 5.0), client(4, 9.0)], [0, 1])
  alone = after_a_round(cohorts.stack([client(4, 5.0)], [0]))
  late = after_a_round(cohorts.cut(whole, np.array([4, 0])))
  np.testing.assert_allclose(late, alone / 2, rtol=1e-6)
  left_out = after_a_round(cohorts.drop(whole, np.array([False, True])))
  np.testing.assert_array_equal(left_out, alone)


def test_a_round_without_clients_has_the_shape_of_any_other():
  like = client(3, 5.0)
  empty = cohorts.stack([], [], size=2, steps=4, like=like)
  full = cohorts.stack([like, like], [0, 1], steps=4)
  for one, other in zip(
    jax.tree.leaves(empty), jax.tree.leaves(full), strict=True
  ):
    assert one.shape == other.shape and one.dtype == other.dtype
  assert empty.is_dropped.all() and empty.batches["is_padding"].all()
  start = after_a_round(cohorts.drop(full, np.array([True, True])))
  np.testing.assert_array_equal(after_a_round(empty), start)
  assert len(cohorts.stack([], [], steps=4, like=like).ids) == 1


@pytest.mark.parametrize(
  ("clients", "ids", "options", "words"),
  [
    ([], [], {}, "one or more clients, got 0 batches and 0 ids"),
    ([1], [1, 2], {}, "got 1 batches and 2 ids"),
    ([1, 1], [3, 3], {}, "may take part in a round once"),
    ([1, 1], [3, -1], {}, "one that is below 0"),
    ([1, 1], [3, 4], {"size": 1}, "at most size=1 clients"),
    ([1, 5], [3, 4], {"steps": 4}, "of up to 5 steps"),
  ],
)
def test_cohorts_that_cannot_be_are_refused(clients, ids, options, words):
  with pytest.raises(ValueError, match=words):
    cohorts.stack([client(steps, 1.0) for steps in clients], ids, **options)


def test_poisson_rounds_are_those_that_can_be_accounted_for():
  sampler = cohorts.poisson(
    num_clients=1000, clients_per_round=50, multiple_of=8
  )
  assert isinstance(sampler, sampling.Poisson)
  assert sampler.max_batch_size % 8 == 0
  assert sampler.overflow_delta(1000) < 1e-9
  sizes = [(~sampler.batch(1, step).is_padding).sum() for step in range(200)]
  assert 45 < np.mean(sizes) < 55 and len(set(sizes)) > 10


@pytest.mark.parametrize("multiple_of", [1, 4])
def test_a_round_of_everybody_has_room_for_one_more(multiple_of):
  sampler = cohorts.poisson(
    num_clients=8, clients_per_round=8, multiple_of=multiple_of
  )
  assert sampler.max_batch_size == {1: 9, 4: 12}[multiple_of]
  assert sampler.overflow_delta(100) == 0.0
  assert sorted(sampler.batch(0, 0).indices.tolist())[-8:] == list(range(8))
