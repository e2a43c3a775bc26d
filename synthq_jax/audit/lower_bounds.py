"""Lower bounds on epsilon from the scores of canaries.

An attack gives each canary a score, the higher the surer that it was trained
on. What the scores give away about the coins bounds epsilon from below, at a
confidence. All bounds are jax_privacy's, at guesses that are fixed before a
coin is looked at:

* One run: 2 m^(2/3) of m coins are guessed, half of
  them, the highest scores, as inserted and half, the lowest, as held out. Who
  is guessed depends on the scores, never on the coins, so no threshold is
  selected and no correction is due. jax_privacy's default divides by the
  number of corners of the measured ROC curve, which depends on the coins: with
  1,000 canaries and nothing to find it claims an epsilon above 0 in 7% of
  runs at a confidence of 95%.
* Clopper and Pearson: two thresholds, the held-out scores of rank n^(1/3) and
  n^(2/3), at half the significance each. Given a threshold from the held-out
  scores, the inserted ones above it are binomial; and the false positive rate
  at a rank is at most what Clopper and Pearson allow for, as it is at a fixed
  threshold (the number of held-out scores at or above the largest threshold
  with too high a rate would have to be unlikely low).

References:
  Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run",
  NeurIPS 2023, arXiv:2305.08846, theorem 5.2.
  Mahloujifar, Melis and Chaudhuri, "Auditing f-Differential Privacy in One
  Run", 2024, arXiv:2410.22235, algorithm 3.
  Jagielski, Ullman and Oprea, "Auditing Differentially Private Machine
  Learning", NeurIPS 2020, for Clopper and Pearson's intervals.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import dp_accounting
import numpy as np
import scipy.optimize
import scipy.stats
from jax_privacy import auditing
from jaxtyping import Float

from synthq_jax import checks, intervals

__all__ = [
  "Audited",
  "AuditedJointly",
  "audit",
  "audit_several",
  "auroc",
  "ceiling",
  "default_num_guesses",
  "tpr_at_fpr",
]

_FPR = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audited:
  """What one attack found; as private as the canaries' coins."""

  num_inserted: int
  """Canaries trained on."""
  num_held_out: int
  """Canaries left out."""
  num_guesses: int
  """Canaries whose coin was guessed, for the bounds of one run."""
  num_correct: int
  """Guesses that were right; half of them are by chance."""
  delta: float
  """Of the claim that the bounds are compared with."""
  confidence: float
  """Of each bound and each interval by itself."""
  epsilon_one_run: float
  """Lower bound for any mechanism whose canaries had independent coins."""
  epsilon_one_run_fdp: float
  """Lower bound if the mechanism has a Gaussian trade-off curve."""
  epsilon_clopper_pearson: float
  """Lower bound if, besides, the scores are independent of each other."""
  epsilon_gdp_estimate: float
  """NO bound: of the Gaussian mechanism with this AUROC."""
  auroc: intervals.Interval
  """Chance that an inserted canary scores higher; .5 is no leak."""
  tpr_at_1_fpr: intervals.Interval
  """Share of inserted canaries found at 1% false alarms; .01 is no leak."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditedJointly:
  """Several attacks on the same release, and what they show together."""

  attacks: dict[str, Audited]
  """By name, each at the confidence that makes the joint bounds hold."""
  confidence: float
  """Of each joint bound."""
  epsilon_one_run: float
  """The greatest of the attacks' bounds."""
  epsilon_one_run_fdp: float
  """The greatest of the attacks' bounds."""


