"""Pays from delta for what doubles lose in composing distributions.

dp_accounting composes privacy loss distributions by Fourier transforms, whose
errors are those of doubles near 1, not near delta. Against sums of positive terms
alone, its delta is too small by up to 0.17 of `RATE` a step: by 2e-13 for 8,192
steps.
"""

from collections.abc import Sequence
from typing import Any

__all__ = ["RATE", "least_delta", "subtract_rounding"]

RATE = 2.0**-52
"""Probability that doubles may lose in each step that is composed."""
_TAIL = 1e-15  # of probability, which dp_accounting moves to infinity, twice
_UNPAID = 1e-6  # share of delta that is not paid for


def least_delta(runs: Sequence[Any]) -> float:
  """Returns the delta below which no noise is calibrated.

  It is twice what doubles cannot tell of the runs' probabilities.

  Args:
    runs: each an `accounting.Run`.
  """
  tails = 2 * _TAIL * len(set(runs))
  return 2 * (tails + RATE * sum(run.steps for run in runs))


def subtract_rounding(runs: Sequence[Any], delta: float) -> float:
  """Returns what of delta is left for an accountant that uses transforms.

  Args:
    runs: each an `accounting.Run`, composed together.
    delta: of the whole, less what else is paid from it.

  Returns:
    At most delta; 0 where nothing can be claimed.
  """
  owed = RATE * sum(run.steps for run in runs)
  if owed <= _UNPAID * delta:
    return delta
  return max(delta - owed, 0.0)
