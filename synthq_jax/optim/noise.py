"""Draws the Gaussian noise of private training, independent or correlated.

Noise for every parameter is a third of a private optimizer's step on a CPU. XLA
therefore has to compile it into the loop that adds it: a counter for each
entry, Threefry of the counter, and the Box-Muller transform of the two
resulting words. `jax.random.normal` takes three times as long on a CPU, because
its generator is compiled as passes over whole arrays (docs/lab). On a mesh
every device draws its own part.

All 64 bits of an entry count, and values reach 9.3 standard deviations (5.4 in
`jax.random.normal`). A sum that a record moves past the largest value reveals
that record; accounting pays for this (`privacy.accounting`).
"""

import dataclasses
import functools
import hashlib
import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from synthq_jax.privacy import batches

__all__ = ["Banded", "Iid", "Noise", "banded", "draw_standard", "iid"]

_STREAM = np.frombuffer(hashlib.sha256(b"synthq_jax noise").digest(), "<u4")[0]
"""Tag folded into a key before the step. `split(key, n)[i]` IS `fold_in(key,
i)`: without the tag, step i would use the key of a caller's own child i."""
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_SINE = tuple(
  (-1) ** i * (2 * math.pi) ** (2 * i + 1) / math.factorial(2 * i + 1)
  for i in range(7)
)
"""Coefficients of sin(2 pi t) / t in t^2; the sine is exact to 1e-9 for |t| <=
1/4."""
_LOG = (
  *(0.3333333117, -0.2499999399, 0.2000071476, -0.1666805767, 0.1424932279),
  *(-0.1242014085, 0.1167699874, -0.1151461031, 0.0703768363),
)
"""Coefficients of (log(1 + x) - x + x^2 / 2) / x^3, exact to 1e-7 for x in
[-0.3, 0.42]."""
_ROOT_HALF = 0x3F3504F3  # the bits of sqrt(1/2)


class Noise(Protocol):
  """Interface of the noise that `privatize` adds."""

  min_separation: int
  """Least distance in steps between two uses of a record, for the guarantee; at
  least 1."""

  def init(self, tree: optax.Updates) -> Any:
    """Returns the state before the first step, for updates like `tree`."""

  def draw(
    self, key: jax.Array, step: jax.Array, tree: optax.Updates, state: Any
  ) -> tuple[optax.Updates, Any]:
    """Returns the noise of one step, float32, and the state after it.

    The scale is that of a sensitivity of 1 and a noise multiplier of 1.
    """


@dataclasses.dataclass(frozen=True)
class Iid:
  """Independent noise for every step, leaf and coordinate.

  It is a function of the key, the step, the leaf's path and the position in the
  leaf.
  """

  min_separation = 1

  def init(self, tree: optax.Updates) -> tuple[()]:
    """Returns the empty state."""
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
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    if not leaves:
      return tree, state
    keys = _derive_leaf_keys(
      _derive_step_key(key, step), [path for path, _ in leaves]
    )
    drawn = [
      draw_standard(key, jnp.shape(leaf))
      for key, (_, leaf) in zip(keys, leaves, strict=True)
    ]
    return structure.unflatten(drawn), state


def _derive_step_key(key: jax.Array, step: jax.Array) -> jax.Array:
  """Derives the key of one step, distinct from all keys that callers derive."""
  return jax.random.fold_in(jax.random.fold_in(key, _STREAM), step)


def _derive_leaf_keys(key: jax.Array, paths: list[Any]) -> jax.Array:
  """Derives a key for each leaf from its path, not from its position in the tree.

  Two transforms with the same key, each for some of the leaves, therefore do
  not add the same noise to leaves of one shape.

  Raises:
    ValueError: if two leaves have the same path, and so would get the same
      noise.
  """
  named = [jax.tree_util.keystr(path) for path in paths]
  if len(set(named)) < len(named):
    twice = next(name for name in named if named.count(name) > 1)
    raise ValueError(
      f"expected a path of its own for each leaf, got {twice} twice: both would"
      " get the same noise; give the children of this pytree different keys"
    )
  names = (name.encode() for name in named)
  digests = b"".join(hashlib.sha256(name).digest()[:8] for name in names)
  words = np.frombuffer(digests, np.uint32).reshape(-1, 2)

  def fold(words: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(key, words[0]), words[1])

  return jax.lax.map(fold, words)


class BandedState(NamedTuple):
  """State of `Banded`."""

  steps: jax.Array  # [] int32, of the training whose noise the buffers hold
  buffers: Any  # of the last bands - 1 steps