def audit(
  inserted: Float[np.ndarray, " inserted"],
  held_out: Float[np.ndarray, " held_out"],
  *,
  delta: float,
  confidence: float = 0.95,
  seed: int | Sequence[int],
  num_guesses: int | None = None,
) -> Audited:
  """Bounds epsilon from below by the scores of one attack.

  Formal guarantee: let a fair coin of its own have decided for every canary
  whether it joins, and let the scores be computed from the release without the
  coins. If the release is (epsilon, delta)-DP when one canary is added or
  removed, `epsilon_one_run` exceeds epsilon with probability at most
  1 - confidence, over coins, release and a seed that was drawn for this audit
  alone, which matters where scores are equal. So does `epsilon_one_run_fdp` if the
  trade-off curve between any two such neighbours lies nowhere below that of the
  Gaussian mechanism which is exactly (epsilon, delta)-DP: what it refutes is
  this curve, not (epsilon, delta) alone. One Gaussian step has such a curve,
  and a long run with small batches has it nearly. `epsilon_clopper_pearson`
  holds where the inserted scores are independent draws, and so are the
  held-out ones: one canary a run, or noise added to each canary by itself;
  canaries that share a training run are not. `epsilon_gdp_estimate` exceeds
  epsilon half of the time. No bound says that a claim is right.

  A canary that stands in the data several times audits the claim for groups.

  >>> rng = np.random.default_rng(0)
  >>> found = audit(
  ...     rng.normal(size=500) + 1.5, rng.normal(size=500), delta=1e-5, seed=0)
  >>> found.num_guesses, found.num_correct
  (200, 190)
  >>> round(found.epsilon_one_run_fdp, 1) <= 7.1  # the truth
  True

  Args:
    inserted: scores of the canaries trained on; infinite ones are fine.
    held_out: scores of the others.
    delta: of the claim, in (0, 1). The one-run bound owes about twice the
      number of canaries times delta.
    confidence: of each bound and interval, in (0.5, 1).
    seed: breaks ties among scores; it must not depend on the coins, and be
      another for every audit where many scores are equal.
    num_guesses: how many coins are guessed, or None for `default_num_guesses`.
      Fix it before the scores are seen.

  Returns:
    Bounds, estimate and intervals.

  Raises:
    ValueError: if a side has no score, a score is no number, or an argument is
      out of range.
  """
  scores = _ranked(inserted, held_out)
  num, others = len(inserted), len(held_out)
  _check(delta, confidence)
  guesses = default_num_guesses(len(scores))
  if num_guesses is not None:
    guesses = num_guesses
  if not 1 <= guesses < len(scores):
    raise ValueError(
      f"expected num_guesses in [1, {len(scores) - 1}], got num_guesses="
      f"{guesses} for {len(scores)} canaries: leave at least one unguessed"
    )
  significance = 1 - confidence
  correct = _num_correct(scores, num, guesses, seed)
  one_run, one_run_fdp = _one_run(
    len(scores), guesses, correct, significance, float(delta)
  )
  sides = scores[:num], scores[num:]
  area = auroc(*sides, confidence=confidence)
  return Audited(
    num_inserted=num,
    num_held_out=others,
    num_guesses=guesses,
    num_correct=correct,
    delta=float(delta),
    confidence=float(confidence),
    epsilon_one_run=one_run,
    epsilon_one_run_fdp=one_run_fdp,
    epsilon_clopper_pearson=_clopper_pearson(*sides, significance, delta),
    epsilon_gdp_estimate=_gdp_estimate(area.mean, num, others, delta),
    auroc=area,
    tpr_at_1_fpr=tpr_at_fpr(*sides, fpr=_FPR, confidence=confidence),
  )


def audit_several(
  scores: Mapping[
    str,
    tuple[Float[np.ndarray, " inserted"], Float[np.ndarray, " held_out"]],
  ],
  *,
  delta: float,
  confidence: float = 0.95,
  seed: int | Sequence[int],
) -> AuditedJointly:
  """Bounds epsilon by several attacks at a joint confidence.

  Formal guarantee: each attack is audited at a significance divided by their
  number, so the greatest of their bounds of one kind exceeds epsilon with
  probability at most 1 - confidence, under the conditions of `audit` for that
  kind and however the attacks depend on each other.

  >>> rng = np.random.default_rng(0)
  >>> weak, strong = (rng.normal(size=(2, 99)) + [[m], [0]] for m in (0, 2))
  >>> found = audit_several({"a": weak, "b": strong}, delta=1e-5, seed=0)
  >>> found.epsilon_one_run == found.attacks["b"].epsilon_one_run > 0
  True

  Args:
    scores: for each attack those of inserted and of held-out canaries.
    delta: of the claim, in (0, 1).
    confidence: of each joint bound, in (0.5, 1).
    seed: breaks ties among scores.

  Returns:
    The attacks, each at the stricter confidence, and the joint bounds.

  Raises:
    ValueError: if there is no attack, or as for `audit`.
  """
  if not scores:
    raise ValueError("expected at least one attack, got none")
  _check(delta, confidence)
  each = 1 - (1 - confidence) / len(scores)
  attacks = {
    name: audit(*sides, delta=delta, confidence=each, seed=seed)
    for name, sides in scores.items()
  }
  found = attacks.values()
  return AuditedJointly(
    attacks=attacks,
    confidence=float(confidence),
    epsilon_one_run=max(x.epsilon_one_run for x in found),
    epsilon_one_run_fdp=max(x.epsilon_one_run_fdp for x in found),
  )


