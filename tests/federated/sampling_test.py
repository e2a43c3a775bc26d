"""Which clients take part: how often, and what decides it."""

import numpy as np
import pytest
import scipy.stats

from synthq_jax.federated import sampling
from synthq_jax.privacy import sampling as private_sampling

UNIFORM = sampling.Uniform(num_clients=12, clients_per_round=4)


def rounds(sampler, number, seed=3):
  return [sampler.batch(seed, step).indices for step in range(number)]


def test_a_round_has_different_clients_and_always_as_many():
  for drawn in rounds(UNIFORM, 50):
    assert drawn.dtype == np.int32 and len(set(drawn.tolist())) == 4
    assert drawn.min() >= 0 and drawn.max() < 12
  assert not UNIFORM.batch(3, 0).is_padding.any()


def test_pairs_of_clients_are_equally_likely():
  """Uniform without replacement: C(12, 2) pairs of the first two drawn."""
  pairs = [tuple(sorted(x[:2].tolist())) for x in rounds(UNIFORM, 6600)]
  names, counts = np.unique(pairs, axis=0, return_counts=True)
  assert len(names) == 66
  assert scipy.stats.chisquare(counts).pvalue > 1e-4
  # Rounds that prefer one client a little would be noticed.
  favoured = np.where((names == 0).any(axis=1), 1.3, 1.0)
  expected = counts.sum() * favoured / favoured.sum()
  assert scipy.stats.chisquare(counts, expected).pvalue < 1e-4


def test_seed_and_round_alone_decide():
  again = sampling.Uniform(num_clients=12, clients_per_round=4)
  for step in (7, 0, 3):
    one, other = UNIFORM.batch(3, step), again.batch(3, step)
    np.testing.assert_array_equal(one.indices, other.indices)
  seeds = {tuple(UNIFORM.batch(seed, 0).indices) for seed in range(20)}
  steps = {tuple(x) for x in rounds(UNIFORM, 20)}
  assert len(seeds) > 15 and len(steps) > 15


@pytest.mark.parametrize("clients_per_round", [0, 13])
def test_impossible_rounds_are_refused(clients_per_round):
  with pytest.raises(
    ValueError, match=f"clients_per_round={clients_per_round}"
  ):
    sampling.Uniform(num_clients=12, clients_per_round=clients_per_round)


def test_poisson_rounds_are_those_that_can_be_accounted_for():
  sampler = sampling.poisson(
    num_clients=1000, clients_per_round=50, multiple_of=8
  )
  assert isinstance(sampler, private_sampling.Poisson)
  assert sampler.max_batch_size % 8 == 0
  assert sampler.overflow_delta(1000) < 1e-9
  sizes = [(~sampler.batch(1, step).is_padding).sum() for step in range(200)]
  assert 45 < np.mean(sizes) < 55 and len(set(sizes)) > 10


@pytest.mark.parametrize("multiple_of", [1, 4])
def test_a_round_of_everybody_has_room_for_one_more(multiple_of):
  sampler = sampling.poisson(
    num_clients=8, clients_per_round=8, multiple_of=multiple_of
  )
  assert sampler.max_batch_size == {1: 9, 4: 12}[multiple_of]
  assert sampler.overflow_delta(100) == 0.0
  assert sorted(sampler.batch(0, 0).indices.tolist())[-8:] == list(range(8))
