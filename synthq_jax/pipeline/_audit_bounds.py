"""Lower bounds on epsilon from a run's canaries, beside what is claimed."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from synthq_jax.audit import canaries as canaries_lib
from synthq_jax.audit import lower_bounds
from synthq_jax.pipeline import results
from synthq_jax.privacy import statement as statement_lib

__all__ = ["Bounds", "bounds", "delta"]

_LEAST = 2
"""Canaries of each side that a bound needs."""


class Bounds(NamedTuple):
  """What an audit shows about epsilon."""

  made: tuple[results.AuditBound, ...]
  """By repetitions and attack."""
  lowest: float | None
  """Of all attacks together, from canaries that stand there once, or None."""
  ceiling: float
  """What it would be if every guess were right."""


def delta(
  statement: statement_lib.PrivacyStatement,
  prepared: results.PreparedData,
  canaries: Sequence[canaries_lib.Canary],
) -> float:
  """Returns the claim's delta, or what it would be: 1 / (2n).

  Args:
    statement: of the audited generator.
    prepared: the private records.
    canaries: those that were inserted count.
  """
  if 0 < statement.delta < 1:
    return statement.delta
  records = prepared.num_queries["train"] + len(canaries_lib.repeated(canaries))
  return 1 / (2 * records)


def bounds(
  statement: statement_lib.PrivacyStatement,
  canaries: Sequence[canaries_lib.Canary],
  scores: Mapping[str, Float[np.ndarray, " canary"]],
  *,
  delta: float,
  confidence: float,
  seed: Sequence[int],
) -> Bounds:
  """Returns each attack's bounds, and the one that the claim has to stand.

  Formal guarantee:
    `lowest` exceeds a true claim with probability at most 1 - confidence: it is
    the largest one-run bound of all attacks, each at a significance divided by
    their number, from canaries that are one record each. Canaries that are k
    records audit the claim for groups of k. As in every claim of the pipeline,
    n, which counts the inserted canaries, is treated as fixed.

  Args:
    statement: of the audited generator.
    canaries: inserted and held out.
    scores: of each attack.
    delta: of the claim.
    confidence: of all attacks together.
    seed: drawn for this audit alone; breaks ties.
  """
  made, lowest, ceiling = [], None, 0.0
  for repetitions in sorted({canary.repetitions for canary in canaries}):
    sides = [
      np.array(
        [c.inserted is side and c.repetitions == repetitions for c in canaries],
        bool,
      )
      for side in (True, False)
    ]
    if min(map(np.sum, sides)) < _LEAST:
      continue
    epsilon, group_delta = statement_lib.group(statement, repetitions)
    if math.isinf(statement.epsilon) or group_delta >= 1:
      epsilon, group_delta = math.inf, delta
    joint = lower_bounds.audit_several(
      {k: tuple(v[side] for side in sides) for k, v in scores.items()},
      delta=group_delta if 0 < group_delta < 1 else delta,
      confidence=confidence,
      seed=seed,
    )
    if repetitions == 1:
      lowest = joint.epsilon_one_run
      ceiling = lower_bounds.ceiling(
        int(sum(map(np.sum, sides))),
        delta=delta,
        confidence=1 - (1 - confidence) / len(scores),
      )
    made += [
      results.AuditBound(
        attack=attack,
        repetitions=repetitions,
        claimed_epsilon=epsilon,
        num_inserted=one.num_inserted,
        num_held_out=one.num_held_out,
        epsilon_one_run=one.epsilon_one_run,
        epsilon_one_run_fdp=one.epsilon_one_run_fdp,
        auroc=dataclasses.astuple(one.auroc),
        tpr_at_1_fpr=dataclasses.astuple(one.tpr_at_1_fpr),
      )
      for attack, one in joint.attacks.items()
    ]
  return Bounds(tuple(made), lowest, ceiling)