def default_num_guesses(num_canaries: int) -> int:
  """Returns how many coins are guessed: 2 m^(2/3) of m, but not all.

  Few guesses are surer, many average out chance; for Gaussian mechanisms of
  epsilon 1 to 16 and 30 to 100,000 canaries this number is near the best.

  >>> [default_num_guesses(m) for m in (2, 30, 100, 1000, 10_000)]
  [1, 19, 43, 200, 928]
  """
  return max(1, min(round(2 * num_canaries ** (2 / 3)), num_canaries - 1))


def ceiling(
  num_canaries: int, *, delta: float, confidence: float = 0.95
) -> float:
  """Returns the one-run bound if every guess were right.

  No audit of so many canaries refutes a claim above it, whatever leaks.

  >>> round(ceiling(512, delta=1e-5), 1), round(ceiling(10_000, delta=1e-9), 1)
  (3.7, 5.7)

  Args:
    num_canaries: inserted and held out.
    delta: of the claim, in (0, 1).
    confidence: of the bound, in (0.5, 1).
  """
  _check(delta, confidence)
  guesses = default_num_guesses(num_canaries)
  significance = 1 - confidence
  return _one_run(num_canaries, guesses, guesses, significance, delta)[0]


def auroc(
  inserted: Float[np.ndarray, " inserted"],
  held_out: Float[np.ndarray, " held_out"],
  *,
  confidence: float = 0.95,
) -> intervals.Interval:
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
  return intervals.Interval(mean=value, low=float(low), high=float(high))


def tpr_at_fpr(
  inserted: Float[np.ndarray, " inserted"],
  held_out: Float[np.ndarray, " held_out"],
  *,
  fpr: float,
  confidence: float = 0.95,
) -> intervals.Interval:
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
  return intervals.Interval(
    mean=value, low=min(value, float(low)), high=max(value, float(high))
  )


def _check(delta: float, confidence: float) -> None:
  checks.within("(0, 1)", delta=delta)
  checks.within("(0.5, 1)", confidence=confidence)


def _ranked(
  inserted: np.ndarray, held_out: np.ndarray
) -> Float[np.ndarray, " canary"]:
  """Returns ranks of all scores, those of inserted canaries first.

  Every bound depends on the order alone; ranks make infinite scores, which
  jax_privacy does not count, finite ones.
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
  return scipy.stats.rankdata(scores, method="dense").astype(np.float64)


def _num_correct(
  scores: np.ndarray, num_inserted: int, guesses: int, seed: int | Sequence[int]
) -> int:
  """Guesses the highest as inserted, the lowest as held out; counts hits."""
  shuffled = np.random.default_rng(seed).permutation(len(scores))
  order = np.lexsort((shuffled, scores))  # ties at random: exactly so many
  is_inserted = order < num_inserted
  low, high = guesses // 2, guesses - guesses // 2
  return int(np.sum(is_inserted[-high:]) + np.sum(~is_inserted[:low]))


@functools.lru_cache(maxsize=4096)
def _one_run(
  num: int, guesses: int, correct: int, significance: float, delta: float
) -> tuple[float, float]:
  """Returns both one-run bounds; they depend on counts alone.

  jax_privacy guesses "inserted" above a threshold. To guess on both sides, it
  is told of guesses in place of canaries: 1 for a guess, 0 for none, "in" for
  a right one.
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


def _clopper_pearson(
  inserted: np.ndarray,
  held_out: np.ndarray,
  significance: float,
  delta: float,
) -> float:
  """Returns the greater bound of two thresholds, ranks among the held-out."""
  num = len(held_out)
  ranks = sorted({math.ceil(num ** (1 / 3)), math.ceil(num ** (2 / 3))})
  thresholds = np.sort(held_out)[::-1][np.array(ranks) - 1]
  auditor = auditing.CanaryScoreAuditor(inserted, held_out)
  return max(
    float(
      auditor.epsilon_clopper_pearson(
        significance / len(ranks),
        delta,
        threshold_strategy=auditing.Explicit(threshold),
      )
    )
    for threshold in thresholds
  )


def _gdp_estimate(auroc: float, num: int, others: int, delta: float) -> float:
  """Returns epsilon of the Gaussian mechanism whose scores have this AUROC.

  jax_privacy's epsilon_from_gdp is of no use for few canaries: it takes the
  absolute value of a negative lower bound, and finds a median epsilon of 8
  where 100 canaries are not even in the data.
  """
  least = 0.5 / (num * others)  # perfect scores are no proof of infinity
  mu = math.sqrt(2) * scipy.stats.norm.ppf(min(max(auroc, least), 1 - least))
  if mu <= 0:
    return 0.0
  with np.errstate(divide="ignore"):  # its logarithms, where mu is tiny
    return float(dp_accounting.get_epsilon_gaussian(1 / mu, delta))
