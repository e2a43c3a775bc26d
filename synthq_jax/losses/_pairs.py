"""Columns, masks and weights of pairs in a matrix of similarities."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

__all__ = [
  "check_declared",
  "check_hard_negatives",
  "check_shape",
  "check_temperature",
  "derivative",
  "dropped",
  "hard_negatives",
  "padding_columns",
  "weights",
  "without_padding",
]


def check_shape(similarity: jax.Array) -> tuple[int, int]:
  """Returns the numbers of queries and documents."""
  if similarity.ndim != 2 or similarity.shape[1] < similarity.shape[0]:
    raise ValueError(
      "expected similarity [batch, batch + hard], got shape="
      f"{similarity.shape}: give every query a column for its own document"
    )
  return similarity.shape


def check_temperature(temperature: float) -> None:
  """Raises ValueError unless it is above 0."""
  if not temperature > 0:
    raise ValueError(f"expected temperature > 0, got {temperature=}")


def check_declared(batch: int, max_batch_size: int) -> None:
  """Raises ValueError unless the declared batch holds the real one."""
  if max_batch_size < max(batch, 2):
    raise ValueError(
      f"expected max_batch_size of at least {max(batch, 2)}, the rows of "
      f"similarity and two, got {max_batch_size=}"
    )


def hard_negatives(similarity: jax.Array) -> int:
  """Returns how many hard negatives each row brings, the same for all."""
  batch, documents = check_shape(similarity)
  each, rest = divmod(documents - batch, max(batch, 1))
  if rest:
    raise ValueError(
      "expected as many hard negatives for each row, got shape="
      f"{similarity.shape}: fill up, and mark what is missing as a duplicate"
    )
  return each


def check_hard_negatives(similarity: jax.Array, declared: int) -> None:
  """Raises ValueError unless each row brings the declared number."""
  if hard_negatives(similarity) != declared:
    raise ValueError(
      f"expected similarity [batch, {1 + declared} * batch] for hard_negatives="
      f"{declared}, got shape={similarity.shape}: the noise depends on it"
    )


def padding_columns(
  is_padding_example: jax.Array,  # [batch]
  hard: int,
) -> jax.Array:  # [batch * (1 + hard)]
  """Returns which columns belong to padding, as documents or hard negatives."""
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
    hard = hard_negatives(similarity)
    mask |= padding_columns(is_padding_example, hard)[None, :]
  if is_duplicate is not None:
    mask |= is_duplicate
  return mask


def without_padding(
  losses: jax.Array,  # [batch]
  is_padding_example: jax.Array | None,  # [batch]
) -> jax.Array:  # [batch]
  """Returns the losses with 0 for padding."""
  if is_padding_example is None:
    return losses
  return jnp.where(is_padding_example, 0.0, losses)


def derivative(
  losses: Callable[[jax.Array], jax.Array],
  similarity: jax.Array,  # [batch, documents]
  similarity_range: tuple[float, float],
) -> jax.Array:  # [batch, documents]
  """Returns d sum(losses) / d similarity, wherever similarities may be.

  The derivative is taken at the similarity brought into its range, so that its
  entries are bounded whatever came in. NaN counts as the least similarity and
  gets weight 0, like a duplicate.
  """
  low, high = similarity_range
  unknown = jnp.isnan(similarity)
  inside = jnp.clip(similarity.astype(jnp.float32), low, high)
  inside = jax.lax.stop_gradient(jnp.where(unknown, low, inside))
  weights = jax.grad(lambda s: jnp.sum(losses(s)))(inside)
  return jnp.where(unknown, 0.0, weights)


def weights(
  loss: Any,
  similarity: jax.Array,  # [batch, documents]
  is_padding_example: jax.Array | None,  # [batch]
  is_duplicate: jax.Array | None,  # [batch, documents]
) -> jax.Array:  # [batch, documents]
  """Returns d sum(loss.losses) / d similarity; see `derivative`."""
  losses = functools.partial(
    loss.losses,
    is_padding_example=is_padding_example,
    is_duplicate=is_duplicate,
  )
  return derivative(losses, similarity, loss.similarity_range)
