"""Losses over similarities, written out as sums in NumPy.

Derivatives are complex steps: nothing here knows how the package takes them.
"""

import dataclasses
import math

import numpy as np

STEP = 1e-30


@dataclasses.dataclass(frozen=True)
class Loss:
  """A sum over rows of [pairs, pairs * (1 + hard)] similarities."""

  kind: str
  temperature: float = 1.0
  hard: int = 0
  directions: int = 1
  bias: float = 0.0
  declared: int | None = None
  low: float = -1.0
  high: float = 1.0

  def rows(self, s, active, masked):  # s: complex [..., n, n * (1 + hard)]
    n = s.shape[-2]
    own = np.eye(*s.shape[-2:], dtype=bool)
    negative = ~own & ~masked
    if self.kind == "spreadout":
      divisor = max((self.declared or n) - 1, 1)
      rows = np.sum(np.where(negative, s, 0) ** 2, axis=-1) / divisor
      return np.where(active, rows, 0)
    s = np.where(masked & ~own, self.low, s)
    z = s / self.temperature + self.bias
    positive = np.einsum("...ii->...i", z[..., :n])
    if self.kind == "sigmoid":
      count = max(self.declared * (1 + self.hard) - 1, 1)
      costs = np.sum(np.where(negative, np.log1p(np.exp(z)), 0), axis=-1)
      rows = np.log1p(np.exp(-positive)) + costs / count
      return np.where(active, rows, 0)
    rows = np.log(np.sum(np.exp(z), axis=-1)) - positive
    if self.directions == 2:
      exponents = np.where(active[:, None], np.exp(z[..., :n]), 0)
      sums = np.sum(exponents, axis=-2)
      sums = np.where(active, sums, 1)
      rows = rows + np.log(sums) - positive
    return np.where(active, rows, 0)

  def weights(self, s, active=None, masked=None):
    """Derivatives of the total by each similarity, to rounding."""
    shape = s.shape[-2:]
    active = np.ones(shape[0], bool) if active is None else active
    masked = np.zeros(shape, bool) if masked is None else masked
    steps = STEP * np.eye(math.prod(shape)).reshape(-1, *shape)
    rows = self.rows(s[..., None, :, :] + 1j * steps, active, masked)
    return np.sum(rows, axis=-1).imag.reshape(s.shape) / STEP
