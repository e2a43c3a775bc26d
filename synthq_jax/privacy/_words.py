"""Writes privacy statements as plain English; `terms` has their own sentences."""

import math
from typing import Any

from synthq_jax.privacy import rounding

__all__ = [
  "claim",
  "release",
  "several",
]

_RELATIONS = {
  "ADD_OR_REMOVE_ONE": "one {unit} is added or removed",
  "REPLACE_ONE": "one {unit} is replaced by any other",
  "REPLACE_SPECIAL": "one {unit} is replaced by an empty record",
}
_SAMPLINGS = {
  "poisson": (
    "each step drew every record independently with probability "
    "{expected_batch_size}/{num_examples} (Poisson sampling; batches over "
    "{max_batch_size} records were cut at random, which is accounted for)"
  ),
  "cyclic_poisson": (
    "each record belongs to one of {cycle_length} groups, drawn at random, and "
    "each step drew every record of the next group independently with "
    "probability {cycle_length} x {expected_batch_size}/{num_examples} (cyclic "
    "Poisson sampling; batches over {max_batch_size} records were cut at "
    "random, which is accounted for)"
  ),
  "balls_in_bins": (
    "each record belongs to one of {cycle_length} bins, drawn at random, and "
    "each step read the next bin (balls in bins; bins over {max_batch_size} "
    "records were cut at random, which is accounted for), and nothing is "
    "claimed from the secrecy of the bins"
  ),
  "fixed_order": (
    "the {num_examples} records were read in shuffled epochs of full "
    "batches of {max_batch_size}, and nothing is claimed from the order"
  ),
}


def claim(statement: Any) -> str:
  """Returns the paragraph with unit, relation, epsilon and delta."""
  if statement.is_public:
    return (
      "Privacy. No private record went into this result: it says nothing "
      f"about any {statement.unit}."
    )
  if statement.epsilon == math.inf:
    return (
      "Privacy. NO differential privacy is claimed (epsilon is infinite): "
      f"this result may reveal any {statement.unit} it was made from."
    )
  change = _RELATIONS[statement.relation].format(unit=statement.unit)
  epsilon = rounding.epsilon(statement.epsilon)
  delta = rounding.delta(statement.delta)
  return (
    f"Privacy. The unit of protection is one {statement.unit}. This result "
    f"is ({epsilon}, {delta})-differentially "
    f"private: when {change}, the probability of any outcome changes by a "
    f"factor of at most e^{epsilon}, apart from a slack of "
    f"{delta} (delta). Relation: {statement.relation}. "
    f"Accountant: {statement.accountant.upper()}, an upper bound."
  )


def release(one: Any) -> str:
  """Returns the paragraph about one entry of the ledger."""
  drawn = _SAMPLINGS[one.sampling].format(
    num_examples=one.num_examples,
    expected_batch_size=one.expected_batch_size,
    max_batch_size=one.max_batch_size,
    cycle_length=one.cycle_length,
  )
  noise = ""
  if one.noise_bands > 1:
    noise = f", correlated over {one.noise_bands} steps (banded matrix)"
  return (
    f"Mechanism ({one.identifier}). {one.mechanism}: {one.steps} steps, clip "
    f"norm {one.l2_clip_norm:g}, noise of standard deviation "
    f"{one.noise_multiplier:.6g} x {one.l2_sensitivity:g} (noise multiplier "
    f"x sensitivity) on each sum{noise}; {drawn}."
  )


def several(statement: Any, epsilon: float, delta: float) -> str:
  """Returns the paragraph about people with more than one record."""
  if delta >= 1:
    bound = "for two records nothing follows from this statement"
  else:
    bound = (
      f"for two records together only ({rounding.epsilon(epsilon)},"
      f" {rounding.delta(delta)}) follows"
    )
  return (
    f"Several records of one person. A person behind several units "
    f"(unit: {statement.unit}) is protected less: {bound}, and for more of "
    "them less still."
  )
