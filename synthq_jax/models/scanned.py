"""Stacks the parameters of layers for a loop over them, and unstacks them.

T5X's tree, which checkpoints and optimizers see, has every layer by itself. A
loop over layers (`T5Config.scan_layers`) compiles in the time of one layer and
takes each parameter with an axis of layers. `ScannedGrad` clips gradients in
that form and returns them in T5X's form, so that noise, optimizer and checkpoints
are the same either way.

Formal guarantee:
  Stacking moves values and changes none, so norms over all leaves, and with
  them the clipped sum and its sensitivity, are those of the unstacked form.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from synthq_jax import optim, typing
from synthq_jax.optim import clipping

__all__ = ["ScannedGrad", "stack", "unstack"]

_LAYER = re.compile(r"(?P<before>(?:.*/)?)layers_(?P<number>\d+)/(?P<after>.+)")


def stack(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Stacks each parameter over the layers of its stack.

  Args:
    flat: arrays by path, e.g. "encoder/layers_3/mlp/wo/kernel".

  Returns:
    Arrays by path, "encoder/layers/mlp/wo/kernel" with a leading axis of
    layers; parameters outside layers stay as they are.

  Raises:
    ValueError: if a layer lacks a parameter that another has.

  >>> {k: v.shape for k, v in stack({"e/layers_0/w": jnp.ones(3)}).items()}
  {'e/layers/w': (1, 3)}
  """
  stacked: dict[str, Any] = {}
  layers: dict[str, dict[int, Any]] = {}
  for path, leaf in flat.items():
    match = _LAYER.fullmatch(path)
    if match is None:
      stacked[path] = leaf
    else:
      joined = f"{match['before']}layers/{match['after']}"
      layers.setdefault(joined, {})[int(match["number"])] = leaf
  for path, leaves in layers.items():
    count = max(len(each) for each in _list_stack(path, layers))
    missing = sorted(set(range(count)) - set(leaves))
    if missing or len(leaves) != count:
      raise ValueError(
        f"expected {path} in each of {count} layers to loop over them, got"
        f" none in layer {missing}: train all layers alike, or set"
        " scan_layers=False"
      )
    stacked[path] = jnp.stack([leaves[number] for number in range(count)])
  return stacked


def _list_stack(path: str, layers: Mapping[str, Any]) -> list[Any]:
  """Returns the leaves by layer of each parameter of the same stack."""
  prefix = path[: path.index("layers/")]
  return [
    leaves for other, leaves in layers.items() if other.startswith(prefix)
  ]


def unstack(stacked: Mapping[str, Any]) -> dict[str, Any]:
  """Splits stacked parameters into layers: the inverse of `stack`.

  >>> sorted(unstack({"e/layers/w": jnp.ones((2, 3))}))
  ['e/layers_0/w', 'e/layers_1/w']
  """
  flat: dict[str, Any] = {}
  for path, leaf in stacked.items():
    before, separator, after = path.partition("layers/")
    if not separator:
      flat[path] = leaf
    else:
      for number in range(leaf.shape[0]):
        flat[f"{before}layers_{number}/{after}"] = leaf[number]
  return flat


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScannedGrad:
  """Clips gradients in the stacked form and returns them layer by layer."""

  stacked: optim.ClippedGrad
  """The gradient of a loss that takes stacked parameters by path."""
  is_per_example = True

  @property
  def l2_clip_norm(self) -> float:
    """Returns the largest norm that one example contributes."""
    return self.stacked.l2_clip_norm

  def loss_fn(self, params: typing.Params, *args: Any) -> jax.Array:
    """Computes the losses [batch] for parameters layer by layer."""
    return self.stacked.loss_fn(stack(params), *args)

  def __call__(
    self, params: typing.Params, batch: typing.Batch, **kwargs: Any
  ) -> tuple[typing.Params, clipping.Aux]:
    """Computes the clipped sum, layer by layer; see `optim.clipped_grad`."""
    total, aux = self.stacked(stack(params), batch, **kwargs)
    return unstack(total), aux

  def sensitivity(self, relation: Any) -> float:
    """Returns the L2 sensitivity of the sum, which equals the stacked
    form's."""
    return self.stacked.sensitivity(relation)
