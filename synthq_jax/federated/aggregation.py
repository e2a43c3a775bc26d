"""What a server makes of its clients' parameters: a mean or a clipped sum.

A `Total` holds what some clients sent, and two of them merge into one. So a
round may add clients one by one, in chunks or on several devices, and needs the
memory of one model, however many clients there are.
"""

import dataclasses
import math
from typing import Any, NamedTuple, Protocol

import dp_accounting
import jax
import jax.numpy as jnp
import optax

from synthq_jax import checks, typing
from synthq_jax.optim import clipping

__all__ = ["Aggregation", "Mean", "Sum", "Total"]

_Relation = dp_accounting.NeighboringRelation


class Total(NamedTuple):
  """What some of a round's clients sent."""

  value: typing.Params  # float32: a mean of parameters, or a sum of updates
  weight: jax.Array  # [] float32, of all that count
  clients: jax.Array  # [] int32, how many count
  failed: jax.Array  # [] int32, how many sent nan or inf, and do not count
  norm: jax.Array  # [] float32, sum of the L2 norms of their updates


class Aggregation(Protocol):
  """How clients' parameters become one model."""

  takes_weights: bool
  """Whether clients may have different weights."""

  def of(self, params: typing.Params, model: Any, weight: Any = 1.0) -> Total:
    """Returns the total of one client.

    Args:
      params: where it started.
      model: its parameters afterwards.
      weight: at least 0; 0 leaves it out. Where no weights are taken, what is
        above 0 counts as 1.
    """

  def merge(self, one: Total, other: Total) -> Total:
    """Returns the total of both; the order makes no more than rounding."""

  def join(self, total: Total, axis: str) -> Total:
    """Returns the total of all devices along an axis of a mesh."""

  def params(self, total: Total, params: typing.Params) -> typing.Params:
    """Returns the parameters after the round, in the types of `params`, which
    are those before: the mean, or `params` plus the sum over its denominator."""

  def gradient(self, total: Total, params: typing.Params) -> typing.Params:
    """Returns what a server optimizer takes for a gradient, float32: less the
    change that `params` would make."""


