"""Whether canaries that nobody trained on are as unknown as they should be.

An audit compares canaries that were trained on with those that were held out.
If the public checkpoint has met them before, in its pre-training, both sides are
known, and the comparison says that nothing leaks; if it has met only those that
were inserted, it says that fine-tuning leaks. Ranks under a model that cannot
have seen a secret tell: they are uniform.
"""

import math

import numpy as np
import scipy.fft
from jaxtyping import Float, Int

from synthq_jax.audit import exposure

__all__ = ["uniform_ranks_p_value"]

_PER_BIT = 64.0  # scores
_CELLS = 2**21  # at most, of the distribution of the sum
_LEAST = 1e-12  # what a Fourier transform leaves of small probabilities


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

  References:
    Carlini et al., "The Secret Sharer", USENIX Security 2019, section 4.2:
    exposure.

  Args:
    ranks: from `exposure.ranks`, of canaries that cannot have been seen; at
      least one.
    num_candidates: how many were ranked, the secret included, at least 2.

  Returns:
    A p-value in [1e-12, 1]; a small one says that they were seen.

  Raises:
    ValueError: if there is no rank or one lies outside [1, num_candidates].
  """
  bits = exposure.exposure(ranks, num_candidates)
  number = len(bits)
  highest = number * math.log2(num_candidates)
  per_bit = min(_PER_BIT, _CELLS / highest)
  every = exposure.exposure(np.arange(1, num_candidates + 1), num_candidates)
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
