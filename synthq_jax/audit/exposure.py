"""Measures how well a model knows a secret: rank among candidates, exposure.

An audit compares inserted canaries with held-out ones. If pre-training showed
both to the public checkpoint, the model knows both, and the audit finds no leak.
If pre-training showed only the inserted ones, the audit blames fine-tuning. The
ranks under a model that cannot have seen a secret are uniform;
`uniform_ranks_p_value` tests this.

References:
  Carlini et al., "The Secret Sharer", USENIX Security 2019, section 4.2
  (rank and exposure) and 4.4 (exposure by sampling).
"""

import math

import numpy as np
import scipy.fft
from jaxtyping import Float, Int

from synthq_jax import checks, intervals

__all__ = [
  "epsilon_of_mean_rank",
  "exposure",
  "mean_rank",
  "ranks",
  "uniform_ranks_p_value",
]

_PER_BIT = 64.0  # score units in one bit of exposure, at most
_CELLS = 2**21  # largest table of the distribution of the sum
_LEAST = 1e-12  # the Fourier transform computes no smaller probability exactly


def ranks(
  log_likelihoods: Float[np.ndarray, "canary candidate"],
) -> Int[np.ndarray, " canary"]:
  """Returns the rank of column 0, the secret; 1 is the most likely.

  Candidates exactly as likely as the secret count half, rounded up. A model
  without preference therefore gives the middle rank, as chance does.

  >>> ranks(np.array([[-1.0, -2.0, -3.0], [-2.0, -2.0, -1.0]])).tolist()
  [1, 3]

  Args:
    log_likelihoods: log-likelihoods of each canary's candidates, in nats.

  Returns:
    Ranks in [1, candidates].

  Raises:
    ValueError: if the array is no matrix with at least two columns, or a value
      is no number.
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

  Exposure measures how much the model shortens the search for the secret. The
  number of sampled candidates bounds it: it is at most log2(num_candidates),
  however well the model knows the secret.

  >>> exposure(np.array([1, 8]), 8).tolist()
  [3.0, 0.0]

  Args:
    ranks: ranks from `ranks`.
    num_candidates: number of ranked candidates, the secret included.

  Returns:
    Values in [0, log2(num_candidates)].

  Raises:
    ValueError: if a rank lies outside [1, num_candidates].
  """
  values = _check_ranks(ranks, num_candidates)
  return math.log2(num_candidates) - np.log2(values)


def mean_rank(
  ranks: Int[np.ndarray, " canary"], num_candidates: int
) -> intervals.Interval:
  """Returns the mean rank with an interval that also holds for few canaries.

  `intervals.bounded` computes the interval. Chance is (num_candidates + 1) / 2.
  Held-out canaries are independent given the model. Inserted ones share a
  training run, so their interval is only a description.

  >>> f"{mean_rank(np.array([40, 60, 50, 50]), 100):.1f}"
  '50.0 [12.8, 87.9]'

  Args:
    ranks: ranks from `ranks`, at least one; a single rank says little.
    num_candidates: number of ranked candidates, the secret included.

  Returns:
    Mean and ends, within [1, num_candidates].

  Raises:
    ValueError: if there is no rank, or a rank lies outside [1, num_candidates].
  """
  values = _check_ranks(ranks, num_candidates)
  return intervals.bounded(values, 1, num_candidates)


