"""Base class of losses of pairs, and helpers for columns, masks and padding."""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

__all__ = [
  "PairLoss",
  "check_shape",
  "make_drop_mask",
  "repeat_padding",
  "zero_padding",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairLoss(abc.ABC):
  """Base of a loss whose pair gradients are clipped, weighted and summed."""

  max_batch_size: int | None
  """Declared largest batch in pairs, at least 2; None: not declared."""
  hard_negatives: int = 0
  """h, the number of hard negatives of each pair. Column batch + i * h + k is
  the k-th of row i. Mark a missing hard negative as a duplicate in every
  row."""
  similarity_range: tuple[float, float] = (-1.0, 1.0)
  """(low, high), to which `weights` clips similarities."""

  def __post_init__(self):
    """Raises ValueError for values that have no sensitivity."""
    _check_declared(2, self.max_batch_size)
    self.sensitivity(
      max_batch_size=2, l2_clip_norm=1.0, relation="REPLACE_ONE", unit="pair"
    )

  def losses(
    self,
    similarity: jax.Array,  # [batch, batch * (1 + hard)]
    *,
    is_padding_example: jax.Array | None = None,  # [batch]
    is_duplicate: jax.Array | None = None,  # [batch, batch * (1 + hard)]
  ) -> jax.Array:  # [batch]
    """Returns each pair's loss, summed over directions; 0 for padding.

    Args:
      similarity: [batch, batch * (1 + hard)].
      is_padding_example: bool [batch].
      is_duplicate: bool [batch, batch * (1 + hard)]; True where another
        column's document equals the row's own.
    """
    _check_hard_negatives(similarity, self.hard_negatives)
    _check_declared(len(similarity), self.max_batch_size)
    return self._losses(similarity, is_padding_example, is_duplicate)

  @abc.abstractmethod
  def _losses(self, similarity, is_padding_example, is_duplicate) -> jax.Array:
    """Computes `losses` after the shapes are checked."""

  def weights(
    self,
    similarity: jax.Array,  # [batch, batch * (1 + hard)]
    **masks: jax.Array | None,
  ) -> jax.Array:  # [batch, batch * (1 + hard)]
    """Returns d sum(losses) / d similarity, bounded for every input.

    The derivative is taken at the similarities clipped to `similarity_range`.
    NaN counts as the least similarity and gets weight 0, like a duplicate.

    Args:
      similarity: [batch, batch * (1 + hard)].
      **masks: as in `losses`.
    """
    low, high = self.similarity_range
    unknown = jnp.isnan(similarity)
    inside = jnp.clip(similarity.astype(jnp.float32), low, high)
    inside = jax.lax.stop_gradient(jnp.where(unknown, low, inside))
    weights = jax.grad(lambda s: jnp.sum(self.losses(s, **masks)))(inside)
    return jnp.where(unknown, 0.0, weights)

  def sensitivity(
    self,
    *,
    max_batch_size: float,
    l2_clip_norm: float,
    relation: Any,
    unit: str,
  ) -> float:
    """Returns the L2 sensitivity that `privacy.sensitivity` has for this loss."""
    return self._sensitivity(
      max_batch_size=max_batch_size,
      l2_clip_norm=l2_clip_norm,
      relation=relation,
      unit=unit,
      **self._declared(),
    )

  def _declared(self) -> dict[str, Any]:
    """Returns the loss's fields as keyword arguments of `_sensitivity`."""
    fields = dataclasses.asdict(self)
    if "max_batch_size" in fields:
      fields["declared_batch_size"] = fields.pop("max_batch_size")
    return fields


def _check_hard_negatives(similarity: jax.Array, declared: int) -> None:
  if _count_hard_negatives(similarity) != declared:
    raise ValueError(
      f"expected similarity [batch, {1 + declared} * batch] for hard_negatives="
      f"{declared}, got shape={similarity.shape}: declare the batch's number, on"
      " which the noise depends"
    )


def check_shape(similarity: jax.Array) -> tuple[int, int]:
  """Returns (rows, columns); raises ValueError if a row has no own column."""
  if similarity.ndim != 2 or similarity.shape[1] < similarity.shape[0]:
    raise ValueError(
      "expected similarity [batch, batch + hard], got shape="
      f"{similarity.shape}: give every query a column for its own document"
    )
  return similarity.shape


def _check_declared(batch: int, max_batch_size: int | None) -> None:
  """Raises ValueError unless a batch has at most the declared size."""
  if max_batch_size is not None and max_batch_size < max(batch, 2):
    raise ValueError(
      f"expected max_batch_size of at least {max(batch, 2)} (2, and the rows of"
      f" similarity), got {max_batch_size=}"
    )


def _count_hard_negatives(similarity: jax.Array) -> int:
  """Returns the number of hard negatives of each row, equal for all rows."""
  batch, documents = check_shape(similarity)
  each, rest = divmod(documents - batch, max(batch, 1))
  if rest:
    raise ValueError(
      "expected as many hard negatives for each row, got shape="
      f"{similarity.shape}: fill up rows, and mark the filling as duplicates"
    )
  return each


def repeat_padding(
  is_padding_example: jax.Array,  # [batch]
  hard: int,
) -> jax.Array:  # [batch * (1 + hard)]
  """Repeats the mask of padding pairs for all columns, hard negatives too."""
  return jnp.concatenate(
    [is_padding_example, jnp.repeat(is_padding_example, hard)]
  )


def make_drop_mask(
  similarity: jax.Array,  # [batch, batch * (1 + hard)]
  is_padding_example: jax.Array | None,  # [batch]
  is_duplicate: jax.Array | None,  # [batch, batch * (1 + hard)]
) -> jax.Array:  # [batch, batch * (1 + hard)]
  """Masks the entries that are no negatives: own documents, padding, duplicates."""
  mask = jnp.eye(*similarity.shape, dtype=bool)
  if is_padding_example is not None:
    hard = _count_hard_negatives(similarity)
    mask |= repeat_padding(is_padding_example, hard)[None, :]
  if is_duplicate is not None:
    mask |= is_duplicate
  return mask


def zero_padding(
  losses: jax.Array,  # [batch]
  is_padding_example: jax.Array | None,  # [batch]
) -> jax.Array:  # [batch]
  """Sets the losses of padding to 0."""
  if is_padding_example is None:
    return losses
  return jnp.where(is_padding_example, 0.0, losses)
