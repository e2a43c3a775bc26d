"""How large the lower bounds of one run come out, and how often too large.

Gaussian mechanisms of known epsilon are audited with few to many canaries: the
table says what an audit of a given size can show at best. And jax_privacy's
default choice of thresholds is run where there is nothing to find: it should
claim an epsilon above 0 in at most 5% of runs. Prints one JSON document.

  python tests/benchmarks/audit_power.py
"""

import argparse
import json
import sys

import dp_accounting
import numpy as np
import repository
from jax_privacy import auditing

from synthq_jax.audit import lower_bounds

BOUNDS = ("epsilon_one_run", "epsilon_one_run_fdp")


def scores(
  rng: np.random.Generator, num: int, mu: float
) -> tuple[np.ndarray, np.ndarray]:
  """Draws coins until both sides come up, and scores."""
  coins = np.zeros(num, bool)
  while coins.all() or not coins.any():
    coins = rng.integers(0, 2, num) == 1
  values = rng.normal(size=num) + mu * coins
  return values[coins], values[~coins]


def power(
  epsilon: float, num: int, delta: float, repeats: int
) -> dict[str, object]:
  """Audits one Gaussian mechanism again and again."""
  rng = np.random.default_rng([int(1000 * epsilon), num])
  mu = 1 / dp_accounting.get_sigma_gaussian(epsilon, delta)
  audits = [
    lower_bounds.audit(*scores(rng, num, mu), delta=delta, seed=i)
    for i in range(repeats)
  ]
  found = {n: np.array([getattr(x, n) for x in audits]) for n in BOUNDS}
  return {
    "epsilon": epsilon,
    "canaries": num,
    "median": {n: round(float(np.median(v)), 2) for n, v in found.items()},
    "above": {
      n: round(float(np.mean(v > epsilon)), 3) for n, v in found.items()
    },
  }


def vain(num: int, repeats: int) -> dict[str, float]:
  """Counts how often something is found in scores that know nothing."""
  rng = np.random.default_rng(num)
  theirs = ours = 0
  for i in range(repeats):
    sides = scores(rng, num, 0.0)
    auditor = auditing.CanaryScoreAuditor(*sides)
    theirs += auditor.epsilon_one_run(0.05, 1e-12) > 0
    ours += lower_bounds.audit(*sides, delta=1e-12, seed=i).epsilon_one_run > 0
  return {
    "canaries": num,
    "runs": repeats,
    "jax_privacy's default": round(theirs / repeats, 4),
    "audit": round(ours / repeats, 4),
  }


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--epsilon", type=float, nargs="+",
                      default=[1, 2, 4, 8, 16])  # fmt: skip
  parser.add_argument("--canaries", type=int, nargs="+",
                      default=[30, 60, 100, 300, 1000, 10_000])  # fmt: skip
  parser.add_argument("--delta", type=float, default=1e-5)
  parser.add_argument("--repeats", type=int, default=40)
  parser.add_argument("--vain_repeats", type=int, default=2000)
  options = parser.parse_args()
  result = {
    "benchmark": "audit_power",
    "commit": repository.commit(),
    "delta": options.delta,
    "power": [
      power(epsilon, num, options.delta, options.repeats)
      for epsilon in options.epsilon
      for num in options.canaries
    ],
    "nothing to find": [
      vain(num, options.vain_repeats)
      for num in (100, 1000)
      if options.vain_repeats
    ],
  }
  print(json.dumps(result, indent=1))
  return 0


if __name__ == "__main__":
  sys.exit(main())
