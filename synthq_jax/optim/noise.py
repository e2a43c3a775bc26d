"""Gaussian noise of private training: independent, or correlated over steps.

Noise for every parameter is a third of a private optimizer's step on a CPU, so
it is written to be compiled into the loop that adds it: a counter for each
entry, Threefry of the counter, and Box and Muller's transform of the two words
that come out. `jax.random.normal` takes three times as long there, because its
generator is compiled as passes over whole arrays (docs/lab). All 64
bits of an entry count, and values reach 9.3 standard deviations (5.4 there): where
noise ends, a record that moves a sum past its end is told, and accounting pays for
that (`privacy.accounting`). On a mesh every device makes its own part.
"""

import dataclasses
import functools
import hashlib
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

__all__ = ["Banded", "Iid", "Noise", "banded", "iid", "standard"]

_STREAM = np.frombuffer(hashlib.sha256(b"synthq_jax noise").digest(), "<u4")[0]
"""Folded into a key before the step: `split(key, n)[i]` IS `fold_in(key, i)`, so
the key of step i would be the very key of a caller's own child i."""
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_SINE = tuple(
  (-1) ** i * (2 * math.pi) ** (2 * i + 1) / math.factorial(2 * i + 1)
  for i in range(7)
)
"""Of sin(2 pi t), exact to 1e-9 for |t| <= 1/4."""
_LOG = (
  *(0.3333333117, -0.2499999399, 0.2000071476, -0.1666805767, 0.1424932279),
  *(-0.1242014085, 0.1167699874, -0.1151461031, 0.0703768363),
)
"""Of (log(1 + x) - x + x^2 / 2) / x^3, exact to 1e-7 for x in [-0.3, 0.42]."""
_ROOT_HALF = 0x3F3504F3  # the bits of sqrt(1/2)


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
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    if not leaves:
      return tree, state
    keys = _leaf_keys(_step_key(key, step), [path for path, _ in leaves])
    drawn = [
      standard(key, jnp.shape(leaf))
      for key, (_, leaf) in zip(keys, leaves, strict=True)
    ]
    return structure.unflatten(drawn), state


def _step_key(key: jax.Array, step: jax.Array) -> jax.Array:
  """Derives the key of one step, apart from all keys that callers derive."""
  return jax.random.fold_in(jax.random.fold_in(key, _STREAM), step)


def _leaf_keys(key: jax.Array, paths: list[Any]) -> jax.Array:
  """Returns a key for each leaf: it follows from its path, not from its place.

  So two transforms that were given one key, each for some of the leaves, do not
  add the same noise to leaves of one shape.

  Raises:
    ValueError: if two leaves have one path, and so would have one noise.
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


@functools.partial(jax.jit, static_argnames="shape")  # one trace per shape
def standard(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Returns independent standard Gaussians, a function of key and position.

  Args:
    key: typed or raw. Keys of another generator than Threefry, and arrays of
      2^32 entries or more, take their bits from `jax.random.bits`.
    shape: of the result.

  Returns:
    float32 of that shape.

  References:
    Salmon et al. (2011), "Parallel random numbers: as easy as 1, 2, 3"
    (Threefry-2x32, 20 rounds). Box and Muller (1958).
  """
  return _gaussian(*_words(key, shape), _shared_word(key))


def _gaussian(
  first: jax.Array, second: jax.Array, shared: jax.Array
) -> jax.Array:
  """Returns a Gaussian of two words: one for its size, one for its sign and turn.

  One of 2^31 is in the last cell of sizes, beyond 6.5. That is divided by 31 bits
  more, from a word that all entries share, mixed with their own: only two entries
  of the last cell in one array would have related sizes.
  """
  # Both in (0, 1]: half of a step is added, so that the logarithm is finite.
  uniform = (
    (first >> 1).astype(jnp.int32).astype(jnp.float32) + 0.5
  ) * 2.0**-31
  last = ((second ^ shared) >> 1).astype(jnp.int32).astype(jnp.float32)
  uniform = jnp.where(first < 2, (last + 0.5) * 2.0**-62, uniform)
  turn = jax.lax.bitcast_convert_type(second, jnp.int32).astype(jnp.float32)
  return jnp.sqrt(-2.0 * _log(uniform)) * _cosine(turn * 2.0**-32)


def _log(x: jax.Array) -> jax.Array:
  """Returns log(x), at most 0, for x in [2^-100, 1]; to 1e-7 of 1 - log(x).

  That of `jnp` is slower, as it is for all numbers.
  """
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  exponent = (bits - _ROOT_HALF) >> 23
  rest = jax.lax.bitcast_convert_type(bits - (exponent << 23), jnp.float32)
  rest -= 1.0  # of a number in [sqrt(1/2), sqrt(2))
  value = _polynomial(_LOG, rest) * rest - 0.5
  value = value * rest * rest + rest
  log = exponent.astype(jnp.float32) * math.log(2.0) + value
  return jnp.minimum(log, 0.0)


def _polynomial(coefficients: tuple[float, ...], x: jax.Array) -> jax.Array:
  """Returns the sum of coefficients[i] x^i."""
  value = jnp.full_like(x, coefficients[-1])
  for coefficient in coefficients[-2::-1]:
    value = value * x + coefficient
  return value


def _cosine(turn: jax.Array) -> jax.Array:
  """Returns cos(2 pi turn) for turns in [-1/2, 1/2], to 2e-7."""
  angle = 0.25 - jnp.abs(turn)
  return _polynomial(_SINE, angle * angle) * angle


def _words(
  key: jax.Array, shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
  """Returns two words of 32 random bits for each entry."""
  if not _is_threefry(key) or math.prod(shape) >= 2**32:
    bits = jax.random.bits(key, (2, *shape), jnp.uint32)
    return bits[0], bits[1]
  position = jnp.zeros(shape, jnp.uint32)
  for axis in range(len(shape)):
    stride = jnp.uint32(math.prod(shape[axis + 1 :]))
    position += stride * jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
  data = jax.random.key_data(key)
  return _threefry(data[0], data[1], jnp.zeros_like(position), position)


def _shared_word(key: jax.Array) -> jax.Array:
  """Returns a word of a block that no entry of `_words` has."""
  if not _is_threefry(key):
    return jax.random.bits(jax.random.fold_in(key, 1), (), jnp.uint32)
  data = jax.random.key_data(key)
  return _threefry(data[0], data[1], jnp.uint32(1), jnp.uint32(0))[0]


def _is_threefry(key: jax.Array) -> bool:
  return str(jax.random.key_impl(key)) == "threefry2x32"


def _mix(
  x0: jax.Array, x1: jax.Array, rotation: int
) -> tuple[jax.Array, jax.Array]:
  """Computes one round of Threefry."""
  x0 = x0 + x1
  return x0, ((x1 << rotation) | (x1 >> (32 - rotation))) ^ x0


def _threefry(
  key0: jax.Array, key1: jax.Array, x0: jax.Array, x1: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Encrypts blocks of two words with Threefry-2x32 in 20 rounds."""
  keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(_PARITY))
  x0, x1 = x0 + keys[0], x1 + keys[1]
  for group in range(5):
    for rotation in _ROTATIONS[group % 2]:
      x0, x1 = _mix(x0, x1, rotation)
    x0 += keys[(group + 1) % 3]
    x1 += keys[(group + 2) % 3] + jnp.uint32(group + 1)
  return x0, x1
