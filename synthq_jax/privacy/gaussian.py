"""Adds Gaussian noise to a sum that is released once, in double precision."""

import hashlib
import math

import jax
import numpy as np
from jaxtyping import Float
from scipy import stats

__all__ = ["normal_numbers", "noisy"]

_GRID = 1024
_STREAM = np.frombuffer(hashlib.sha256(b"synthq_jax sum").digest(), "<u4")[0]
"""Folded into a key first: random bits of a key are the words of its children, so
a sum of which all but the noise is known would tell of a caller's own child."""


def noisy(
  total: Float[np.ndarray, " number"], std: float, key: jax.Array
) -> Float[np.ndarray, " number"]:
  """Returns a sum with noise, rounded to a thousandth of the noise.

  Formal guarantee: the Gaussian mechanism with this standard deviation, and a
  function of its outcome: the low bits that floating point numbers would tell
  of the sum are rounded away.

  >>> noisy(np.zeros(2), 1.0, jax.random.key(0)) * 1024 % 1
  array([0., 0.])

  Args:
    total: the sum.
    std: of the noise, above 0.
    key: of the noise, secret, for this sum alone.
  """
  grid = 2.0 ** math.floor(math.log2(std / _GRID))
  return grid * np.round((total + std * normal_numbers(key, len(total))) / grid)


def normal_numbers(key: jax.Array, size: int) -> Float[np.ndarray, " number"]:
  """Draws standard normal numbers of 64 bits, up to 9.2 from zero.

  Those of float32 lie farther apart in the tails than the grid that sums are
  rounded to: what one data set can give, its neighbour could not.

  >>> normal_numbers(jax.random.key(0), 3).dtype
  dtype('float64')

  Args:
    key: of the noise, secret.
    size: how many.
  """
  own = jax.random.fold_in(key, _STREAM)
  bits = jax.random.bits(own, (2, size), np.uint32)
  high, low = np.asarray(bits, np.uint64)
  whole = (high << np.uint64(32)) | low
  distance = stats.norm.isf((np.minimum(whole, ~whole) + 0.5) / 2.0**64)
  return np.where(whole > ~whole, distance, -distance)
