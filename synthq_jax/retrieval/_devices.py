"""Meshes of one axis over the devices of this process."""

from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["mesh", "replicate"]

_Tree = TypeVar("_Tree")


def mesh(devices: Sequence[jax.Device] | None, axis: str) -> jax.sharding.Mesh:
  """Lines the devices up, or JAX's default one if none are given."""
  if devices is None:
    devices = list(jnp.zeros(()).devices())
  if not len(devices):
    raise ValueError(
      "expected devices, got none; pass jax.local_devices(), or leave it out"
    )
  return jax.sharding.Mesh(np.array(devices), (axis,))


def replicate(arrays: _Tree, mesh: jax.sharding.Mesh) -> _Tree:
  """Puts a copy on every device."""
  return jax.device_put(
    arrays, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  )
