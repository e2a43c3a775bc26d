"""Divides queries among documents as noisy counts of their clusters say."""

import numpy as np
from jaxtyping import Float, Int

__all__ = ["apportion", "spread"]


def apportion(
  weights: Float[np.ndarray, " part"], total: int
) -> Int[np.ndarray, " part"]:
  """Divides a total into whole numbers, by largest remainders.

  >>> apportion(np.array([2.0, 1.0, -0.5]), 4)
  array([3, 1, 0])

  Args:
    weights: of the parts; those below 0 count as 0.
    total: what the parts add up to.

  Raises:
    ValueError: if no weight is above 0.
  """
  weights = np.maximum(weights, 0.0)
  if not weights.sum() > 0:
    raise ValueError(
      "expected a topic count above 0, got none: the noise leaves nothing; take"
      " fewer clusters or a larger epsilon"
    )
  exact = weights / weights.sum() * total
  numbers = np.floor(exact).astype(int)
  order = np.argsort(-(exact - numbers), kind="stable")
  numbers[order[: total - numbers.sum()]] += 1
  return numbers


def spread(
  clusters: Int[np.ndarray, " item"],
  counts: Float[np.ndarray, " cluster"],
  total: int,
  *,
  seed: int,
) -> Int[np.ndarray, " item"]:
  """Returns how many of a total each item gets, by its cluster's count.

  Clusters get their shares, and of a cluster all items the same, or one more:
  which these are is drawn with a public seed. So a cluster whose items get less
  than one each is not rounded away.

  Formal guarantee: post-processing of `counts`, if items and seed are public.

  >>> spread(np.array([0, 0, 1]), np.array([5.0, 1.0]), 6, seed=0)
  array([3, 2, 1])

  Args:
    clusters: of the items.
    counts: with noise; below 0 counts as 0, and those of clusters without an
      item are left out.
    total: how many there are.
    seed: public.

  Raises:
    ValueError: if no cluster with an item has a count above 0.
  """
  sizes = np.bincount(clusters, minlength=len(counts))
  shares = apportion(np.where(sizes > 0, counts, 0.0), total)
  numbers = shares[clusters] // sizes[clusters]
  order = np.random.default_rng([seed, 8]).permutation(len(clusters))
  order = order[np.argsort(clusters[order], kind="stable")]
  starts = np.cumsum(sizes) - sizes
  places = np.arange(len(clusters)) - starts[clusters[order]]
  more = places < (shares % np.maximum(sizes, 1))[clusters[order]]
  numbers[order[more]] += 1
  return numbers
