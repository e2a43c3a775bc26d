"""Tuning that is paid for: the best of a random number of private trainings.

Plain composition pays for every training that was looked at. If their number is
drawn at random and kept secret, and nothing but the best is ever seen, the price
is a few times that of one, however many there are.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from synthq_jax import artifacts, checks
from synthq_jax.privacy import accounting

__all__ = ["LAWS", "Trials", "grid_price", "prices"]

LAWS = {"logarithmic": 0.0, "geometric": 1.0, "Poisson": math.inf}
"""Laws of the number of trials, and the shape of the truncated negative binomial
that each of them is; infinity stands for Poisson's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trials:
  """The law of the number K of trainings of which the best alone is kept.

  Formal guarantee:
    Draw K by this law, independently of the data; run K trials independently of
    each other, each with settings drawn from a public list, independently of
    the data; publish the trial with the greatest score, or a public constant
    where K = 0, and nothing of K and of the others. Then a Renyi divergence of
    what is published is bounded by theorem 2 (theorem 6 for Poisson's law) from
    those of one trial, as dp_accounting computes it, for any unit and relation
    that bound one trial's. A trial is all that its score is made of: a score on
    private records of the same part (`releases.Release.part`) has to be counted
    in it, as `score_noise`. Where batches are truncated, delta pays for E[K]
    times the steps of one trial.

  References:
    Papernot and Steinke (2022), arXiv:2110.03620, definition 1, theorems 2, 6.
    Liu and Talwar (2019), arXiv:1811.07971 (the geometric law).

  >>> [round(float(Trials(mean=10, law=law).distribution().cdf(1)), 3)
  ...  for law in LAWS]
  [0.269, 0.1, 0.0]
  """

  mean: float
  """Of K, at least 1; public."""
  law: str = "logarithmic"
  """Of `LAWS`."""
  score_noise: float | None = artifacts.later(None)
  """Noise multiplier of one Gaussian sum over private records that each trial is
  scored by; None: its score costs these records nothing, as one on public data,
  or on records of another part."""

  def __post_init__(self):
    """Refuses what is no such law."""
    checks.at_least(1, mean=self.mean)
    if self.score_noise is not None:
      checks.within("(0, inf)", score_noise=self.score_noise)
    if self.law not in LAWS or not math.isfinite(self.mean):
      raise ValueError(
        f"expected a finite mean and a law of {', '.join(LAWS)}, got"
        f" mean={self.mean}, law={self.law!r}"
      )

  def distribution(self) -> Any:
    """Returns the law of K as a frozen distribution of SciPy, to draw from it.

    Draw with a secret seed: who knows K, or how long the trials took, knows more
    than the guarantee allows for.
    """
    from scipy import optimize, stats  # slow to import

    if self.law == "Poisson":
      return stats.poisson(self.mean)
    if self.law == "geometric" or self.mean == 1:
      return stats.geom(1 / self.mean)

    def excess(log_odds: float) -> float:  # of p / (1 - p)
      return math.exp(log_odds) / math.log1p(math.exp(log_odds)) - self.mean

    log_odds = optimize.brentq(excess, -50, 50)
    return stats.logser(1 / (1 + math.exp(-log_odds)))

  def event(self, trial: Any) -> Any:
    """Returns the event of the best of K trials.

    Args:
      trial: the `dp_accounting.DpEvent` of one.
    """
    from dp_accounting import dp_event

    if self.score_noise is not None:
      score = dp_event.GaussianDpEvent(self.score_noise)
      trial = dp_event.ComposedDpEvent([trial, score])
    return dp_event.RepeatAndSelectDpEvent(trial, self.mean, LAWS[self.law])


def prices(
  run: accounting.Run,
  trials: int,
  *,
  delta: float,
  relation: Any = "ADD_OR_REMOVE_ONE",
) -> dict[str, float]:
  """Returns what the best of several equal trainings costs, by way of paying.

  Formal guarantee: "composition" is the epsilon of `accounting.composed_epsilon`
  for all trainings, however the best is chosen and whatever is shown of the
  others; a law's is that of `Trials` with as many trials on average. Each is a
  price of a plan that was made before: to pay by whichever came out smaller is
  fine, since none of them depends on the data.

  Args:
    run: one training; its own `trials` are replaced.
    trials: how many, at least 1.
    delta: of the whole, in (0, 1).
    relation: a `dp_accounting.NeighboringRelation` or its name.

  Returns:
    Epsilons by "composition" and the names of `LAWS`.
  """
  checks.count("trials", trials, 1)
  known = {"delta": delta, "relation": relation}
  alone = run._replace(trials=None)
  found = {
    "composition": accounting.composed_epsilon([alone] * trials, **known)
  }
  for law in LAWS:
    best = run._replace(trials=Trials(mean=trials, law=law))
    found[law] = accounting.composed_epsilon([best], **known)
  return found


def grid_price(
  runs: Sequence[accounting.Run],
  trials: Trials,
  *,
  delta: float,
  relation: Any = "ADD_OR_REMOVE_ONE",
) -> float:
  """Returns what the best of K trials costs, each drawn from a grid of trainings.

  Formal guarantee: that of `Trials`, where a trial first draws one of `runs` by
  public chances. Its Renyi divergence of each order is at most the largest of
  theirs (divergences are quasi-convex), to which that of the score is added.

  >>> from synthq_jax.privacy import sampling
  >>> sampler = sampling.Poisson.with_margin(
  ...     num_examples=6000, expected_batch_size=256)
  >>> grid = [accounting.Run(sampler, noise, 300) for noise in (1.0, 1.5)]
  >>> one, both = (grid_price(some, Trials(mean=4), delta=1e-4)
  ...              for some in (grid[:1], grid))
  >>> bool(one == both)  # that with the least noise decides
  True

  Args:
    runs: the points of the grid, each one training; equal ones count once.
    trials: of a law other than Poisson's.
    delta: of the winner, in (0, 1).
    relation: a `dp_accounting.NeighboringRelation` or its name.

  References:
    Papernot and Steinke (2022), arXiv:2110.03620, theorem 2.
  """
  if trials.law == "Poisson":
    raise ValueError("expected a logarithmic or geometric law, got Poisson's")
  from dp_accounting import rdp

  orders, owed = accounting.divergences(runs, relation)
  if trials.score_noise is not None:
    owed = owed + orders / (2 * trials.score_noise**2)
  shape = LAWS[trials.law]
  chance = _stopping(trials)
  extra = (1 - 1 / orders) * owed + math.log(1 / chance) / orders
  best = owed + (1 + shape) * extra.min()
  best = best + math.log(trials.mean) / (orders - 1)
  left = delta - trials.mean * max(
    accounting.owed_delta(run._replace(trials=trials), relation) for run in runs
  )
  return (
    float(rdp.compute_epsilon(orders, best, left)[0]) if left > 0 else math.inf
  )


def _stopping(trials: Trials) -> float:
  """Returns gamma of definition 1, by the mean."""
  if trials.law == "geometric" or trials.mean == 1:
    return 1 / trials.mean
  # SciPy's logarithmic series law has p = 1 - gamma.
  [parameter] = trials.distribution().args
  return 1 - parameter
