"""How well a model knows a secret: its rank among candidates, and exposure.

An audit compares canaries that were trained on with those that were held out.
If the public checkpoint has met them before, in its pre-training, both sides are
known, and the comparison says that nothing leaks; if it has met only those that
were inserted, it says that fine-tuning leaks. Ranks under a model that cannot
have seen a secret tell: they are uniform, which `uniform_ranks_p_value` tests.

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

_PER_BIT = 64.0  # scores
_CELLS = 2**21  # at most, of the distribution of the sum
_LEAST = 1e-12  # what a Fourier transform leaves of small probabilities


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
  ranks: Int[np.ndarray, " canary"], num_candidates: int
) -> intervals.Interval:
  """Returns the mean rank with an interval that holds for few; `bounded`.

  (num_candidates + 1) / 2 is chance. Held-out canaries are independent given
  the model; inserted ones meet in training, so read theirs as a description.

  >>> f"{mean_rank(np.array([40, 60, 50, 50]), 100):.1f}"
  '50.0 [12.8, 87.9]'

  Args:
    ranks: from `ranks`, at least one; a single one says little.
    num_candidates: how many were ranked, the secret included.

  Returns:
    Mean and ends, within [1, num_candidates].

  Raises:
    ValueError: if there is no rank, or one lies outside.
  """
  values = _checked(ranks, num_candidates)
  return intervals.bounded(values, 1, num_candidates)


def epsilon_of_mean_rank(
  mean_rank: float, num_candidates: int, repetitions: int = 1
) -> float:
  """Returns the epsilon that a mean rank speaks of, as the papers convert it.

  Where k records change together, no expectation of a non-negative quantity
  grows by more than e^(k epsilon) under pure epsilon-DP. The mean rank of a
  secret that was never seen is (candidates + 1) / 2, so

    epsilon >= log((candidates + 1) / 2 / mean rank) / repetitions.

  The papers' 43 of 100 at 10 repetitions says 0.016 (with 50 for 50.5: .015).
  Such a number is small whatever the model did: rank 1 of 100 at 10 repetitions
  gives 0.39, and no more can be had. It is a way to read a rank, no audit:
  `lower_bounds` has those.

  Formal guarantee: a lower bound on epsilon, for delta = 0 and with the
  confidence of the mean rank, if that is an upper confidence limit; else an
  estimate of one.

  >>> round(epsilon_of_mean_rank(43.0, 100, 10), 3)
  0.016

  References:
    Stock et al., "Defending against Reconstruction Attacks with Renyi
    Differential Privacy", 2022, for bounds on what a rank can be.

  Args:
    mean_rank: in [1, num_candidates].
    num_candidates: how many were ranked, the secret included.
    repetitions: how often each canary stood in the data.

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
  """Tests whether secrets rank as if the model had never met them.

  The alternative is that some of them rank too low. The statistic is the sum of
  exposures, rounded down to a fraction of a bit that depends on the numbers of
  canaries and candidates alone: a few secrets that are known well stand out in
  it, more than in the mean rank. Its distribution is computed, not approximated.

  Formal guarantee:
    If ranks are independent and uniform on 1 .. num_candidates, as those of
    held-out canaries are for whatever model without ties, the value is at most p
    with probability at most p, for every p. A large value shows nothing but that these canaries
    were not met OFTEN: with 100 candidates 30 canaries notice it in 9 of 10 cases at
    p = .05 if 2 in 10 rank first, and 100 canaries if 1 in 10 does.

  >>> uniform_ranks_p_value(np.array([50, 93, 20, 71]), 100) > 0.5
  True
  >>> uniform_ranks_p_value(np.array([1, 93, 1, 2]), 100) < 0.01
  True

  Args:
    ranks: from `ranks`, of canaries that cannot have been seen; at
      least one.
    num_candidates: how many were ranked, the secret included, at least 2.

  Returns:
    A p-value in [1e-12, 1]; a small one says that they were seen.

  Raises:
    ValueError: if there is no rank or one lies outside [1, num_candidates].
  """
  bits = exposure(ranks, num_candidates)
  number = len(bits)
  highest = number * math.log2(num_candidates)
  per_bit = min(_PER_BIT, _CELLS / highest)
  every = exposure(np.arange(1, num_candidates + 1), num_candidates)
  tail = _tail(_scores(every, per_bit), number)
  observed = int(_scores(bits, per_bit).sum())
  return float(np.clip(tail[observed], _LEAST, 1.0))


def _scores(
  bits: Float[np.ndarray, " rank"], per_bit: float
) -> Int[np.ndarray, " rank"]:
  return np.floor(bits * per_bit).astype(np.int64)


def _tail(
  scores: Int[np.ndarray, " rank"], number: int
) -> Float[np.ndarray, " total"]:
  """Returns P[sum of `number` scores >= total], each score as likely."""
  law = np.bincount(scores) / len(scores)
  size = number * (len(law) - 1) + 1
  padded = scipy.fft.next_fast_len(size, real=True)
  power = scipy.fft.rfft(law, padded) ** number
  sums = scipy.fft.irfft(power, padded)[:size]
  return np.cumsum(np.maximum(sums, 0.0)[::-1])[::-1]


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
