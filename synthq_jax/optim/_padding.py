"""Which rows of a batch are padding: said by the caller, by the batch, or both."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from synthq_jax import typing
from synthq_jax.privacy import sampling

__all__ = ["split"]


def split(
  batch: typing.Batch, is_padding_example: jax.Array | None
) -> tuple[typing.Batch, jax.Array | None]:
  """Takes the mask out of a batch that a sampler has made.

  Args:
    batch: arrays with a leading axis [batch].
    is_padding_example: bool [batch], or None.

  Returns:
    The batch without its mask, and which rows either of the two calls padding;
    None where neither says anything.

  Raises:
    ValueError: if the two have different shapes.
  """
  if not isinstance(batch, Mapping) or sampling.IS_PADDING not in batch:
    return batch, is_padding_example
  own = jnp.asarray(batch[sampling.IS_PADDING], bool)
  rest = {name: x for name, x in batch.items() if name != sampling.IS_PADDING}
  if is_padding_example is None:
    return rest, own
  if jnp.shape(is_padding_example) != own.shape:
    raise ValueError(
      f"expected is_padding_example of shape {own.shape}, got shape="
      f"{jnp.shape(is_padding_example)}: one flag for each example"
    )
  return rest, own | jnp.asarray(is_padding_example, bool)
