"""Lower bounds on epsilon from the scores of canaries.

An attack gives each canary a score; the higher the score, the surer it is that
the canary was trained on. The information of the scores about the coins bounds
epsilon from below, at a confidence. jax_privacy computes the bounds, from guesses
that are fixed before any coin is read: 2 m^(2/3) of m coins are guessed, half of
the guesses (the highest scores) as inserted and half (the lowest) as held out. The
scores select the guesses, the coins never do, so no threshold is selected and no
correction is due. jax_privacy's default divides the significance by the number of
corners of the measured ROC curve, which depends on the coins. With 1,000 canaries
and no leak it claims an epsilon above 0 in 7% of runs at 95% confidence.

References:
  Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run",
  NeurIPS 2023, arXiv:2305.08846, theorem 5.2.
  Mahloujifar, Melis and Chaudhuri, "Auditing f-Differential Privacy in One
  Run", 2024, arXiv:2410.22235, algorithm 3.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Sequence

import numpy as np
import scipy.optimize
import scipy.stats
from jax_privacy import auditing
from jaxtyping import Float

from synthq_jax import checks, intervals

__all__ = [
  "Audited",
  "audit",
  "auroc",
  "ceiling",
  "default_num_guesses",
  "tpr_at_fpr",
]

_FPR = 0.01
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audited:
  """The result of one attack; as private as the canaries' coins."""

  num_inserted: int
  """Canaries trained on."""
  num_held_out: int
  """Canaries held out."""
  num_guesses: int
  """Canaries whose coin was guessed, for the bounds of one run."""
  num_correct: int
  """Correct guesses; chance alone gets half of the guesses right."""
  delta: float
  """Delta of the claim that the bounds are compared with."""
  confidence: float
  """Confidence of each single bound and interval."""
  epsilon_one_run: float
  """Lower bound for any mechanism whose canaries had independent coins."""
  epsilon_one_run_fdp: float
  """Lower bound if the mechanism has a Gaussian trade-off curve."""
  auroc: intervals.Interval
  """Chance that an inserted canary scores higher than a held-out one; .5 is no
  leak."""
  tpr_at_1_fpr: intervals.Interval
  """Share of inserted canaries found at 1% false positives; .01 is no leak."""


def audit(
  inserted: Float[np.ndarray, " inserted"],
  held_out: Float[np.ndarray, " held_out"],
  *,
  delta: float,
  confidence: float = 0.95,
  seed: int | Sequence[int],
) -> Audited:
  """Bounds epsilon from below by the scores of one attack.

  Formal guarantee: suppose that an independent fair coin decided for every
  canary whether it joins, and that the scores are computed from the release
  without the coins. Suppose that the release is (epsilon, delta)-DP when one
  canary is added or removed. Then `epsilon_one_run` exceeds epsilon with
  probability at most 1 - confidence, over coins, release and seed. The seed is
  drawn for this audit alone; this matters where scores are equal.

  The same holds for `epsilon_one_run_fdp` under a further condition. The
  trade-off curve between any two such neighbours must lie nowhere below the
  curve of the Gaussian mechanism that is exactly (epsilon, delta)-DP. The bound
  refutes this curve, not (epsilon, delta) alone. One Gaussian step has such a
  curve, and a long run with small batches has nearly such a curve.

  No bound says that a claim is right.

  A canary with several copies in the data audits the claim for groups.

  >>> rng = np.random.default_rng(0)
  >>> result = audit(
  ...     rng.normal(size=500) + 1.5, rng.normal(size=500), delta=1e-5, seed=0)
  >>> result.num_guesses, result.num_correct
  (200, 190)
  >>> round(result.epsilon_one_run_fdp, 1) <= 7.1  # the truth
  True

  Args:
    inserted: scores of the canaries trained on, higher the surer (minus a loss, not
      a loss, which is logged); infinite ones are allowed.
    held_out: scores of the held-out canaries.
    delta: delta of the claim, in (0, 1). The one-run bound gives up about twice
      the number of canaries times delta of its significance.
    confidence: confidence of each bound and interval, in (0.5, 1). If you audit one
      release by k attacks, the greatest of their bounds holds with 1 - s where each
      has 1 - s / k.
    seed: seed that breaks ties among scores. It must not depend on the coins.
      If many scores are equal, take another seed for every audit.

  Returns:
    Both bounds, and intervals.

  Raises:
    ValueError: if a side has no score, a score is no number, or an argument is
      out of range.
  """
  sides = _get_ranks(inserted, held_out)
  num_inserted, num_held_out = map(len, sides)
  scores = np.concatenate(sides)
  _check_arguments(delta, confidence)
  guesses = default_num_guesses(len(scores))
  significance = 1 - confidence
  correct = _count_correct(scores, num_inserted, guesses, seed)
  one_run, one_run_fdp = _compute_one_run(
    len(scores), guesses, correct, significance, float(delta)
  )
  area = auroc(*sides, confidence=confidence)
  if area.high < 0.5:
    _log.warning(
      "inserted canaries score below held-out ones: if these are losses, the audit"
      " sees no leak; pass scores that are higher the surer, such as minus the loss"
    )
  return Audited(
    num_inserted=num_inserted,
    num_held_out=num_held_out,
    num_guesses=guesses,
    num_correct=correct,
    delta=float(delta),
    confidence=float(confidence),
    epsilon_one_run=one_run,
    epsilon_one_run_fdp=one_run_fdp,
    auroc=area,
    tpr_at_1_fpr=tpr_at_fpr(*sides, fpr=_FPR, confidence=confidence),
  )


