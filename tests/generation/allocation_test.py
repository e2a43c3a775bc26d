"""Queries divided by noisy counts: whole, as many in all, and unbiased."""

import numpy as np
import pytest

from synthq_jax.generation import allocation


def test_shares_are_whole_and_add_up():
  rng = np.random.default_rng(0)
  for total in (0, 1, 7, 1000):
    weights = rng.normal(size=9)
    numbers = allocation.apportion(weights, total)
    exact = np.maximum(weights, 0) / np.maximum(weights, 0).sum() * total
    assert numbers.sum() == total
    assert (np.abs(numbers - exact) < 1).all() and (numbers >= 0).all()


def test_items_of_a_cluster_get_the_same_or_one_more():
  rng = np.random.default_rng(0)
  clusters = rng.integers(0, 5, 200)
  counts = np.array([300.0, 40.0, 0.2, -3.0, 90.0, 1e6])  # of the last no item
  numbers = allocation.spread(clusters, counts, 500, seed=1)
  assert numbers.sum() == 500
  expected = allocation.apportion(np.array([*counts[:5], 0.0]), 500)
  for cluster in range(5):
    own = numbers[clusters == cluster]
    assert own.sum() == expected[cluster]
    assert own.max() - own.min() <= 1
  again = allocation.spread(clusters, counts, 500, seed=1)
  assert (again == numbers).all()
  other = allocation.spread(clusters, counts, 500, seed=2)
  assert (other != numbers).any()


def test_a_cluster_whose_items_get_less_than_one_each_is_not_rounded_away():
  clusters = np.repeat([0, 1], 100)
  numbers = allocation.spread(clusters, np.array([40.0, 60.0]), 100, seed=0)
  assert numbers[:100].sum() == 40 and numbers[100:].sum() == 60


def test_counts_of_nothing_are_refused():
  with pytest.raises(ValueError, match="noise leaves nothing"):
    allocation.spread(np.zeros(3, int), np.array([-1.0]), 9, seed=0)
