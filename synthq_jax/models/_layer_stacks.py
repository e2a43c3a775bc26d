"""Runs a stack of layers: one after the other, or as one loop; recomputed."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import linen as nn

from synthq_jax.models import t5_config

__all__ = ["run"]


def run(
  apply: Callable[[Any, jax.Array], jax.Array],
  layers: Sequence[nn.Module] | nn.Module,
  x: jax.Array,
  config: t5_config.T5Config,
  *,
  length: int,
) -> jax.Array:
  """Returns what the last layer makes of `x`.

  Args:
    apply: from a layer and its input to its output.
    layers: all of them, or the one whose parameters are stacked where
      `config.scan_layers`.
    x: the input of the first layer.
    config: whether layers are scanned, and computed again on the way back.
    length: how many layers there are.
  """
  if config.remat:
    apply = nn.remat(apply, prevent_cse=not config.scan_layers)
  if not config.scan_layers:
    for layer in layers:
      x = apply(layer, x)
    return x
  loop = nn.scan(
    lambda layer, x: (apply(layer, x), None),
    variable_axes={"params": 0, "lora": 0},
    split_rngs={"params": True, "dropout": True},
    length=length,
  )
  return loop(layers, x)[0]