def default_num_guesses(num_canaries: int) -> int:
  """Returns the number of guessed coins: 2 m^(2/3) of m, but not all.

  A few guesses are surer, many average out chance. For Gaussian mechanisms of
  epsilon 1 to 16 and 30 to 100,000 canaries this number is nearly the best.

  >>> [default_num_guesses(m) for m in (2, 30, 100, 1000, 10_000)]
  [1, 19, 43, 200, 928]
  """
  return max(1, min(round(2 * num_canaries ** (2 / 3)), num_canaries - 1))


def ceiling(
  num_canaries: int, *, delta: float, confidence: float = 0.95
) -> float:
  """Returns the one-run bound for guesses that are all correct.

  At `default_num_guesses`, `epsilon_one_run` is never greater, however much leaks.

  >>> round(ceiling(512, delta=1e-5), 1), round(ceiling(10_000, delta=1e-9), 1)
  (3.7, 5.7)

  Args:
    num_canaries: number of canaries, inserted and held out.
    delta: delta of the claim, in (0, 1).
    confidence: confidence of the bound, in (0.5, 1).
  """
  checks.at_least(2, num_canaries=num_canaries)
  _check_arguments(delta, confidence)
  guesses = default_num_guesses(num_canaries)
  significance = 1 - confidence
  return _compute_one_run(num_canaries, guesses, guesses, significance, delta)[
    0
  ]


def auroc(
  inserted: Float[np.ndarray, " inserted"],
  held_out: Float[np.ndarray, " held_out"],
  *,
  confidence: float = 0.95,
) -> intervals.Interval:
  """Returns the chance that an inserted score beats a held-out one.

  Ties count half. The interval holds the values within z standard errors of the
  measured one, each value with its own standard error. So the interval does not
  shrink to a point if all inserted scores exceed all held-out ones, as a
  bootstrap interval does.

  Args:
    inserted: scores of inserted canaries.
    held_out: scores of held-out canaries.
    confidence: confidence of the interval, in (0, 1).

  Returns:
    Values in [0, 1]; .5 is chance.

  Raises:
    ValueError: if a side has no score, or a score is no number.

  References:
    Newcombe, "Confidence intervals for an effect size measure based on the
    Mann-Whitney statistic, part 2", Statistics in Medicine 2006, method 5.
  """
  sides = _get_ranks(inserted, held_out)
  num_inserted, num_held_out = map(len, sides)
  ranks = scipy.stats.rankdata(np.concatenate(sides))
  wins = ranks[:num_inserted].sum() - num_inserted * (num_inserted + 1) / 2
  value = float(wins / (num_inserted * num_held_out))
  z = scipy.stats.norm.isf((1 - confidence) / 2)
  half = (num_inserted + num_held_out) / 2 - 1

  def excess(x: float) -> float:
    spread = 1 + half * ((1 - x) / (2 - x) + x / (1 + x))
    return abs(x - value) - z * math.sqrt(
      x * (1 - x) * spread / num_inserted / num_held_out
    )

  # The distance from a value of 0 or 1 to itself is no end of the interval.
  inner = min(max(value, 1e-12), 1 - 1e-12)
  low = scipy.optimize.brentq(excess, 0, inner) if value > 0 else 0.0
  high = scipy.optimize.brentq(excess, inner, 1) if value < 1 else 1.0
  return intervals.Interval(mean=value, low=float(low), high=float(high))


