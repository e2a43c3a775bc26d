"""What no attacker can exceed who sees vectors with Gaussian noise.

Two bounds, both in closed form and free of assumptions about the attacker: how
often the right one of some candidates is named, and how many bits about
anything the vector carries. They speak of noise of a known standard deviation
on each coordinate; without noise neither says anything.

References:
  Dong, Roth and Su, "Gaussian Differential Privacy", Journal of the Royal
  Statistical Society B 2022 (the trade-off curve of two Gaussians).
  Hayes, Mahloujifar and Balle, "Bounding Training Data Reconstruction in
  DP-SGD", NeurIPS 2023 (from such curves to the success of reconstruction).
  Cover and Thomas, "Elements of Information Theory", 2nd edition, section 9.4
  (parallel Gaussian channels).
"""

import math

import numpy as np
import scipy.stats
from jaxtyping import Float

from synthq_jax import checks

__all__ = ["enclosing_radius", "information_bits", "success"]


def success(
  *,
  num_candidates: int,
  radius: float,
  standard_deviation: float,
  releases: int = 1,
) -> float:
  """Bounds how often any attacker names the right candidate.

  Formal guarantee: let the secret be uniform over `num_candidates` sentences
  that the attacker knows, whose vectors lie within `radius` of some fixed
  point, and let the vector be sent `releases` times with independent Gaussian
  noise of this standard deviation on each coordinate. Whatever the attacker
  computes, it names the secret with probability at most

    Phi(Phi^-1(1 / num_candidates) + sqrt(releases) radius / standard_deviation)

  For, let Q be the law of what is sent at the fixed point. Where the attacker
  names candidate j has probability q_j under Q, and these sum to 1; under the
  law of candidate j it has at most Phi(Phi^-1(q_j) + mu), by Neyman and
  Pearson, with mu the shift in standard deviations. This is concave in q_j, so
  the mean over candidates is largest where all are 1 / num_candidates. With two
  candidates at opposite points of the ball the bound is attained.

  >>> round(success(num_candidates=100, radius=1, standard_deviation=1), 3)
  0.092
  >>> success(num_candidates=100, radius=1, standard_deviation=1e9)
  0.01...

  Args:
    num_candidates: at least 2.
    radius: of a ball that holds all candidates' vectors, whatever its center;
      1 always does for unit vectors. `enclosing_radius` measures a smaller one.
    standard_deviation: of the noise of each coordinate, at least 0.
    releases: how often the same vector is sent.

  Returns:
    A probability, at least 1 / num_candidates; 1 without noise.

  Raises:
    ValueError: if an argument is out of range.
  """
  checks.at_least(2, num_candidates=num_candidates)
  shift = _shift(radius, standard_deviation, releases)
  chance = scipy.stats.norm.ppf(1 / num_candidates)
  return float(scipy.stats.norm.cdf(chance + shift))


def information_bits(
  *,
  dim: int,
  radius: float,
  standard_deviation: float,
  releases: int = 1,
) -> float:
  """Bounds the mutual information of a text and what is sent for it.

  Formal guarantee: whatever the distribution of texts, if the root mean square
  of their vectors' distance from some fixed point is at most `radius` and a
  vector is sent as in `success`, its mutual information with the text is at
  most

    dim / 2 log2(1 + releases radius^2 / (dim standard_deviation^2))

  the capacity of `dim` equal Gaussian channels that share this power.

  >>> round(information_bits(dim=128, radius=1, standard_deviation=1), 2)
  0.72

  Args:
    dim: coordinates of a vector.
    radius: at most 1 for unit vectors.
    standard_deviation: of the noise of each coordinate, at least 0.
    releases: how often the same vector is sent.

  Returns:
    Bits; infinite without noise.

  Raises:
    ValueError: if an argument is out of range.
  """
  checks.at_least(1, dim=dim)
  shift = _shift(radius, standard_deviation, releases)
  return dim / 2 * math.log2(1 + shift**2 / dim)


def enclosing_radius(
  vectors: Float[np.ndarray, "... candidate dim"],
) -> np.ndarray:
  """Returns the radius of a ball around the mean that holds all candidates.

  >>> print(enclosing_radius(np.array([[0.0, 1.0], [0.0, -1.0]])))
  1.0

  Args:
    vectors: of the candidates, one set or several.

  Returns:
    A radius for each set; at most twice that of the smallest ball.
  """
  vectors = np.asarray(vectors, np.float64)
  center = np.mean(vectors, axis=-2, keepdims=True)
  return np.max(np.linalg.norm(vectors - center, axis=-1), axis=-1)


def _shift(radius: float, standard_deviation: float, releases: int) -> float:
  """Returns how many standard deviations all releases together move."""
  checks.at_least(0, radius=radius, standard_deviation=standard_deviation)
  checks.at_least(1, releases=releases)
  if radius == 0:
    return 0.0
  if standard_deviation == 0:
    return math.inf
  return math.sqrt(releases) * radius / standard_deviation
