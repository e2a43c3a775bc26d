"""Correlated noise with a few buffers: BLT, for batches of balls in bins."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from synthq_jax.optim import noise as noise_lib
from synthq_jax.privacy import sampling

__all__ = ["Blt", "blt"]

_ROUNDING = 1e-5  # of the buffers' float32, on the standard deviation


@dataclasses.dataclass(frozen=True)
class Blt:
  """Noise s C^-1 z, for a lower-triangular Toeplitz C of sums of exponentials.

  C has ones on its diagonal and sum_i scale_i decay_i^(k-1) on its k-th
  subdiagonal, so that C^-1 z needs one buffer for each i.

  Attributes:
    steps: of the whole training; noise beyond them is nan.
    min_separation: steps between two batches with one record.
    decays: of the buffers, in (0, 1).
    scales: of the buffers.
    scale: s, what makes up for a record's several batches.
  """

  steps: int
  min_separation: int
  decays: tuple[float, ...]
  scales: tuple[float, ...]
  scale: float

  @property
  def buffers(self) -> int:
    """How many copies of the parameters the state holds."""
    return len(self.decays)

  def init(self, tree: optax.Updates) -> Any:
    """Returns empty buffers, float32 [buffers, ...]."""
    return jax.tree.map(
      lambda x: jnp.zeros((self.buffers, *jnp.shape(x)), jnp.float32), tree
    )

  def draw(
    self, key: jax.Array, step: jax.Array, tree: optax.Updates, state: Any
  ) -> tuple[optax.Updates, Any]:
    """Returns the noise of one step, which depends on all steps before."""
    fresh, _ = noise_lib.Iid().draw(key, step, tree)

    def read(noise: jax.Array, held: jax.Array) -> jax.Array:
      for i, scale in enumerate(self.scales):
        noise -= scale * held[i]
      return noise

    def write(noise: jax.Array, held: jax.Array) -> jax.Array:
      rows = [decay * held[i] + noise for i, decay in enumerate(self.decays)]
      return jnp.stack(rows) if rows else held

    noise = jax.tree.map(read, fresh, state)
    known = jnp.asarray(step) < self.steps
    scaled = jax.tree.map(
      lambda x: jnp.where(known, self.scale * x, jnp.nan), noise
    )
    return scaled, jax.tree.map(write, noise, state)


def blt(
  *, sampler: sampling.BallsInBins, steps: int, max_buffers: int = 4
) -> Blt:
  """Returns correlated noise that takes a few copies of the parameters.

  As `banded`, each step takes part of earlier noise away again; here of all
  earlier steps, at a memory that does not grow with their number. There is no
  amplification: it is for few epochs, or for data that come in a given order.

  Formal guarantee:
    With noise s C^-1 z of standard deviation s x noise_multiplier x sensitivity,
    all sums together are post-processing of C x + s z. One record is in the
    batches of one bin, `cycle_length` steps apart, in k of the first t steps for
    k = ceil(t / cycle_length). C has entries that are not negative and fall
    along each column, so whatever the record does it moves C x by at most
    S(k) = | C_b + C_(b + cycle) + ... (k columns) | times the sensitivity, most
    for the first columns. s is the largest S(k) / sqrt(k), so that all is ONE
    Gaussian mechanism of noise multiplier at least noise_multiplier / sqrt(k):
    what k independent ones cost, which is what `BallsInBins.event` claims, for
    this number of steps and every smaller one. Assumed: batches of this very
    sampler. Under Poisson sampling NOTHING is claimed: `claim.Claim` is told by
    `noise_buffers` and refuses it. Public: sampler, steps and buffers.

  >>> sampler = sampling.BallsInBins.with_margin(
  ...     num_examples=1000, cycle_length=10)
  >>> noise = blt(sampler=sampler, steps=30, max_buffers=1)
  >>> noise.buffers, noise.min_separation
  (1, 10)

  Args:
    sampler: whose batches the noise is for.
    steps: of the whole training, at least 1.
    max_buffers: the most buffers that are tried, from 0 (independent noise) to
      10: copies of the parameters that the state holds.

  Returns:
    Noise for `privatize`.

  Raises:
    TypeError: if the sampler is another.
    ValueError: if a number is out of its range.

  References:
    McMahan, Xu and Zhang (2024), arXiv:2408.08868. Kalinin, McKenna, Upadhyay
    and Lampert (2024), arXiv:2405.13763, theorem 2 (several participations).
  """
  if not isinstance(sampler, sampling.BallsInBins):
    raise TypeError(
      "expected a sampling.BallsInBins, whose records keep their steps, got"
      f" {type(sampler).__name__}: take iid() or banded(...) with Poisson batches"
    )
  if steps < 1 or not 0 <= max_buffers <= 10:
    raise ValueError(
      f"expected steps >= 1 and max_buffers in [0, 10], got {steps=},"
      f" {max_buffers=}"
    )
  cycle = min(sampler.cycle_length, steps)
  decays, scales = _optimized(steps, cycle, max_buffers)
  scale = participation_norms(coefficients(steps, decays, scales), cycle)
  scale /= np.sqrt(np.arange(1, len(scale) + 1))
  return Blt(
    steps=steps,
    min_separation=sampler.cycle_length,
    decays=decays,
    scales=scales,
    scale=float(scale.max()) * (1 + _ROUNDING),
  )


def coefficients(
  steps: int, decays: tuple[float, ...], scales: tuple[float, ...]
) -> np.ndarray:
  """Returns the first column of C, float64 [steps].

  Args:
    steps: of the training.
    decays: of the buffers.
    scales: of the buffers.
  """
  powers = np.arange(steps - 1)[:, None]
  below = (np.array(scales) * np.array(decays) ** powers).sum(axis=1)
  return np.concatenate([[1.0], below])


def participation_norms(column: np.ndarray, cycle: int) -> np.ndarray:
  """Returns the norm of the sum of the first k columns of one bin, for each k.

  Args:
    column: the first of a lower-triangular Toeplitz matrix, [steps].
    cycle: steps between two columns.

  Returns:
    float64 [ceil(steps / cycle)].

  Raises:
    ValueError: if the column is negative somewhere or grows, where the first
      columns need not be the worst.
  """
  if (column < 0).any() or (np.diff(column) > 0).any():
    raise ValueError(
      "expected a column that is not negative and never grows, got another: try"
      " fewer buffers"
    )
  norms, total = [], np.zeros(len(column))
  for start in range(0, len(column), cycle):
    total[start:] += column[: len(column) - start]
    norms.append(np.linalg.norm(total))
  return np.array(norms)


@functools.cache
def _optimized(
  steps: int, cycle: int, max_buffers: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
  """Returns decays and scales of least error of the sums, for few buffers."""
  from jax_privacy.matrix_factorization import buffered_toeplitz

  if max_buffers == 0 or steps == 1:
    return (), ()
  with jax.numpy_rank_promotion("allow"):
    found = buffered_toeplitz.optimize(
      n=steps,
      min_sep=cycle,
      max_participations=-(-steps // cycle),
      error="mean",
      max_buffers=max_buffers,
    )
  # What the step computes with: float32, in which the bound is found, too.
  decays, scales = (
    tuple(float(np.float32(x)) for x in np.asarray(values))
    for values in (found.buf_decay, found.output_scale)
  )
  return decays, scales