@dataclasses.dataclass(frozen=True)
class Banded:
  """Noise C^-1 z, for a lower-triangular C with few bands and columns of norm 1.

  Each step cancels part of the noise of earlier steps, so that the sum of all
  steps has less noise than with independent noise.

  Attributes:
    steps: number of steps of the whole training. Noise beyond them is nan, and
      so is noise that continues the state of a training of other steps: columns
      of the joint C may be longer than 1.
    coefficients: coefficients of the bands, main diagonal first.
  """

  steps: int
  coefficients: tuple[float, ...]

  @property
  def min_separation(self) -> int:
    """Number of bands: columns of C this far apart have no row in common."""
    return len(self.coefficients)

  def init(self, tree: optax.Updates) -> BandedState:
    """Returns buffers of bands - 1 times the size of `tree`, float32."""
    shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.float32), tree
    )
    buffers = self._make_inverse().init_multiply(shapes)
    return BandedState(jnp.asarray(self.steps, jnp.int32), buffers)

  def draw(
    self,
    key: jax.Array,
    step: jax.Array,
    tree: optax.Updates,
    state: BandedState,
  ) -> tuple[optax.Updates, BandedState]:
    """Returns the noise of one step, which depends on all steps before."""
    fresh, _ = Iid().draw(key, step, tree)
    noise, buffers = self._make_inverse().multiply_next(fresh, state.buffers)
    is_step = (jnp.asarray(step) < self.steps) & (state.steps == self.steps)
    noise = jax.tree.map(lambda x: jnp.where(is_step, x, jnp.nan), noise)
    return noise, BandedState(state.steps, buffers)

  def _make_inverse(self) -> Any:
    from jax_privacy.matrix_factorization import toeplitz

    return toeplitz.inverse_as_streaming_matrix(
      jnp.array(self.coefficients, jnp.float32),
      column_normalize_for_n=self.steps,
    )


def iid() -> Iid:
  """Returns the noise of plain DP-SGD: independent in every step."""
  return Iid()


def banded(*, sampler: batches.Sampler, steps: int, bands: int) -> Banded:
  """Returns correlated noise (BandMF) that is best for the mean iterate.

  Formal guarantee:
    Let s = noise_multiplier x sensitivity. Adding s C^-1 z to a stream of sums
    x is post-processing of C x + s z. Columns of C have norm 1 and C has
    `bands` bands. If a record takes part in steps that are at least `bands`
    apart, its contributions to C x in two of its steps share no row. Each step
    of the record is therefore one Gaussian mechanism of that noise multiplier.
    Under `privacy.sampling.CyclicPoisson` with `cycle_length` of at least
    `bands` these mechanisms are Poisson-sampled, one for every cycle
    (amplification). Under plain Poisson sampling NOTHING is claimed. Assumed:
    `sampler` draws the batches. Public: steps and bands.

  >>> from synthq_jax.privacy import sampling
  >>> sampler = sampling.CyclicPoisson.with_margin(
  ...     num_examples=1000, expected_batch_size=50, cycle_length=4)
  >>> noise = banded(sampler=sampler, steps=20, bands=4)
  >>> noise.min_separation
  4

  Args:
    sampler: draws the batches of the training, and belongs to its claim. It keeps
      two batches with one record at least `bands` steps apart.
    steps: steps of the whole training, at least 1. A training cannot be made
      longer: a restored state of other steps gives nan.
    bands: number of bands, from 1 (independent noise) to `steps`. More bands
      correlate noise over more steps and need longer cycles, which amplify
      less.
      Memory: the size of the parameters times bands - 1.

  Returns:
    Noise for `privatize`.

  Raises:
    TypeError: if `sampler` is none of `privacy.sampling`.
    ValueError: if a number is out of its range, or a record can come back within
      fewer steps than `bands`.

  References:
    Choquette-Choo et al. (2023), arXiv:2306.08153 (banded matrices, theorem 4).
  """
  if not 1 <= bands <= steps:
    raise ValueError(f"expected 1 <= bands <= steps, got {bands=}, {steps=}")
  batches.check_sampler(sampler)
  sampler.check_noise(bands)
  return Banded(steps, _optimize_coefficients(steps, bands))


@functools.cache
def _optimize_coefficients(steps: int, bands: int) -> tuple[float, ...]:
  """Computes coefficients that minimise the mean squared error of all sums."""
  from jax_privacy.matrix_factorization import toeplitz

  if bands == 1:
    return (1.0,)
  coefficients = toeplitz.optimize_banded_toeplitz(steps, bands)
  return tuple(float(value) for value in coefficients)


