"""Trains low-rank additions to frozen kernels (LoRA).

The forward pass computes x W + scale (x A) B and never W + scale A B. So
per-example clipping sees products of A and B with activations and keeps their
gradients in factors. `LoRA.merge` adds the product to the kernels after
training. The result is a plain checkpoint.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from synthq_jax import checks

__all__ = ["LoRA"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRA:
  """Initializes, applies and merges low-rank additions to some kernels.

  Noise on a sum of clipped gradients grows with the square root of the number
  of trained parameters: rank x (inputs + outputs) for each kernel.

  References:
    Hu et al. 2021, arXiv:2106.09685, section 4.1; under DP: Yu et al. 2022,
    arXiv:2110.06500.
  """

  rank: int = 8
  """Rank of the addition: columns of A, rows of B."""
  alpha: float = 16.0
  """Scale of the addition, which is alpha / rank times A B."""
  kernels: str = ".*attention/(query|value)/kernel"
  """Regular expression that the paths of the kernels match in full."""

  def __post_init__(self):
    checks.at_least(1, rank=self.rank)
    checks.within("(0, inf)", alpha=self.alpha)

  def init(
    self, params: Mapping[str, Any], key: Key[Array, ""]
  ) -> dict[str, Float[Array, "..."]]:
    """Initializes A (normal) and B (zero), so that the addition starts as zero.

    Args:
      params: the public parameters by path, e.g. from `t5_checkpoints.flatten`.
      key: key of A; public.

    Returns:
      Parameters by path: ".../query/a" [inputs, rank], ".../query/b"
      [rank, outputs].

    Raises:
      ValueError: if no kernel matches.
    """
    adapters = {}
    for number, path in enumerate(sorted(self._find_kernels(params))):
      inputs, outputs = params[path].shape
      module = path.removesuffix("kernel")
      noise = jax.random.normal(
        jax.random.fold_in(key, number), (inputs, self.rank)
      )
      adapters[module + "a"] = noise / math.sqrt(inputs)
      adapters[module + "b"] = jnp.zeros((self.rank, outputs))
    return adapters

  def variables(self, adapters: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the model's collection of variables, by path.

    Args:
      adapters: parameters from `init`, trained or not, possibly stacked over layers.

    Returns:
      {"lora": A, B and the scale by path}.
    """
    scale = self.alpha / self.rank
    collection = dict(adapters)
    for path, leaf in adapters.items():
      if path.endswith("/a"):
        collection[path[:-1] + "scale"] = jnp.full(leaf.shape[:-2], scale)
    return {"lora": collection}

  def merge(
    self, params: Mapping[str, Any], adapters: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Adds the additions to the kernels of the public parameters.

    Args:
      params: public parameters by path.
      adapters: trained adapters, with each layer by itself.

    Returns:
      Parameters by path, of the shapes of `params`.
    """
    merged = dict(params)
    for path in adapters:
      if path.endswith("/a"):
        a, b = (np.asarray(adapters[path[:-1] + name], np.float64)
                for name in "ab")  # fmt: skip
        kernel = params[path[:-1] + "kernel"]
        total = np.asarray(kernel) + self.alpha / self.rank * (a @ b)
        merged[path[:-1] + "kernel"] = total.astype(kernel.dtype)
    return merged

  def _find_kernels(self, params: Mapping[str, Any]) -> list[str]:
    matches = [path for path in params if re.fullmatch(self.kernels, path)]
    wrong = [path for path in matches if not path.endswith("/kernel")]
    if not matches or wrong:
      kernels = sorted(path for path in params if path.endswith("/kernel"))
      raise ValueError(
        f"LoRA.kernels must match kernels, got kernels={self.kernels!r} and"
        f" {wrong[0] if wrong else 'no match'}; there are"
        f" {', '.join(kernels[:3])}, ..."
      )
    return matches