def tpr_at_fpr(
  inserted: Float[np.ndarray, " inserted"],
  held_out: Float[np.ndarray, " held_out"],
  *,
  fpr: float,
  confidence: float = 0.95,
) -> intervals.Interval:
  """Returns the share of inserted scores found at a false positive rate.

  The threshold is the lowest that at most this share of the held-out scores
  passes. The interval is exact for independent scores. The false positive rate
  of the j-th highest held-out score follows a Beta distribution, whatever the
  scores' distribution. This gives one rank that is surely strict enough and one
  that is surely lax enough. Clopper and Pearson bound the true positive rate at
  both. Few held-out scores say nothing about a small rate: with fewer than 436,
  the low end at 1% and 95% confidence is 0.

  Args:
    inserted: scores of inserted canaries.
    held_out: scores of held-out canaries.
    fpr: the false positive rate, in (0, 1).
    confidence: confidence of the interval, in (0, 1).

  Returns:
    Values in [0, 1]; `fpr` is chance.

  Raises:
    ValueError: as `auroc`, or if `fpr` is out of range.
  """
  checks.within("(0, 1)", fpr=fpr)
  inserted, held_out = _get_ranks(inserted, held_out)
  num_inserted, num_held_out = len(inserted), len(held_out)
  each = (1 - confidence) / 4  # two ends, and a rank and a share for each
  # P[rate at rank j <= fpr] = P[Binomial(others, fpr) >= j].
  tails = scipy.stats.binom.sf(np.arange(num_held_out), num_held_out, fpr)
  strict = int(np.sum(tails >= 1 - each))
  lax = 1 + int(np.sum(tails > each))
  down = np.sort(held_out)[::-1]
  allowed = int(num_held_out * fpr + 1e-9)  # 100 * .29 is 28.999999999999996
  above = np.sum(inserted > down[allowed])
  low, high = 0.0, 1.0
  if strict:
    passing = np.sum(inserted > down[strict - 1])
    low = (
      scipy.stats.beta.ppf(each, passing, num_inserted - passing + 1)
      if passing
      else 0.0
    )
  if lax <= num_held_out:
    passing = np.sum(inserted >= down[lax - 1])
    if passing < num_inserted:
      high = scipy.stats.beta.isf(each, passing + 1, num_inserted - passing)
  value = float(above / num_inserted)
  return intervals.Interval(
    mean=value, low=min(value, float(low)), high=max(value, float(high))
  )


def _check_arguments(delta: float, confidence: float) -> None:
  checks.within("(0, 1)", delta=delta)
  checks.within("(0.5, 1)", confidence=confidence)


def _get_ranks(
  inserted: np.ndarray, held_out: np.ndarray
) -> tuple[Float[np.ndarray, " inserted"], Float[np.ndarray, " held_out"]]:
  """Replaces the scores of both sides by their common ranks.

  Every bound depends on the order alone. Ranks are finite; jax_privacy does not
  count infinite scores.
  """
  sides = [np.asarray(side, np.float64) for side in (inserted, held_out)]
  if any(side.ndim != 1 for side in sides):
    raise ValueError(
      "expected scores [inserted] and [held_out], got shapes "
      f"{sides[0].shape} and {sides[1].shape}"
    )
  if not all(len(side) for side in sides):
    raise ValueError(
      f"expected at least one inserted and one held-out score, got "
      f"{len(sides[0])} and {len(sides[1])}: make more canaries, so that both "
      "sides of the coin come up"
    )
  scores = np.concatenate(sides)
  if np.isnan(scores).any():
    raise ValueError(
      f"expected numbers as scores, got nan for {np.isnan(scores).sum()} of "
      f"{len(scores)} canaries: look for a model that diverged"
    )
  ranks = scipy.stats.rankdata(scores, method="dense").astype(np.float64)
  return ranks[: len(sides[0])], ranks[len(sides[0]) :]


def _count_correct(
  scores: np.ndarray, num_inserted: int, guesses: int, seed: int | Sequence[int]
) -> int:
  """Counts correct guesses: the highest scores inserted, the lowest held out."""
  shuffled = np.random.default_rng(seed).permutation(len(scores))
  # Random tie-breaking makes the number of guesses exactly `guesses`.
  order = np.lexsort((shuffled, scores))
  is_inserted = order < num_inserted
  low, high = guesses // 2, guesses - guesses // 2
  return int(np.sum(is_inserted[-high:]) + np.sum(~is_inserted[:low]))


@functools.lru_cache(maxsize=4096)
def _compute_one_run(
  num: int, guesses: int, correct: int, significance: float, delta: float
) -> tuple[float, float]:
  """Returns both one-run bounds, (epsilon, delta) and f-DP, from counts alone.

  jax_privacy guesses "inserted" above a threshold, so guesses on both sides
  stand in for canaries here. A guess has score 1 and an unguessed canary 0; a
  correct guess counts as inserted.
  """
  right, wrong = np.ones(correct), np.ones(guesses - correct)
  none = np.zeros(num - guesses)
  if correct == 0:
    return 0.0, 0.0
  auditor = auditing.CanaryScoreAuditor(right, np.concatenate([wrong, none]))
  strategy = auditing.Explicit(0.5)
  return (
    float(
      auditor.epsilon_one_run(significance, delta, threshold_strategy=strategy)
    ),
    float(
      auditor.epsilon_one_run_fdp(
        significance, delta, threshold_strategy=strategy
      )
    ),
  )
