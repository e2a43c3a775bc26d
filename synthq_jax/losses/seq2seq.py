"""Cross-entropy of target sequences, one loss per example."""

from typing import Literal

import jax
import jax.numpy as jnp

__all__ = ["PADDING_ID", "cross_entropy"]

PADDING_ID = 0
"""The token that fills up sequences; it is never a target."""


def cross_entropy(
  logits: jax.Array,  # [batch, length, vocab]
  targets: jax.Array,  # [batch, length]
  weights: jax.Array | None = None,  # [batch, length]
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
    weights: factor for each target token [batch, length], or None for ones.
    normalization: "mean" divides by the sum of the example's own weights over
      its target tokens (its number of target tokens by default), at least 1;
      "sum" does not divide.

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
  if normalization not in ("mean", "sum"):
    raise ValueError(
      f"expected normalization 'mean' or 'sum', got {normalization=}"
    )
  counted = (targets != PADDING_ID).astype(jnp.float32)  # [batch, length]
  if weights is not None:
    if weights.shape != targets.shape:
      raise ValueError(
        f"expected weights of shape {targets.shape}, got shape="
        f"{weights.shape}: give one weight for each target token"
      )
    counted *= weights.astype(jnp.float32)
  logits = logits.astype(jnp.float32)
  # Not log_softmax: it writes [batch, length, vocab] once more, which doubles
  # the time of a small model's gradient on CPU. Not a lookup of the targets'
  # logits: its gradient is a scatter into two more such arrays on TPU.
  ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2)
  is_target = ids == targets[..., None]
  chosen = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
  known = (targets >= 0) & (targets < logits.shape[-1])
  chosen = jnp.where(known, chosen, jnp.nan)
  nll = jax.nn.logsumexp(logits, axis=-1) - chosen  # [batch, length]
  losses = jnp.sum(nll * counted, axis=1)
  if normalization == "sum":
    return losses
  return losses / jnp.maximum(jnp.sum(counted, axis=1), 1.0)
