"""How well a model knows a secret: its rank among candidates, and exposure.

References:
  Carlini et al., "The Secret Sharer", USENIX Security 2019, section 4.2
  (rank and exposure) and 4.4 (exposure by sampling).
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

__all__ = ["MeanRank", "exposure", "mean_rank", "ranks"]


class MeanRank(NamedTuple):
  """A mean rank with its interval; (candidates + 1) / 2 is chance."""

  mean: float
  low: float
  high: float


def ranks(
  log_likelihoods: Float[np.ndarray, "canary candidate"],
) -> Int[np.ndarray, " canary"]:
  """Returns the rank of column 0, the secret; 1 is the most likely.

  Candidates exactly as likely as the secret count half, rounded up: a model
  that likes all alike gives the rank in the middle, which is chance.

  >>> ranks(np.array([[-1.0, -2.0, -3.0], [-2.0, -2.0, -1.0]])).tolist()
  [1, 3]

  Args:
    log_likelihoods: of each canary's candidates, in nats.

  Returns:
    Ranks in [1, candidates].

  Raises:
    ValueError: if the shape is not that of a matrix with at least two columns,
      or a value is no number.
  """
  values = np.asarray(log_likelihoods)
  if values.ndim != 2 or values.shape[1] < 2:
    raise ValueError(
      "expected log-likelihoods [canary, candidate] with at least 2 "
      f"candidates, got shape {values.shape}"
    )
  if np.isnan(values).any():
    raise ValueError(
      f"expected numbers, got nan for {np.isnan(values).any(axis=1).sum()} "
      "canaries: look for a model that diverged"
    )
  secret, others = values[:, :1], values[:, 1:]
  better = np.sum(others > secret, axis=1)
  equal = np.sum(others == secret, axis=1)
  return 1 + better + (equal + 1) // 2


def exposure(
  ranks: Int[np.ndarray, " canary"], num_candidates: int
) -> Float[np.ndarray, " canary"]:
  """Returns log2(candidates / rank) in bits.

  It measures how much the model shortens the search for the secret. Sampled
  candidates bound it: at most log2(num_candidates), however well the secret is
  known.

  >>> exposure(np.array([1, 8]), 8).tolist()
  [3.0, 0.0]

  Args:
    ranks: from `ranks`.
    num_candidates: how many were ranked, the secret included.

  Returns:
    Values in [0, log2(num_candidates)].

  Raises:
    ValueError: if a rank lies outside [1, num_candidates].
  """
  values = _checked(ranks, num_candidates)
  return math.log2(num_candidates) - np.log2(values)


def mean_rank(
  ranks: Int[np.ndarray, " canary"],
  num_candidates: int,
  *,
  level: float = 0.95,
) -> MeanRank:
  """Returns the mean rank with Hoeffding's interval.

  The interval needs no assumption but that ranks are independent draws from
  [1, num_candidates], and holds for any number of canaries: it stays honest
  where all ranks are 1. Held-out canaries are independent given the model;
  inserted ones meet in training, so read theirs as a description.

  >>> mean_rank(np.array([1, 1, 1, 1]), 100).mean
  1.0

  References:
    Hoeffding, "Probability Inequalities for Sums of Bounded Random Variables",
    JASA 1963, theorem 2.

  Args:
    ranks: from `ranks`, at least one.
    num_candidates: how many were ranked, the secret included.
    level: the share of such intervals that hold the true mean, in (0, 1).

  Returns:
    Mean and ends, within [1, num_candidates].

  Raises:
    ValueError: if there is no rank, one lies outside, or the level does.
  """
  values = _checked(ranks, num_candidates)
  if not 0 < level < 1:
    raise ValueError(f"expected level in (0, 1), got level={level}")
  width = num_candidates - 1
  half = width * math.sqrt(math.log(2 / (1 - level)) / (2 * len(values)))
  mean = float(np.mean(values))
  return MeanRank(mean, max(1.0, mean - half), min(num_candidates, mean + half))


def _checked(ranks: np.ndarray, num_candidates: int) -> np.ndarray:
  values = np.asarray(ranks)
  if values.ndim != 1 or not len(values):
    raise ValueError(
      f"expected ranks [canary], at least one, got shape {values.shape}: make "
      "more canaries, so that both sides of the coin come up"
    )
  if values.min() < 1 or values.max() > num_candidates:
    raise ValueError(
      f"expected ranks in [1, num_candidates={num_candidates}], got "
      f"{values.min()} to {values.max()}"
    )
  return values
