"""Compares two ways to sample where the unit is a user with up to K queries.

The noise that epsilon 8 takes if users are drawn, and the mean gradient of each is
clipped, and if queries are drawn, with noise for groups of K; as many queries a step
in the mean. Prints JSON; nothing is trained:
  python tests/benchmarks/user_sampling.py
"""

import sys

import measuring

from synthq_jax.privacy import accounting, calculator

EPSILON = 8.0
MOST = (1, 4, 16)
SIZES = {  # queries, of a step, steps
  "demo": (7_376, 1_024, 60),
  "paper": (532_768, 1_024, 15_600),
}


def main() -> int:
  found = {}
  for name, (queries, batch, steps) in SIZES.items():
    for most in MOST:
      samplers = calculator.of_users(
        num_examples=queries, batch_size=batch, queries_per_user=most
      )
      users, single = (
        accounting.noise_multiplier(
          epsilon=EPSILON,
          delta=most / (2 * queries),
          sampler=sampler,
          steps=steps,
        )
        for sampler in samplers.values()
      )
      found[f"{name}, K={most}"] = {
        "users": round(users, 3),
        "queries": round(single, 3),
        # Where a mean of K gradients may be clipped to less than this share of
        # a single one's norm, or says more at one norm, users are better.
        "break_even": round(single / (most * users), 3),
        "orthogonal": round(most**-0.5, 3),
      }
  return measuring.finish("user_sampling", {"noise_multiplier": found})


if __name__ == "__main__":
  sys.exit(main())
