"""Types that every package shares: parameters, batches, loss functions."""

from collections.abc import Mapping
from typing import Any, Protocol

import jax

__all__ = ["Batch", "Clipped", "EncodeFn", "Params"]

Params = Any
"""A pytree of arrays."""

Batch = Mapping[str, jax.Array]
"""Arrays that all have the same leading axis, the examples."""

Clipped = tuple[Params, jax.Array, jax.Array]
"""A clipped sum (float32), and losses and norms of what was clipped."""


class EncodeFn(Protocol):
  """An encoder of token sequences."""

  def __call__(self, params: Params, tokens: jax.Array, /) -> jax.Array:
    """Returns one vector per row of `tokens`, shape [batch, dim]."""
