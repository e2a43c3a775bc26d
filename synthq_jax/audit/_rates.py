"""How well scores tell two groups apart, with intervals that hold for few."""

import dataclasses
import math

import numpy as np
import scipy.optimize
import scipy.stats
from jaxtyping import Float

__all__ = ["Interval", "auroc", "share", "tpr_at_fpr"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
  """A measured value and the ends of its confidence interval."""

  value: float
  low: float
  high: float


def auroc(
  inserted: Float[np.ndarray, " inserted"],
  held_out: Float[np.ndarray, " held_out"],
  confidence: float,
) -> Interval:
  """Returns the chance that an inserted score beats a held-out one.

  Ties count half. The interval holds the values whose own standard error
  reaches the measured one, so it does not shrink to a point where all inserted
  scores lie above all others; a bootstrap would.

  Args:
    inserted: scores, finite.
    held_out: scores, finite.
    confidence: in (0, 1).

  Returns:
    Values in [0, 1]; .5 is chance.

  References:
    Newcombe, "Confidence intervals for an effect size measure based on the
    Mann-Whitney statistic, part 2", Statistics in Medicine 2006, method 5.
  """
  num, others = len(inserted), len(held_out)
  ranks = scipy.stats.rankdata(np.concatenate([inserted, held_out]))
  wins = ranks[:num].sum() - num * (num + 1) / 2
  value = float(wins / (num * others))
  z = scipy.stats.norm.isf((1 - confidence) / 2)
  half = (num + others) / 2 - 1

  def excess(x: float) -> float:
    spread = 1 + half * ((1 - x) / (2 - x) + x / (1 + x))
    return abs(x - value) - z * math.sqrt(x * (1 - x) * spread / num / others)

  # The distance from a value of 0 or 1 to itself is no end of the interval.
  inner = min(max(value, 1e-12), 1 - 1e-12)
  low = scipy.optimize.brentq(excess, 0, inner) if value > 0 else 0.0
  high = scipy.optimize.brentq(excess, inner, 1) if value < 1 else 1.0
  return Interval(value=value, low=float(low), high=float(high))


def share(hits: int, total: int, confidence: float) -> Interval:
  """Returns a share with Clopper and Pearson's interval.

  >>> found = share(0, 10, 0.95)
  >>> f"{found.value} [{found.low}, {found.high:.3f}]"
  '0.0 [0.0, 0.308]'

  Args:
    hits: of independent trials.
    total: trials, at least 1.
    confidence: in (0, 1).

  Returns:
    Values in [0, 1]; the interval covers the truth at least so often.

  References:
    Clopper and Pearson, "The use of confidence or fiducial limits illustrated
    in the case of the binomial", Biometrika 1934.
  """
  each = (1 - confidence) / 2
  misses = total - hits
  low = scipy.stats.beta.ppf(each, hits, misses + 1) if hits else 0.0
  high = scipy.stats.beta.isf(each, hits + 1, misses) if misses else 1.0
  return Interval(value=hits / total, low=float(low), high=float(high))


def tpr_at_fpr(
  inserted: Float[np.ndarray, " inserted"],
  held_out: Float[np.ndarray, " held_out"],
  fpr: float,
  confidence: float,
) -> Interval:
  """Returns the share of inserted scores found at a false positive rate.

  The value is measured above the lowest threshold that at most this share of
  the held-out scores passes. The interval is exact for independent scores: the
  false positive rate of the j-th highest held-out score is a Beta variable
  whatever the scores' distribution, which gives one rank that is surely strict
  enough and one that is surely lax enough; at each the true positive rate has
  Clopper and Pearson's bound. Few held-out scores say nothing about a small
  rate: below 436 of them the low end at 1% and 95% is 0.

  Args:
    inserted: scores, finite.
    held_out: scores, finite.
    fpr: the false positive rate, in (0, 1).
    confidence: in (0, 1).

  Returns:
    Values in [0, 1]; `fpr` is chance.
  """
  num, others = len(inserted), len(held_out)
  each = (1 - confidence) / 4  # two ends, and a rank and a share for each
  # P[rate at rank j <= fpr] = P[Binomial(others, fpr) >= j].
  tails = scipy.stats.binom.sf(np.arange(others), others, fpr)
  strict = int(np.sum(tails >= 1 - each))
  lax = 1 + int(np.sum(tails > each))
  down = np.sort(held_out)[::-1]
  above = np.sum(inserted > down[int(others * fpr)])
  low, high = 0.0, 1.0
  if strict:
    found = np.sum(inserted > down[strict - 1])
    low = scipy.stats.beta.ppf(each, found, num - found + 1) if found else 0.0
  if lax <= others:
    found = np.sum(inserted >= down[lax - 1])
    if found < num:
      high = scipy.stats.beta.isf(each, found + 1, num - found)
  value = float(above / num)
  return Interval(
    value=value, low=min(value, float(low)), high=max(value, float(high))
  )
