"""Explains in one line why an epsilon is infinite.

Formal guarantee: none of its own; it reads the costs that `accounting` subtracts
from delta.
"""

import math
from collections.abc import Sequence
from typing import Any

from synthq_jax import checks
from synthq_jax.privacy import accounting, arithmetic, rounding

__all__ = ["explain_infinite"]


def explain_infinite(
  runs: Sequence[accounting.Run],
  *,
  delta: float,
  relation: Any = "ADD_OR_REMOVE_ONE",
) -> str:
  """Names the cost that uses up delta, or the lack of noise.

  >>> from synthq_jax.privacy import sampling
  >>> run = accounting.Run(sampling.FixedOrder(num_examples=60, batch_size=6), 0, 9)
  >>> explain_infinite([run], delta=1e-3, relation="REPLACE_SPECIAL")
  'there is no noise'

  Args:
    runs: noisy sums whose epsilon is infinite.
    delta: delta of all runs together.
    relation: a `dp_accounting.NeighboringRelation` or its name.

  Returns:
    A clause, or "" if none of these is the reason.
  """
  if any(run.noise_multiplier == 0 for run in runs):
    return "there is no noise"
  name, paid = checks.relation(relation), rounding.delta(delta)
  overflow = sum(run.sampler.overflow_delta(run.steps) for run in runs)
  ends = sum(accounting.extra_delta(run, name) for run in runs) - overflow
  if ends >= delta:
    return (
      "a record moves a sum past the end of drawn noise, 9.1 standard deviations,"
      f" with probability up to {ends:.2g}, which delta={paid} does not pay:"
      " give more noise or a larger delta"
    )
  least = arithmetic.least_delta(runs)
  if delta < least:
    return (
      f"in double precision {sum(run.steps for run in runs):,} steps lose up to"
      f" {least:.2g} of probability, which delta={paid} does not pay:"
      " give a larger delta"
    )
  if overflow >= delta:
    return (
      f"a batch overflows with a record in it with probability up to"
      f" {overflow:.2g}, which delta={paid} does not pay: give a larger"
      " max_batch_size or delta"
    )
  if ends + overflow + least < delta or not math.isfinite(ends + overflow):
    return ""
  return (
    "the ends of drawn noise, full batches and double precision together take all"
    f" of delta={paid}: give more noise or a larger delta"
  )