@functools.partial(jax.jit, static_argnames="shape")  # one trace per shape
def draw_standard(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Draws independent standard Gaussians as a function of key and position.

  Args:
    key: typed or raw. For a key of another generator than Threefry, and for
      2^32 entries or more, the bits are those of `jax.random.bits`.
    shape: the shape of the result.

  Returns:
    float32 of that shape.

  References:
    Salmon et al. (2011), "Parallel random numbers: as easy as 1, 2, 3"
    (Threefry-2x32, 20 rounds). Box and Muller (1958).
  """
  return _transform_words(*_draw_words(key, shape), _draw_shared_word(key))


def _transform_words(
  first: jax.Array, second: jax.Array, shared: jax.Array
) -> jax.Array:
  """Applies the Box-Muller transform to words for the radius and for the angle.

  One entry in 2^31 has a radius in the last cell, beyond 6.5. That cell is
  divided by 31 more bits: the entry's word for the angle, mixed with a word
  that all entries of an array share. Only two entries of the last cell in one
  array would have related radii.
  """
  # Both are in (0, 1]: adding half a step keeps the logarithm finite.
  uniform = (
    (first >> 1).astype(jnp.int32).astype(jnp.float32) + 0.5
  ) * 2.0**-31
  last = ((second ^ shared) >> 1).astype(jnp.int32).astype(jnp.float32)
  uniform = jnp.where(first < 2, (last + 0.5) * 2.0**-62, uniform)
  turn = jax.lax.bitcast_convert_type(second, jnp.int32).astype(jnp.float32)
  return jnp.sqrt(-2.0 * _compute_log(uniform)) * _compute_cosine(
    turn * 2.0**-32
  )


def _compute_log(x: jax.Array) -> jax.Array:
  """Returns log(x), at most 0, for x in [2^-100, 1]; to 1e-7 of 1 - log(x).

  `jnp.log` is slower, because it is exact for all numbers.
  """
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  exponent = (bits - _ROOT_HALF) >> 23
  rest = jax.lax.bitcast_convert_type(bits - (exponent << 23), jnp.float32)
  rest -= 1.0  # from a number in [sqrt(1/2), sqrt(2))
  value = _evaluate_polynomial(_LOG, rest) * rest - 0.5
  value = value * rest * rest + rest
  log = exponent.astype(jnp.float32) * math.log(2.0) + value
  return jnp.minimum(log, 0.0)


def _evaluate_polynomial(
  coefficients: tuple[float, ...], x: jax.Array
) -> jax.Array:
  """Returns the sum of coefficients[i] x^i."""
  value = jnp.full_like(x, coefficients[-1])
  for coefficient in coefficients[-2::-1]:
    value = value * x + coefficient
  return value


def _compute_cosine(turn: jax.Array) -> jax.Array:
  """Returns cos(2 pi turn) for turns in [-1/2, 1/2], to 2e-7."""
  angle = 0.25 - jnp.abs(turn)
  return _evaluate_polynomial(_SINE, angle * angle) * angle


def _draw_words(
  key: jax.Array, shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
  """Draws two words of 32 random bits for each entry."""
  if not _is_threefry(key) or math.prod(shape) >= 2**32:
    bits = jax.random.bits(key, (2, *shape), jnp.uint32)
    return bits[0], bits[1]
  position = jnp.zeros(shape, jnp.uint32)
  for axis in range(len(shape)):
    stride = jnp.uint32(math.prod(shape[axis + 1 :]))
    position += stride * jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
  data = jax.random.key_data(key)
  return _encrypt(data[0], data[1], jnp.zeros_like(position), position)


def _draw_shared_word(key: jax.Array) -> jax.Array:
  """Draws a word from a block that `_draw_words` uses for no entry."""
  if not _is_threefry(key):
    return jax.random.bits(jax.random.fold_in(key, 1), (), jnp.uint32)
  data = jax.random.key_data(key)
  return _encrypt(data[0], data[1], jnp.uint32(1), jnp.uint32(0))[0]


def _is_threefry(key: jax.Array) -> bool:
  return str(jax.random.key_impl(key)) == "threefry2x32"


def _mix_round(
  x0: jax.Array, x1: jax.Array, rotation: int
) -> tuple[jax.Array, jax.Array]:
  """Computes one round of Threefry."""
  x0 = x0 + x1
  return x0, ((x1 << rotation) | (x1 >> (32 - rotation))) ^ x0


def _encrypt(
  key0: jax.Array, key1: jax.Array, x0: jax.Array, x1: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Encrypts blocks of two words with Threefry-2x32 in 20 rounds."""
  keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(_PARITY))
  x0, x1 = x0 + keys[0], x1 + keys[1]
  for group in range(5):
    for rotation in _ROTATIONS[group % 2]:
      x0, x1 = _mix_round(x0, x1, rotation)
    x0 += keys[(group + 1) % 3]
    x1 += keys[(group + 2) % 3] + jnp.uint32(group + 1)
  return x0, x1
