"""The noise of the published Logit-DP code."""

import math

from synthq_jax.privacy import sensitivity

__all__ = ["needed", "published"]


def published(*, batch_size: int, temperature: float) -> float:
  """Returns the sensitivity of the published code, over its clip norm.

  It is that of the mean gradient: 1/n + min(2 a / (n + a - 1), 2) for
  a = exp(2 / temperature). The gradient itself is divided by the temperature
  there; the sensitivity is not. A second flaw no factor mends: leaves of equal
  shape get the same noise, so that their difference gets none.

  >>> round(published(batch_size=100, temperature=0.2), 3)
  2.001

  Args:
    batch_size: n, at least 1.
    temperature: above 0.

  References:
    google-research/google-research, logit_dp/logit_dp/gradient_utils.py.
  """
  a = math.exp(2 / temperature)
  return 1 / batch_size + min(2 * a / (batch_size + a - 1), 2.0)


def needed(*, batch_size: int, temperature: float) -> tuple[float, float]:
  """Returns what adding or removing, and replacing, a pair moves the mean by.

  >>> [round(x, 2) for x in needed(batch_size=100, temperature=0.2)]
  [9.96, 10.06]

  Args:
    batch_size: n, at least 1.
    temperature: above 0.

  Returns:
    Both sensitivities in units of the clip norm.
  """
  add, replace = (
    sensitivity.softmax(
      max_batch_size=batch_size,
      temperature=temperature,
      l2_clip_norm=1.0,
      relation=relation,
      unit="pair",
    )
    / batch_size
    for relation in ("ADD_OR_REMOVE_ONE", "REPLACE_ONE")
  )
  return add, replace