@dataclasses.dataclass(frozen=True)
class Mean:
  """The mean of the clients' parameters, weighted; FedAvg.

  It is a running mean, m + (w / W) (x - m). Adding up the clients' updates
  would be the same but for rounding; this way the mean of one client is that
  client's parameters to the bit, and so is the mean of several equal ones.

  A client that sent nan or inf is left out. If nobody is left, the parameters
  stay what they were.

  References:
    McMahan et al. (2017), arXiv:1602.05629, algorithm 1.
  """

  takes_weights = True

  def of(self, params: typing.Params, model: Any, weight: Any = 1.0) -> Total:
    _, norm = _update(params, model)
    counts, total = _counted(norm, weight)
    value = jax.tree.map(lambda x: jnp.where(counts, _float32(x), 0.0), model)
    return total._replace(value=value)

  def merge(self, one: Total, other: Total) -> Total:
    total = _add(one, other)
    share = _ratio(other.weight, total.weight)
    value = jax.tree.map(
      lambda mean, x: mean + share * (x - mean), one.value, other.value
    )
    return total._replace(value=value)

  def join(self, total: Total, axis: str) -> Total:
    joined = jax.lax.psum(total._replace(value=()), axis)
    share = _ratio(total.weight, joined.weight)
    value = jax.tree.map(lambda x: jax.lax.psum(share * x, axis), total.value)
    return joined._replace(value=value)

  def params(self, total: Total, params: typing.Params) -> typing.Params:
    return jax.tree.map(
      lambda x, before: jnp.where(
        total.weight > 0, x.astype(before.dtype), before
      ),
      total.value,
      params,
    )

  def gradient(self, total: Total, params: typing.Params) -> typing.Params:
    return jax.tree.map(
      lambda x, before: jnp.where(total.weight > 0, _float32(before) - x, 0.0),
      total.value,
      params,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sum:
  """The sum of the clients' updates over a fixed denominator; may be clipped.

  An update is what the client changed, taken as one vector over all parameters.
  Clients that stay away pull the model back to where it was, since the
  denominator does not become smaller.

  Formal guarantee:
    Unit: one client, with everything it holds. With a finite `l2_clip_norm` all
    weights are 1, each update is scaled to at most that norm, and one that is
    not finite contributes zero. So adding a client to the round, removing it, or
    its dropping out, moves the sum (before the denominator) by at most
    `l2_clip_norm` in L2, whatever that client sends. Assumes that what one
    client sends does not depend on who else takes part. Public: the clip norm
    and the denominator. Floating point numbers stand for real ones.

  >>> import jax.numpy as jnp
  >>> sums = Sum(denominator=8.0, l2_clip_norm=1.0)
  >>> before, after = jnp.zeros(2), jnp.array([3.0, 4.0])
  >>> print(sums.of(before, after).value)
  [0.6 0.8]
  >>> print(sums.params(sums.of(before, after), before))
  [0.075 0.1  ]
  """

  denominator: float = 1.0
  """Public: for example the expected number of clients of a round."""
  l2_clip_norm: float = math.inf
  """Of a client's update; inf does not clip."""

  def __post_init__(self):
    """Refuses numbers that are not above 0."""
    checks.within("(0, inf)", denominator=self.denominator)
    checks.within("(0, inf]", l2_clip_norm=self.l2_clip_norm)

  @property
  def takes_weights(self) -> bool:
    """Not where updates are clipped: a weight would move the sensitivity."""
    return math.isinf(self.l2_clip_norm)

  def sensitivity(self, relation: _Relation) -> float:
    """Returns the L2 sensitivity of the sum, before the denominator.

    Args:
      relation: a dp_accounting.NeighboringRelation, over clients; which there
        are, `optim.clipping.sum_sensitivity` says.
    """
    return clipping.sum_sensitivity(self.l2_clip_norm, relation)

  def of(self, params: typing.Params, model: Any, weight: Any = 1.0) -> Total:
    update, norm = _update(params, model)
    counts, total = _counted(norm, weight)
    scale = total.weight
    if not self.takes_weights:
      # A weight other than 0 and 1 would move the sensitivity.
      total = total._replace(weight=jnp.where(counts, 1.0, 0.0))
      scale = jnp.where(counts, jnp.minimum(1.0, self.l2_clip_norm / norm), 0.0)
    value = jax.tree.map(lambda x: jnp.where(counts, scale * x, 0.0), update)
    return total._replace(value=value)

  def merge(self, one: Total, other: Total) -> Total:
    value = jax.tree.map(jnp.add, one.value, other.value)
    return _add(one, other)._replace(value=value)

  def join(self, total: Total, axis: str) -> Total:
    return jax.lax.psum(total, axis)

  def params(self, total: Total, params: typing.Params) -> typing.Params:
    mean = jax.tree.map(lambda x: x / self.denominator, total.value)
    return optax.apply_updates(params, mean)

  def gradient(self, total: Total, params: typing.Params) -> typing.Params:
    del params
    return jax.tree.map(lambda x: -x / self.denominator, total.value)


def _float32(x: Any) -> jax.Array:
  return jnp.asarray(x).astype(jnp.float32)


def _update(
  params: typing.Params, model: typing.Params
) -> tuple[typing.Params, jax.Array]:
  """Returns what a client changed, float32, and its L2 norm."""
  update = jax.tree.map(lambda x, y: _float32(y) - _float32(x), params, model)
  return update, optax.tree.norm(update)


def _counted(norm: jax.Array, weight: Any) -> tuple[jax.Array, Total]:
  """Returns whether a client counts, and its total without the value."""
  weight = _float32(weight)
  is_there = weight > 0
  counts = is_there & jnp.isfinite(norm)
  total = Total(
    value=(),
    weight=jnp.where(counts, weight, 0.0),
    clients=counts.astype(jnp.int32),
    failed=(is_there & ~counts).astype(jnp.int32),
    norm=jnp.where(counts, norm, 0.0),
  )
  return counts, total


def _add(one: Total, other: Total) -> Total:
  """Adds everything up but the values."""
  return jax.tree.map(jnp.add, one._replace(value=()), other._replace(value=()))


def _ratio(part: jax.Array, whole: jax.Array) -> jax.Array:
  """Returns part / whole, and 0 where there is nothing."""
  return jnp.where(whole > 0, part / jnp.where(whole > 0, whole, 1.0), 0.0)
