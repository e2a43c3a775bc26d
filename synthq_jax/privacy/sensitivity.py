"""Closed-form L2 sensitivities: how far one record moves a clipped gradient."""

import math
import numbers
from typing import Any

from synthq_jax.privacy import _checks

__all__ = ["batch"]


def batch(*, l2_clip_norm: float, relation: Any = "ADD_OR_REMOVE_ONE") -> float:
  """Returns the sensitivity of a whole-batch gradient clipped to one norm.

  This is the naive way to train a loss that couples its examples: take the
  gradient g of the whole batch and scale it down to norm C. Another record
  may change g entirely, but both clipped gradients lie in the ball of radius
  C, so they are at most 2C apart, whatever the relation; g and -g attain it.

  Formal guarantee: for every loss, adding, removing or replacing one record of
  a batch moves the sum of one clipped gradient by at most the returned value.
  It holds for one clipped gradient a step: with several (microbatches), clip
  each, divide by their number, which is public, and let a record touch one.
  Noise is noise_multiplier times this value under every relation. Under
  REPLACE_ONE the accountant doubles once more by itself, which this loss does
  not need: sound, and loose by a factor of two.

  >>> batch(l2_clip_norm=0.1)
  0.2

  Args:
    l2_clip_norm: C, the largest norm of the clipped gradient, positive.
    relation: a `dp_accounting.NeighboringRelation` or its name.

  Returns:
    2C.

  Raises:
    ValueError: if the norm is not positive and finite, or the relation is
      unknown.
  """
  _checks.relation_name(relation)
  is_real = isinstance(l2_clip_norm, numbers.Real)
  if not is_real or not 0 < l2_clip_norm < math.inf:
    raise ValueError(
      "expected a positive finite l2_clip_norm, "
      f"got l2_clip_norm={l2_clip_norm!r}"
    )
  return 2.0 * float(l2_clip_norm)
