"""Defines types that all packages share: parameters, batches, encoders."""

from collections.abc import Mapping
from typing import Any, Protocol

import jax

__all__ = ["Batch", "Clipped", "EncodeFn", "Params"]

Params = Any
"""A pytree of arrays."""

Batch = Mapping[str, jax.Array]
"""Arrays that all have the same leading axis, the examples."""

Clipped = tuple[Params, jax.Array, jax.Array]
"""A clipped sum (float32), and the losses and norms of its examples."""


class EncodeFn(Protocol):
  """An encoder of token sequences."""

  def __call__(self, params: Params, tokens: jax.Array, /) -> jax.Array:
    """Returns one vector per row of `tokens`, shape [batch, dim]."""
