"""Cross-entropy of target sequences, one loss per example."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

__all__ = ["PADDING_ID", "cross_entropy", "cross_entropy_of_states"]

PADDING_ID = 0
"""Id of the token that pads sequences; it is never a target."""
_ROWS = 4096
"""Rows of a table that are multiplied at a time, so that logits stay in cache."""


def cross_entropy(
  logits: jax.Array,  # [batch, length, vocab]
  targets: jax.Array,  # [batch, length]
  *,
  normalization: Literal["mean", "sum"] = "mean",
) -> jax.Array:  # [batch]
  """Returns each example's cross-entropy over its target tokens, in nats.

  An example's loss depends on that example alone. In particular "mean" divides
  by its own number of target tokens and not by the batch's, which would couple
  the examples and void per-example clipping.

  >>> import jax.numpy as jnp
  >>> logits, targets = jnp.zeros((1, 3, 8)), jnp.array([[5, 2, 0]])
  >>> print(cross_entropy(logits, targets, normalization="sum") / jnp.log(8.0))
  [2.]

  Args:
    logits: [batch, length, vocab], any floating dtype; computed in float32.
    targets: ids [batch, length]; 0 is padding and does not count.
    normalization: "mean" divides by the example's own number of target tokens,
      at least 1; "sum" does not divide.

  Returns:
    float32 [batch]; 0 for an example without target tokens.

  Raises:
    ValueError: if shapes disagree or the normalization is unknown.
  """
  if logits.shape[:-1] != targets.shape or targets.ndim != 2:
    raise ValueError(
      "expected logits [batch, length, vocab] and targets [batch, length], "
      f"got shapes {logits.shape} and {targets.shape}: cut or pad one of them"
    )
  logits = logits.astype(jnp.float32)
  targets = targets.astype(jnp.int32)  # a narrow type would wrap the ids
  # Not log_softmax: it writes [batch, length, vocab] once more, which doubles
  # the time of a small model's gradient on CPU. Not a lookup of the targets'
  # logits: its gradient is a scatter into two more such arrays on TPU.
  ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2)
  is_target = ids == targets[..., None]
  chosen = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
  chosen = jnp.where(_is_known(targets, logits.shape[-1]), chosen, jnp.nan)
  nll = jax.nn.logsumexp(logits, axis=-1) - chosen  # [batch, length]
  return _normalize(nll, targets, normalization)


def cross_entropy_of_states(
  states: jax.Array,  # [batch, length, dim]
  table: jax.Array,  # [vocab, dim]
  targets: jax.Array,  # [batch, length]
) -> jax.Array:  # [batch]
  """Returns the mean `cross_entropy` of the logits states @ table.T, without writing them.

  The table is not trained. A few thousand of its rows are multiplied at a time,
  with a running maximum and sum, and the same loop computes the gradient of the
  states. This takes two products in all, as ordinary training does, and no
  array [batch, length, vocab] in memory. It also saves time: the loss of a
  small model on a CPU takes half as long.

  >>> states, table = jnp.ones((1, 2, 3)), jnp.zeros((8, 3))
  >>> print(cross_entropy_of_states(states, table, jnp.array([[5, 2]])) / jnp.log(8))
  [1.]

  Args:
    states: [batch, length, dim], any floating dtype; computed in float32.
    table: [vocab, dim], a constant.
    targets: as in `cross_entropy`.

  Returns:
    As `cross_entropy`, up to rounding.

  Raises:
    ValueError: as `cross_entropy` does, or if the table is differentiated.

  References:
    Milakov, Gimelshein: Online normalizer calculation for softmax.
    arXiv:1805.02867, algorithm 3.
  """
  shape = (*targets.shape, *table.shape[1:])
  if (targets.ndim, table.ndim) != (2, 2) or states.shape != shape:
    raise ValueError(
      "expected states [batch, length, dim], a table [vocab, dim] and targets"
      f" [batch, length], got shapes {states.shape}, {table.shape} and"
      f" {targets.shape}: cut or pad one of them"
    )
  targets = targets.astype(jnp.int32)
  nll = _compute_nll(states.astype(jnp.float32), table, targets)
  return _normalize(nll, targets, "mean")


def _is_known(targets: jax.Array, vocab_size: int) -> jax.Array:
  return (targets >= 0) & (targets < vocab_size)


def _normalize(
  nll: jax.Array, targets: jax.Array, normalization: str
) -> jax.Array:
  """Returns the sum or mean of each example's token losses, [batch]."""
  if normalization not in ("mean", "sum"):
    raise ValueError(
      f"expected normalization 'mean' or 'sum', got {normalization=}"
    )
  is_token = targets != PADDING_ID  # [batch, length]
  # An infinite loss of padding, times 0, would be NaN.
  losses = jnp.sum(jnp.where(is_token, nll, 0.0), axis=1)
  if normalization == "sum":
    return losses
  return losses / jnp.maximum(jnp.sum(is_token, axis=1), 1)


