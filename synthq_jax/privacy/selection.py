"""Tuning that is paid for: the best of a random number of private trainings.

Plain composition pays for every training that was looked at. If their number is
drawn at random and kept secret, and nothing but the best is ever seen, the price
is a few times that of one, however many there are.
"""

import dataclasses
import math
from typing import Any

from synthq_jax import checks
from synthq_jax.privacy import accounting

__all__ = ["LAWS", "Trials", "prices"]

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
    in it, as further steps. Where batches are truncated, delta pays for E[K]
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

  def __post_init__(self):
    """Refuses what is no such law."""
    checks.at_least(1, mean=self.mean)
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