def epsilon_of_mean_rank(
  mean_rank: float, num_candidates: int, repetitions: int = 1
) -> float:
  """Converts a mean rank to an epsilon, as the papers seem to do.

  If k records change together, the expectation of a non-negative quantity grows
  at most by the factor e^(k epsilon) under pure epsilon-DP. The mean rank of an
  unseen secret is (candidates + 1) / 2, so

    epsilon >= log((candidates + 1) / 2 / mean rank) / repetitions.

  The papers print no formula, only "roughly 0.015". Their mean rank of 43 of 100
  at 10 repetitions converts to 0.016, or to 0.015 with 50 for 50.5. The result is
  small whatever the model did: rank 1 of 100 at 10 repetitions gives the maximum,
  0.39. It helps to read a rank; it is no audit (see `lower_bounds`).

  Formal guarantee: if `mean_rank` is an upper confidence limit, the result is a
  lower bound on epsilon for delta = 0, with the same confidence. Otherwise it is
  an estimate of such a bound.

  >>> round(epsilon_of_mean_rank(43.0, 100, 10), 3)
  0.016

  References:
    Stock et al., "Defending against Reconstruction Attacks with Renyi
    Differential Privacy", 2022, for bounds on ranks.

  Args:
    mean_rank: mean rank, in [1, num_candidates].
    num_candidates: number of ranked candidates, the secret included.
    repetitions: copies of each canary in the data.

  Returns:
    Epsilon of one record, at least 0.

  Raises:
    ValueError: if the mean rank or the repetitions are out of range.
  """
  checks.within(f"[1, {num_candidates}]", mean_rank=mean_rank)
  checks.at_least(1, repetitions=repetitions)
  chance = (num_candidates + 1) / 2
  return max(0.0, math.log(chance / mean_rank) / repetitions)


def uniform_ranks_p_value(
  ranks: Int[np.ndarray, " canary"], num_candidates: int
) -> float:
  """Tests whether secrets rank as if the model had never seen them.

  The alternative is that some secrets have ranks nearer to 1 than chance gives.
  The statistic is the sum of exposures. Each is rounded down to a fraction of a
  bit that depends only on the numbers of canaries and candidates. The sum shows
  a few well-known secrets more clearly than the mean rank does. Its distribution
  is computed, not approximated.

  Formal guarantee:
    If ranks are independent and uniform on 1 .. num_candidates, the value is at most
    p with probability at most p, for every p. The ranks of held-out canaries are so
    under any model without ties. A large value shows only that the model did not see
    these canaries OFTEN. With 100 candidates at p = .05, the test has power 0.9 if 2
    in 10 of 30 canaries rank first, or 1 in 10 of 100.

  >>> uniform_ranks_p_value(np.array([50, 93, 20, 71]), 100) > 0.5
  True
  >>> uniform_ranks_p_value(np.array([1, 93, 1, 2]), 100) < 0.01
  True

  Args:
    ranks: ranks from `ranks` of canaries that the model cannot have seen, at
      least one.
    num_candidates: number of ranked candidates, the secret included, at least 2.

  Returns:
    A p-value in [1e-12, 1]; a small one says that the model has seen them.

  Raises:
    ValueError: if there is no rank, or a rank lies outside [1, num_candidates].
  """
  bits = exposure(ranks, num_candidates)
  number = len(bits)
  highest = number * math.log2(num_candidates)
  per_bit = min(_PER_BIT, _CELLS / highest)
  every = exposure(np.arange(1, num_candidates + 1), num_candidates)
  tail = _compute_tail(_compute_scores(every, per_bit), number)
  observed = int(_compute_scores(bits, per_bit).sum())
  return float(np.clip(tail[observed], _LEAST, 1.0))


def _compute_scores(
  bits: Float[np.ndarray, " rank"], per_bit: float
) -> Int[np.ndarray, " rank"]:
  return np.floor(bits * per_bit).astype(np.int64)


def _compute_tail(
  scores: Int[np.ndarray, " rank"], number: int
) -> Float[np.ndarray, " total"]:
  """Returns P[sum of `number` draws from `scores` >= total] for every total."""
  distribution = np.bincount(scores) / len(scores)
  size = number * (len(distribution) - 1) + 1
  padded = scipy.fft.next_fast_len(size, real=True)
  power = scipy.fft.rfft(distribution, padded) ** number
  sums = scipy.fft.irfft(power, padded)[:size]
  return np.cumsum(np.maximum(sums, 0.0)[::-1])[::-1]


def _check_ranks(ranks: np.ndarray, num_candidates: int) -> np.ndarray:
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