@jax.custom_vjp
def _compute_nll(
  states: jax.Array, table: jax.Array, targets: jax.Array
) -> jax.Array:
  """Returns each token's negative log likelihood, [batch, length]."""
  return _compute_token_losses(states, table, targets)[0]


def _forward(states: Any, table: Any, targets: Any) -> tuple[Any, Any]:
  if table.perturbed:
    raise ValueError(
      "expected a table that is not trained, got one that is differentiated: take"
      " cross_entropy of its logits"
    )
  nll, mean_row = _compute_token_losses(
    states.value, table.value, targets.value, with_mean=True
  )
  chosen = _take_rows(table.value, targets.value)
  return nll, mean_row - chosen


def _backward(gradient: jax.Array, cotangent: jax.Array) -> tuple[Any, ...]:
  return cotangent[..., None] * gradient, None, None


_compute_nll.defvjp(_forward, _backward, symbolic_zeros=True)


def _take_rows(table: jax.Array, targets: jax.Array) -> jax.Array:
  return jnp.take(table, targets, axis=0, mode="clip").astype(jnp.float32)


def _compute_token_losses(
  states: jax.Array,
  table: jax.Array,
  targets: jax.Array,
  *,
  with_mean: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
  """Returns token losses and, with `with_mean`, the softmax's mean of the rows."""
  vocab_size = table.shape[0]
  block = min(_ROWS, vocab_size)

  def read(carry: Any, first: jax.Array) -> tuple[Any, None]:
    largest, total, mean = carry
    start = jnp.minimum(first, vocab_size - block)
    rows = jax.lax.dynamic_slice_in_dim(table, start, block)
    rows = rows.astype(jnp.float32)
    logits = states @ rows.T  # [batch, length, block]
    if vocab_size % block:  # the last block overlaps the one before it
      row_ids = start + jax.lax.broadcasted_iota(int, logits.shape, 2)
      logits = jnp.where(row_ids >= first, logits, -jnp.inf)
    new = jnp.maximum(largest, jnp.max(logits, axis=-1))
    shrunk = jnp.exp(largest - new)
    parts = jnp.exp(logits - new[..., None])
    total = total * shrunk + jnp.sum(parts, axis=-1)
    if with_mean:
      mean = mean * shrunk[..., None] + parts @ rows
    return (new, total, mean), None

  tokens = states.shape[:-1]
  start = (
    jnp.full(tokens, -jnp.inf),
    jnp.zeros(tokens),
    jnp.zeros(states.shape) if with_mean else None,
  )
  firsts = jnp.arange(0, vocab_size, block)
  (largest, total, mean), _ = jax.lax.scan(read, start, firsts)
  chosen = jnp.sum(states * _take_rows(table, targets), axis=-1)
  chosen = jnp.where(_is_known(targets, vocab_size), chosen, jnp.nan)
  nll = largest + jnp.log(total) - chosen
  return nll, mean / total[..., None] if with_mean else None
