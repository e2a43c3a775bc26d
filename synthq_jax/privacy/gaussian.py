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
"""Constant folded into the key first. Random bits of a key are the words of its
child keys: whoever knows a sum, and so its noise, would learn a caller's child."""


def noisy(
  total: Float[np.ndarray, " number"], std: float, key: jax.Array
) -> Float[np.ndarray, " number"]:
  """Adds Gaussian noise to a sum and rounds to about a thousandth of the noise.

  Formal guarantee: the result is a function of the outcome of the Gaussian
  mechanism with this standard deviation. The rounding removes the low bits of
  floating point numbers, which would reveal the sum.

  >>> noisy(np.zeros(2), 1.0, jax.random.key(0)) * 1024 % 1
  array([0., 0.])

  Args:
    total: the sum.
    std: the standard deviation of the noise, above 0.
    key: the secret key of the noise, for this sum alone.
  """
  grid = 2.0 ** math.floor(math.log2(std / _GRID))
  return grid * np.round((total + std * normal_numbers(key, len(total))) / grid)


def normal_numbers(key: jax.Array, size: int) -> Float[np.ndarray, " number"]:
  """Draws standard normal numbers from 64 bits each, up to 9.2 from zero.

  Numbers of float32 are not enough: in the tails they lie farther apart than the
  rounding grid of the sums. So one data set could have outcomes that its neighbour
  cannot have.

  >>> normal_numbers(jax.random.key(0), 3).dtype
  dtype('float64')

  Args:
    key: the secret key of the noise.
    size: the number of draws.
  """
  own = jax.random.fold_in(key, _STREAM)
  bits = jax.random.bits(own, (2, size), np.uint32)
  high, low = np.asarray(bits, np.uint64)
  word = (high << np.uint64(32)) | low
  distance = stats.norm.isf((np.minimum(word, ~word) + 0.5) / 2.0**64)
  return np.where(word > ~word, distance, -distance)
