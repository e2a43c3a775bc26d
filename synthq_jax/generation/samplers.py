"""Ways to pick the next token from its logits.

A sampler is a frozen dataclass with one method, `sample(logits, keys)`, which
takes one key per row: a row's token depends on its logits and its key alone.

No sampler sorts the vocabulary, or looks for where to cut it. A truncated
distribution is drawn from by rejection: a token is drawn from all, and kept if
it is inside the cut, which one sum over more probable tokens tells. If it is
not, no token as improbable can be, so the next draw is among the more probable
ones. Every draw is exact: whatever the set drawn from, those that are kept
follow their weights. With p = 0.8 a row takes 2.2 passes over the vocabulary on
average, and a batch as many as its slowest row.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from synthq_jax import checks

__all__ = ["Greedy", "Nucleus", "Sampler", "Temperature", "TopK"]

_LANES = 128  # tokens of a block: a row of a TPU's registers


class Sampler(Protocol):
  """Picks one token per row; forbidden tokens come with logit -inf."""

  def sample(
    self, logits: Float[Array, "batch vocab"], keys: Key[Array, " batch"]
  ) -> Int[Array, " batch"]:
    """Returns the tokens."""


@dataclasses.dataclass(frozen=True)
class Greedy:
  """Always the most probable token, the first of several."""

  def sample(self, logits, keys):
    del keys
    blocks = _in_blocks(logits)
    block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
    lane = jnp.argmax(_take(blocks, block), axis=-1)
    return (block * _LANES + lane).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Temperature:
  """Draws from the softmax of logits / temperature."""

  temperature: float = 1.0
  """Positive; below 1 sharpens the distribution."""

  def __post_init__(self):
    checks.within("(0, inf)", temperature=self.temperature)

  def sample(self, logits, keys):
    table = _table(logits, self.temperature)
    return _draw(table, _all(table), keys)[0]


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
    checks.within("(0, inf)", temperature=self.temperature)
    checks.at_least(1, k=self.k)

  def sample(self, logits, keys):
    table = _table(logits, self.temperature)
    return _draw_inside(table, self._cut(table), keys)

  def _cut(self, table):
    def inside(above):
      there = table.logits > above.bound[:, None, None]
      return jnp.sum(there, axis=(1, 2)) < self.k

    return inside


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
    checks.within("(0, inf)", temperature=self.temperature)
    checks.within("(0, 1]", p=self.p)

  def sample(self, logits, keys):
    if self.p == 1:  # a sum of weights could round to all of them
      return Temperature(self.temperature).sample(logits, keys)
    table = _table(logits, self.temperature)
    return _draw_inside(table, self._cut(table), keys)

  def _cut(self, table):
    enough = self.p * jnp.sum(_all(table).weights, axis=-1)
    return lambda above: jnp.sum(above.weights, axis=-1) < enough


class _Table(NamedTuple):
  """The vocabulary in blocks: a pass sums lanes, a draw reads one block."""

  logits: Array  # [batch, block, lane]
  weights: Array  # [batch, block, lane], unnormalised probabilities


class _Above(NamedTuple):
  """The tokens with larger logits than `bound`."""

  bound: Array  # [batch]
  weights: Array  # [batch, block], sums of their weights


def _in_blocks(
  logits: Float[Array, "batch vocab"],
) -> Float[Array, "batch block lane"]:
  padding = -logits.shape[-1] % _LANES
  logits = jnp.pad(
    logits.astype(jnp.float32),
    ((0, 0), (0, padding)),
    constant_values=-jnp.inf,
  )
  return logits.reshape(logits.shape[0], -1, _LANES)


def _table(logits: Float[Array, "batch vocab"], temperature: float) -> _Table:
  logits = _in_blocks(logits)
  largest = jnp.max(logits, axis=(1, 2), keepdims=True)
  return _Table(logits, jnp.exp((logits - largest) / temperature))


def _above(table: _Table, bound: Float[Array, " batch"]) -> _Above:
  there = table.logits > bound[:, None, None]
  return _Above(bound, jnp.sum(jnp.where(there, table.weights, 0.0), axis=-1))


def _all(table: _Table) -> _Above:
  return _above(table, jnp.full(table.logits.shape[0], -jnp.inf))


def _take(
  blocks: Float[Array, "batch block lane"], block: Int[Array, " batch"]
) -> Float[Array, "batch lane"]:
  return jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]


def _draw_inside(
  table: _Table,
  inside: Callable[[_Above], Bool[Array, " batch"]],
  keys: Key[Array, " batch"],
) -> Int[Array, " batch"]:
  """Draws until each row's token is inside the cut.

  Args:
    table: the vocabulary.
    inside: whether the cut keeps the most probable tokens below a bound, told
      from those above it; true if there are none above.
    keys: one per row.

  Returns:
    The tokens; 0 for a row whose logits are not finite.
  """

  def draw_again(state):
    number, token, drawn_from, done = state
    round_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
    drawn, logit = _draw(table, drawn_from, round_keys)
    token = jnp.where(done, token, drawn)
    above = _above(table, logit)
    return number + 1, token, above, done | inside(above)

  batch = table.logits.shape[0]
  # A row of undefined weights is inside no cut: it would be drawn for ever.
  undefined = ~jnp.all(jnp.isfinite(table.weights), axis=(1, 2))
  start = (
    jnp.int32(0),
    jnp.zeros(batch, jnp.int32),
    _all(table),
    undefined,
  )
  state = jax.lax.while_loop(lambda s: ~jnp.all(s[-1]), draw_again, start)
  return state[1]


def _draw(
  table: _Table, drawn_from: _Above, keys: Key[Array, " batch"]
) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
  """Draws a block, then a token of it; returns tokens and their logits.

  Two uniform numbers per row are many times cheaper than one per token.
  """
  uniform = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
  block = _invert(drawn_from.weights, uniform[:, 0])
  logits = _take(table.logits, block)
  there = logits > drawn_from.bound[:, None]
  weights = jnp.where(there, _take(table.weights, block), 0.0)
  lane = _invert(weights, uniform[:, 1])
  logit = jnp.take_along_axis(logits, lane[:, None], axis=1)[:, 0]
  return block * _LANES + lane, logit


def _invert(
  weights: Float[Array, "batch n"], uniform: Float[Array, " batch"]
) -> Int[Array, " batch"]:
  """Inverts the distribution: the index where a share `uniform` is reached."""
  cumulative = jnp.cumsum(weights, axis=-1)
  reached = cumulative > uniform[:, None] * cumulative[:, -1:]
  reached &= weights > 0
  # Rounding may leave the very last step unreached.
  fallback = jnp.argmax(weights, axis=-1)
  index = jnp.where(
    jnp.any(reached, axis=-1), jnp.argmax(reached, axis=-1), fallback
  )
  return index.astype(jnp.int32)
