"""Gaussian noise of private training: independent, or correlated over steps."""

import dataclasses
import functools
import hashlib
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from synthq_jax.optim import _gaussian

__all__ = ["Banded", "Iid", "Noise", "banded", "iid"]


class Noise(Protocol):
  """What `privatize` asks of its noise."""

  min_separation: int
  """Steps between two uses of one record that the guarantee needs, at least 1."""

  def init(self, tree: optax.Updates) -> Any:
    """Returns the state before the first step, for updates like `tree`."""

  def draw(
    self, key: jax.Array, step: jax.Array, tree: optax.Updates, state: Any
  ) -> tuple[optax.Updates, Any]:
    """Returns the noise of one step, float32, and the state after it.

    As large as a sensitivity of 1 and a noise multiplier of 1 ask for.
    """


@dataclasses.dataclass(frozen=True)
class Iid:
  """Noise that is independent for every step, leaf and coordinate.

  It is a function of the key, the step, the leaf's path and the place in it.
  """

  min_separation = 1

  def init(self, tree: optax.Updates) -> tuple[()]:
    """Returns no state."""
    del tree
    return ()

  def draw(
    self,
    key: jax.Array,
    step: jax.Array,
    tree: optax.Updates,
    state: tuple[()] = (),
  ) -> tuple[optax.Updates, tuple[()]]:
    """Returns standard Gaussian noise, float32 in the shapes of `tree`."""
    step_key = jax.random.fold_in(key, step)

    def draw(path: Any, leaf: Any) -> jax.Array:
      return _gaussian.standard(_leaf_key(step_key, path), jnp.shape(leaf))

    return jax.tree_util.tree_map_with_path(draw, tree), state


def _leaf_key(key: jax.Array, path: Any) -> jax.Array:
  """Returns the key of a leaf: it follows from its path, not from its place.

  So two transforms that were given one key, each for some of the leaves, do not
  add the same noise to leaves of one shape.
  """
  name = jax.tree_util.keystr(path).encode()
  words = np.frombuffer(hashlib.sha256(name).digest()[:8], np.uint32)
  for word in words:
    key = jax.random.fold_in(key, int(word))
  return key


@dataclasses.dataclass(frozen=True)
class Banded:
  """Noise C^-1 z, for a lower-triangular C with few bands and columns of norm 1.

  Each step takes part of the earlier steps' noise away again, so that the sum of
  all steps has less of it than under independent noise.

  Attributes:
    steps: of the whole training; noise beyond them is nan.
    coefficients: of the bands, main diagonal first.
  """

  steps: int
  coefficients: tuple[float, ...]

  @property
  def min_separation(self) -> int:
    """Columns of C this far apart have no row in common."""
    return len(self.coefficients)

  def init(self, tree: optax.Updates) -> Any:
    """Returns buffers of bands - 1 times the size of `tree`, float32."""
    shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.float32), tree
    )
    return self._inverse().init_multiply(shapes)

  def draw(
    self, key: jax.Array, step: jax.Array, tree: optax.Updates, state: Any
  ) -> tuple[optax.Updates, Any]:
    """Returns the noise of one step, which depends on all steps before."""
    fresh, _ = Iid().draw(key, step, tree)
    noise, state = self._inverse().multiply_next(fresh, state)
    known = jnp.asarray(step) < self.steps
    return jax.tree.map(lambda x: jnp.where(known, x, jnp.nan), noise), state

  def _inverse(self) -> Any:
    from jax_privacy.matrix_factorization import toeplitz

    return toeplitz.inverse_as_streaming_matrix(
      jnp.array(self.coefficients, jnp.float32),
      column_normalize_for_n=self.steps,
    )


def iid() -> Iid:
  """Returns the noise of plain DP-SGD: independent in every step."""
  return Iid()


def banded(*, steps: int, bands: int) -> Banded:
  """Returns correlated noise (BandMF) that is best for the mean iterate.

  Formal guarantee:
    Noise C^-1 z of standard deviation s = noise_multiplier x sensitivity on a
    stream of sums x is post-processing of C x + s z. Columns of C have norm 1
    and C has `bands` bands, so if a record takes part in steps that are at least
    `bands` apart, what it does to C x in one of its steps shares no row with
    what it does in another: each is one Gaussian mechanism of that noise
    multiplier. Under `privacy.sampling.CyclicPoisson` with `cycle_length` of at
    least `bands` these mechanisms are Poisson-sampled, one for every cycle
    (amplification). Under plain Poisson sampling NOTHING is claimed. Public:
    steps and bands.

  >>> noise = banded(steps=20, bands=4)
  >>> noise.min_separation
  4

  Args:
    steps: steps of the whole training, at least 1.
    bands: from 1 (independent noise) to `steps`; more of them correlate noise
      over more steps and ask for longer cycles, which amplify less. Memory: the
      size of the parameters times bands - 1.

  Returns:
    Noise for `privatize`.

  Raises:
    ValueError: if a number is out of its range.

  References:
    Choquette-Choo et al. (2023), arXiv:2306.08153 (banded matrices, theorem 4).
  """
  if not 1 <= bands <= steps:
    raise ValueError(f"expected 1 <= bands <= steps, got {bands=}, {steps=}")
  return Banded(steps, _coefficients(steps, bands))


@functools.cache
def _coefficients(steps: int, bands: int) -> tuple[float, ...]:
  """Returns coefficients that minimise the mean squared error of all sums."""
  from jax_privacy.matrix_factorization import toeplitz

  if bands == 1:
    return (1.0,)
  found = toeplitz.optimize_banded_toeplitz(steps, bands)
  return tuple(float(value) for value in found)
