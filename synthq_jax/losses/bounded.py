"""A contrastive loss of one's own, with bounds that its author declares."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from synthq_jax.losses import pairs
from synthq_jax.privacy import sensitivity

__all__ = ["Bounded"]

_TRIALS = 256
_LARGEST = 16  # pairs of a batch that is tried, beside the declared number
_MOST_ENTRIES = 1 << 22  # of the matrices that are tried at once
_SLACK = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounded(pairs.PairLoss):
  """Any loss of similarities, whose sensitivity follows from declared bounds.

  The gradient of a coupled loss is the sum of w_ij times the gradient of
  similarity (i, j), where w_ij is the derivative of the summed losses. Clipped
  to norm B, a gradient moves the sum by B for each unit that its weight moves.
  So one pair moves it by at most B (pair_weights + others_change): its own
  weights come or go, those of all other entries change.

  Formal guarantee:
    That of `privacy.sensitivity.bounded`, for unit "pair", and for "query" where
    its bounds are declared; under ADD_OR_REMOVE_ONE and REPLACE_SPECIAL, and
    twice that under REPLACE_ONE. IF the bounds hold, for all similarities in the
    range, all masks and all batches of at most `max_batch_size` pairs. They are
    the author's, to be derived as docs/sensitivities.md does. `check` looks for
    matrices that break them, and `contrastive_clipped_grad` calls it: what it
    finds is refused; what it does not find is no proof.

  >>> import jax.numpy as jnp
  >>> def hinge(similarity, is_padding_example, is_duplicate):
  ...   no_negative = is_padding_example[None, :] | is_duplicate
  ...   no_negative |= jnp.eye(len(similarity), dtype=bool)
  ...   gap = similarity - jnp.diagonal(similarity)[:, None] + 0.2
  ...   cost = jnp.where(no_negative, 0.0, jnp.maximum(gap, 0.0))
  ...   return cost.sum(axis=1) / 7  # not the realised number
  >>> loss = Bounded(losses_fn=hinge, max_batch_size=8, pair_weights=3.0,
  ...                others_change=1.0)
  >>> loss.check()
  >>> loss.sensitivity(max_batch_size=8, l2_clip_norm=0.5,
  ...                  relation="ADD_OR_REMOVE_ONE", unit="pair")
  2.0

  Attributes:
    losses_fn: `(similarity [batch, batch * (1 + hard)], is_padding_example
      [batch], is_duplicate [batch, batch * (1 + hard)])` to losses [batch]. What
      is padding must neither be a row nor a column; rows are in no order.
    max_batch_size: the most pairs for which the bounds hold, at least 2.
    pair_weights: bounds the sum of `|w_ij|` over the row and the columns of any
      pair.
    others_change: bounds the sum of `|w_ij - w'_ij|` over all other entries, where
      w' are the weights without that pair.
    query_weights: bounds the sum of `|w_ij|` over the row of any query; None: the
      unit "query" is refused.
    query_change: bounds the change of all other rows where the similarities of
      one query become those of an empty one, which are 0.
  """

  losses_fn: Callable[..., jax.Array]
  pair_weights: float
  others_change: float
  query_weights: float | None = None
  query_change: float = 0.0

  _sensitivity = staticmethod(sensitivity.bounded)

  def _losses(self, similarity, is_padding_example, is_duplicate):
    if is_padding_example is None:
      is_padding_example = jnp.zeros(len(similarity), bool)
    if is_duplicate is None:
      is_duplicate = jnp.zeros(similarity.shape, bool)
    losses = self.losses_fn(
      similarity.astype(jnp.float32), is_padding_example, is_duplicate
    )
    if jnp.shape(losses) != (len(similarity),):
      raise ValueError(
        f"expected losses of shape ({len(similarity)},) of losses_fn, got"
        f" shape={jnp.shape(losses)}: one for each pair"
      )
    return pairs.without_padding(losses, is_padding_example)

  def _declared(self) -> dict[str, Any]:
    query = self.query_weights, self.query_change
    return {
      "declared_batch_size": self.max_batch_size,
      "pair": (self.pair_weights, self.others_change),
      "query": None if self.query_weights is None else query,
    }

  def check(self, *, seed: int = 0) -> None:
    """Refuses bounds that a matrix breaks.

    Tries similarities at the ends of their range and within it, for batches of
    2, 3, up to 16 and the declared number of pairs, with padding and duplicates;
    the pair that goes is the first.

    Args:
      seed: of the matrices.

    Raises:
      ValueError: naming the bound and what was found, or if the rows' order, or
        what padding holds, matters.
    """
    sizes = {2, 3, min(self.max_batch_size, _LARGEST), self.max_batch_size}
    for size in sorted(s for s in sizes if s <= self.max_batch_size):
      for name, most in self._found(size, seed).items():
        declared = getattr(self, name, 0.0)
        if declared is not None and most > declared * (1 + _SLACK) + _SLACK:
          raise ValueError(
            f"expected {name} <= {declared}, got {most:.6g} for a batch of"
            f" {size}: derive its bound, or change losses_fn"
          )

  def _found(self, size: int, seed: int) -> dict[str, float]:
    """Returns the largest values that some matrices give."""
    random = np.random.default_rng([seed, size])
    columns = size * (1 + self.hard_negatives)
    low, high = self.similarity_range
    trials = max(4, min(_TRIALS, _MOST_ENTRIES // (size * columns)))
    share = random.uniform(size=(trials, 1, 1))
    matrices = random.uniform(size=(trials, size, columns))
    matrices[: trials // 2] = matrices[: trials // 2] < share[: trials // 2]
    first = np.arange(columns) % size == 0
    if self.hard_negatives:
      of_pair = (np.arange(columns - size) // self.hard_negatives) == 0
      first[size:] = of_pair
    # What derivations end with: all low or high but the pair's row and columns.
    for place, (rest, own, corner) in enumerate(np.ndindex(2, 2, 2)):
      one = np.full((size, columns), float(rest))
      one[0], one[:, first], one[0, 0] = own, own, corner
      matrices[place % trials] = one
    similarity = jnp.asarray(low + (high - low) * matrices, jnp.float32)
    padding = np.zeros((trials, size), bool)
    padding[1::4] = random.uniform(size=padding[1::4].shape) < 0.3
    padding[:, 0] = False
    duplicate = np.zeros(matrices.shape, bool)
    duplicate[2::4] = random.uniform(size=duplicate[2::4].shape) < 0.2
    duplicate &= ~np.eye(size, columns, dtype=bool)
    values = jax.jit(jax.vmap(functools.partial(_moved, self, first)))(
      similarity, jnp.asarray(padding), jnp.asarray(duplicate)
    )
    return {name: float(jnp.max(x)) for name, x in values.items()}


def _moved(
  loss: Bounded,
  first: np.ndarray,  # bool [columns]
  similarity: jax.Array,  # [batch, columns]
  padding: jax.Array,  # [batch]
  duplicate: jax.Array,  # [batch, columns]
) -> dict[str, jax.Array]:
  """Returns what one matrix shows when its first pair goes, by bound."""
  size = len(similarity)

  def weights(similarity, padding, duplicate):
    found = loss.weights(
      similarity, is_padding_example=padding, is_duplicate=duplicate
    )
    # What is not finite breaks any bound.
    return jnp.where(jnp.isfinite(found), found, jnp.inf)

  before = weights(similarity, padding, duplicate)
  without = weights(similarity, padding.at[0].set(True), duplicate)
  own = jnp.zeros(similarity.shape, bool).at[0].set(True) | first[None, :]
  gone = weights(similarity.at[0].set(0.0), padding, duplicate)
  order = np.arange(size)[::-1]
  hard = (size + order[:, None] * loss.hard_negatives) + np.arange(
    loss.hard_negatives
  )
  places = np.concatenate([order, hard.reshape(-1).astype(int)])
  turned = weights(
    similarity[order][:, places],
    padding[order],
    duplicate[order][:, places],
  )
  columns = pairs.padding_columns(padding, loss.hard_negatives)
  outside = padding[:, None] | columns[None, :]
  return {
    "pair_weights": jnp.sum(jnp.where(own, jnp.abs(before), 0.0)),
    "others_change": jnp.sum(jnp.where(own, 0.0, jnp.abs(before - without))),
    "query_weights": jnp.sum(jnp.abs(before[0])),
    "query_change": jnp.where(
      loss.query_weights is None,
      0.0,
      jnp.sum(jnp.abs(before - gone)[1:]),
    ),
    "weights of padding": jnp.sum(jnp.where(outside, jnp.abs(before), 0.0)),
    "change with the rows' order": jnp.max(
      jnp.abs(turned - before[order][:, places])
    ),
  }
