"""Ways to pick the next token from its logits.

A sampler is a frozen dataclass with one method, `sample(logits, keys)`, which
takes one key per row: a row's token depends on its logits and its key alone.
"""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

__all__ = ["Greedy", "Nucleus", "Sampler", "Temperature", "TopK"]

_BITS_ABOVE_ONE = 0x3F800001  # the float32 after 1.0, read as an integer


class Sampler(Protocol):
  """Picks one token per row; forbidden tokens come with logit -inf."""

  def sample(
    self, logits: Float[Array, "batch vocab"], keys: Key[Array, " batch"]
  ) -> Int[Array, " batch"]:
    """Returns the tokens."""


def _check_temperature(sampler: "Nucleus | Temperature | TopK") -> None:
  if not sampler.temperature > 0:
    raise ValueError(
      f"{type(sampler).__name__}.temperature must be positive, got"
      f" temperature={sampler.temperature}; use Greedy() for no randomness"
    )


@dataclasses.dataclass(frozen=True)
class Greedy:
  """Always the most probable token."""

  def sample(self, logits, keys):
    del keys
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Temperature:
  """Draws from the softmax of logits / temperature."""

  temperature: float = 1.0
  """Positive; below 1 sharpens the distribution."""

  def __post_init__(self):
    _check_temperature(self)

  def sample(self, logits, keys):
    return _draw(jax.nn.softmax(logits / self.temperature), keys)


@dataclasses.dataclass(frozen=True)
class TopK:
  """Draws from the k most probable tokens (and those as probable as the k-th).

  References:
    Fan et al. 2018, Hierarchical Neural Story Generation, section 5.4.
  """

  k: int
  """How many tokens, at least 1."""
  temperature: float = 1.0
  """Positive; below 1 sharpens the distribution."""

  def __post_init__(self):
    _check_temperature(self)
    if self.k < 1:
      raise ValueError(f"TopK.k must be at least 1, got k={self.k}")

  def sample(self, logits, keys):
    k = min(self.k, logits.shape[-1])
    least = jax.lax.top_k(logits, k)[0][:, -1:]
    weights = jax.nn.softmax(logits / self.temperature)
    return _draw(jnp.where(logits >= least, weights, 0.0), keys)


@dataclasses.dataclass(frozen=True)
class Nucleus:
  """Draws from the fewest tokens that hold a share `p` of the probability.

  Tokens exactly as probable as the last of them are kept with it.

  References:
    Holtzman et al. 2020, The Curious Case of Neural Text Degeneration,
    section 3.1.
  """

  p: float
  """The share of the probability to keep, in (0, 1]."""
  temperature: float = 1.0
  """Positive; applied before the cut."""

  def __post_init__(self):
    _check_temperature(self)
    if not 0 < self.p <= 1:
      raise ValueError(f"Nucleus.p must lie in (0, 1], got p={self.p}")

  def sample(self, logits, keys):
    weights = jax.nn.softmax(logits.astype(jnp.float32) / self.temperature)
    return _draw(_nucleus(weights, self.p), keys)


def _nucleus(
  weights: Float[Array, "batch vocab"], p: float
) -> Float[Array, "batch vocab"]:
  """Zeroes the weights outside the nucleus.

  The least kept weight is found by bisection over float32 bit patterns, which
  order as the floats do: 30 sums, several times faster than a sort.
  """
  bits = jax.lax.bitcast_convert_type(weights, jnp.int32)

  def halve(_, bounds):
    low, high = bounds  # [batch, 1]; the share at `low` is enough
    middle = low + (high - low) // 2
    share = jnp.sum(
      jnp.where(bits >= middle, weights, 0.0), axis=-1, keepdims=True
    )
    enough = share >= p
    return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

  low = jnp.zeros((weights.shape[0], 1), jnp.int32)
  bounds = (low, jnp.full_like(low, _BITS_ABOVE_ONE))
  low, _ = jax.lax.fori_loop(0, 30, halve, bounds)
  return jnp.where(bits >= low, weights, 0.0)


def _draw(
  weights: Float[Array, "batch vocab"], keys: Key[Array, " batch"]
) -> Int[Array, " batch"]:
  """Draws a token of positive weight per row, by inverting the distribution.

  One uniform number per row is several times cheaper than one per token.
  """
  cumulative = jnp.cumsum(weights, axis=-1)
  uniform = jax.vmap(jax.random.uniform)(keys)[:, None]
  reached = (cumulative > uniform * cumulative[:, -1:]) & (weights > 0)
  # Rounding may leave the very last step unreached.
  fallback = jnp.argmax(weights, axis=-1)
  token = jnp.where(
    jnp.any(reached, axis=-1), jnp.argmax(reached, axis=-1), fallback
  )
  return token.astype(jnp.int32)
