"""Clusters of vectors: those that are there, and the same each time."""

import numpy as np
import pytest

from synthq_jax.retrieval import clusters


def planted(number=6, each=300, dim=16):
  """Groups far apart, in a random order; which group each row is of."""
  rng = np.random.default_rng(0)
  groups = rng.permutation(np.repeat(np.arange(number), each))
  rows = 8 * np.eye(number, dim)[groups] + rng.normal(size=(len(groups), dim))
  return rows.astype(np.float32), groups


def test_groups_that_are_there_are_found_and_again():
  rows, groups = planted()
  found = clusters.assign(rows, 6, seed=0)
  purity = sum(
    np.bincount(groups[found == one]).max() for one in np.unique(found)
  )
  assert purity / len(rows) > 0.8 and found.max() < 6
  again = clusters.assign(rows, 6, seed=0)
  assert (again == found).all()


def test_parts_change_nothing(monkeypatch):
  rows, _ = planted()
  whole = clusters.assign(rows, 5, seed=3)
  monkeypatch.setattr(clusters, "_PART", 101)
  assert (clusters.assign(rows, 5, seed=3) == whole).all()


def test_more_clusters_than_vectors_are_refused():
  with pytest.raises(ValueError, match="at least 9 vectors"):
    clusters.assign(np.zeros((8, 2), np.float32), 9, seed=0)
