"""Sensitivities of the published Logit-DP code, and the correct ones."""

import math

from synthq_jax.privacy import sensitivity

__all__ = ["needed", "published"]


def published(*, batch_size: int, temperature: float) -> float:
  """Computes the published code's sensitivity of the mean, in clip norms.

  The code takes 1/n + min(2 a / (n + a - 1), 2) for a = exp(2 / temperature). It
  divides the gradient by the temperature, but not the sensitivity. No factor
  mends its second flaw: leaves of equal shape get the same noise, so their
  difference gets none.

  >>> round(published(batch_size=100, temperature=0.2), 3)
  2.001

  Args:
    batch_size: number of pairs n, at least 1.
    temperature: temperature of the softmax, above 0.

  References:
    google-research/google-research, logit_dp/logit_dp/gradient_utils.py.
  """
  a = math.exp(2 / temperature)
  return 1 / batch_size + min(2 * a / (batch_size + a - 1), 2.0)


def needed(*, batch_size: int, temperature: float) -> tuple[float, float]:
  """Computes the true sensitivities of the mean gradient to one pair.

  >>> [round(x, 2) for x in needed(batch_size=100, temperature=0.2)]
  [9.96, 10.06]

  Args:
    batch_size: number of pairs n, at least 1.
    temperature: temperature of the softmax, above 0.

  Returns:
    Sensitivities in clip norms, for adding or removing a pair and for replacing
    one.
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
