"""The noise of the published Logit-DP code against the noise it needed."""

import dataclasses
import math

from synthq_jax.privacy import sensitivity

__all__ = ["Comparison", "compare", "published"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """Sensitivities of a mean over n pairs, in units of the clip norm.

  Attributes:
    batch_size: n.
    temperature: of the softmax.
    published: what the published code takes.
    needed: what adding or removing a pair really moves.
    needed_replace: what replacing one moves; batches of a fixed size mean that.
    naive: what a bound of every pair by itself gives, 2 n / temperature of a
      sum.
  """

  batch_size: int
  temperature: float
  published: float
  needed: float
  needed_replace: float
  naive: float

  @property
  def ratio(self) -> float:
    """Times the published noise that the claimed epsilon needed."""
    return self.needed / self.published

  @property
  def ratio_replace(self) -> float:
    """The same where a pair is replaced."""
    return self.needed_replace / self.published


def published(*, batch_size: int, temperature: float) -> float:
  """Returns the sensitivity of the published code, over its clip norm.

  It is that of the mean gradient: 1/n + min(2 a / (n + a - 1), 2) for
  a = exp(2 / temperature). The gradient itself is divided by the temperature
  there; the sensitivity is not.

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


def compare(*, batch_size: int, temperature: float) -> Comparison:
  """Puts the published sensitivity beside the one that is needed.

  The published noise has a second flaw that no factor mends: leaves of equal
  shape get the same noise, so that their difference gets none.

  >>> round(compare(batch_size=100, temperature=0.2).ratio, 2)
  4.98

  Args:
    batch_size: n, at least 1.
    temperature: above 0.
  """
  needed = [
    sensitivity.softmax(
      max_batch_size=batch_size,
      temperature=temperature,
      l2_clip_norm=1.0,
      relation=relation,
      unit="pair",
    )
    / batch_size
    for relation in ("ADD_OR_REMOVE_ONE", "REPLACE_ONE")
  ]
  return Comparison(
    batch_size=batch_size,
    temperature=temperature,
    published=published(batch_size=batch_size, temperature=temperature),
    needed=needed[0],
    needed_replace=needed[1],
    naive=2 / temperature,
  )
