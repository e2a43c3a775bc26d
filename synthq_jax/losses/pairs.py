"""Losses of pairs: their base, columns, masks and padding."""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

__all__ = [
  "PairLoss",
  "check_shape",
  "dropped",
  "padding_columns",
  "without_padding",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairLoss(abc.ABC):
  """A loss whose gradients of pairs are clipped, weighted and summed."""

  max_batch_size: int | None
  """The declared largest batch, at least 2; None: none is declared."""
  hard_negatives: int = 0
  """h, how many columns each pair adds beside its document; column batch + i * h
  + k is the k-th of row i. One that is missing is marked as a duplicate in every
  row."""
  similarity_range: tuple[float, float] = (-1.0, 1.0)
  """(low, high), into which `weights` brings similarities."""

  def __post_init__(self):
    """Refuses values that its sensitivity refuses."""
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
    """Returns each pair's loss, of all its directions; 0 for padding.

    Args:
      similarity: [batch, batch * (1 + hard)].
      is_padding_example: bool [batch].
      is_duplicate: bool [batch, batch * (1 + hard)]; True where a column's
        document equals the row's own, beside that column itself.
    """
    _check_hard_negatives(similarity, self.hard_negatives)
    _check_declared(len(similarity), self.max_batch_size)
    return self._losses(similarity, is_padding_example, is_duplicate)

  @abc.abstractmethod
  def _losses(self, similarity, is_padding_example, is_duplicate) -> jax.Array:
    """Returns `losses`, the shapes being checked."""

  def weights(
    self,
    similarity: jax.Array,  # [batch, batch * (1 + hard)]
    **masks: jax.Array | None,
  ) -> jax.Array:  # [batch, batch * (1 + hard)]
    """Returns d sum(losses) / d similarity, wherever similarities may be.

    The derivative is taken at the similarity brought into its range, so that
    its entries are bounded whatever came in. NaN counts as the least similarity
    and gets weight 0, like a duplicate.

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
    """Returns what `privacy.sensitivity` has for this loss."""
    return self._sensitivity(
      max_batch_size=max_batch_size,
      l2_clip_norm=l2_clip_norm,
      relation=relation,
      unit=unit,
      **self._declared(),
    )

  def _declared(self) -> dict[str, Any]:
    """Returns what `_sensitivity` asks about the loss itself."""
    fields = dataclasses.asdict(self)
    if "max_batch_size" in fields:
      fields["declared_batch_size"] = fields.pop("max_batch_size")
    return fields


def _check_hard_negatives(similarity: jax.Array, declared: int) -> None:
  if _hard_negatives(similarity) != declared:
    raise ValueError(
      f"expected similarity [batch, {1 + declared} * batch] for hard_negatives="
      f"{declared}, got shape={similarity.shape}: the noise depends on it"
    )


def check_shape(similarity: jax.Array) -> tuple[int, int]:
  """Returns the numbers of rows and columns; raises ValueError if impossible."""
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
      f"expected max_batch_size of at least {max(batch, 2)}, the rows of "
      f"similarity and two, got {max_batch_size=}"
    )


def _hard_negatives(similarity: jax.Array) -> int:
  """Returns how many hard negatives each row brings, the same for all."""
  batch, documents = check_shape(similarity)
  each, rest = divmod(documents - batch, max(batch, 1))
  if rest:
    raise ValueError(
      "expected as many hard negatives for each row, got shape="
      f"{similarity.shape}: fill up, and mark what is missing as a duplicate"
    )
  return each


def padding_columns(
  is_padding_example: jax.Array,  # [batch]
  hard: int,
) -> jax.Array:  # [batch * (1 + hard)]
  """Returns which columns are padding."""
  return jnp.concatenate(
    [is_padding_example, jnp.repeat(is_padding_example, hard)]
  )


def dropped(
  similarity: jax.Array,  # [batch, batch * (1 + hard)]
  is_padding_example: jax.Array | None,  # [batch]
  is_duplicate: jax.Array | None,  # [batch, batch * (1 + hard)]
) -> jax.Array:  # [batch, batch * (1 + hard)]
  """Returns which entries are no negatives, the rows' own ones among them."""
  mask = jnp.eye(*similarity.shape, dtype=bool)
  if is_padding_example is not None:
    hard = _hard_negatives(similarity)
    mask |= padding_columns(is_padding_example, hard)[None, :]
  if is_duplicate is not None:
    mask |= is_duplicate
  return mask


def without_padding(
  losses: jax.Array,  # [batch]
  is_padding_example: jax.Array | None,  # [batch]
) -> jax.Array:  # [batch]
  """Returns losses that are 0 for padding."""
  if is_padding_example is None:
    return losses
  return jnp.where(is_padding_example, 0.0, losses)
