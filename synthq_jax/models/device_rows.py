"""Splits rows over the devices of this process, each of which works on its
own."""

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

__all__ = [
  "CPU_ROWS",
  "CPU_TOKENS",
  "count_cores",
  "mesh",
  "replicate",
  "split",
]

CPU_ROWS = 16
"""Rows of a batch of a frozen T5's layers that fits a CPU's caches."""
CPU_TOKENS = 512
"""Rows times width of a batch that fits the cache of one core; a longer row is a
batch of its own."""

_Tree = TypeVar("_Tree")


def count_cores() -> int:
  """Counts the CPU cores that this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def mesh(devices: Sequence[jax.Device] | None) -> jax.sharding.Mesh:
  """Makes a mesh of one axis, "batch", from devices; None: JAX's default
  device."""
  if devices is None:
    devices = list(jnp.zeros(()).devices())
  if not len(devices):
    raise ValueError(
      "expected devices, got none; pass jax.local_devices(), or leave it out"
    )
  return jax.sharding.Mesh(np.array(devices), ("batch",))


def replicate(arrays: _Tree, mesh: jax.sharding.Mesh) -> _Tree:
  """Copies arrays to every device."""
  return jax.device_put(
    arrays, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  )


def split(
  apply: Callable[..., Any], mesh: jax.sharding.Mesh, *, num_replicated: int
) -> Callable[..., Any]:
  """Makes every device apply a function to its own rows, as if it were alone.

  Args:
    apply: returns arrays with a row for each row of its last arguments.
    mesh: a mesh from `mesh`; with a single device, `apply` itself is returned.
    num_replicated: number of first arguments that every device gets as a whole.

  Returns:
    A function with the arguments of `apply`, for `jax.jit`.
  """
  if mesh.size == 1:
    return apply
  part = jax.sharding.PartitionSpec
  rows = part(*mesh.axis_names)

  def on_devices(*arguments: Any) -> Any:
    return jax.shard_map(
      apply,
      mesh=mesh,
      in_specs=(
        *[part()] * num_replicated,
        *[rows] * (len(arguments) - num_replicated),
      ),
      out_specs=rows,
      check_vma=False,  # devices do not communicate
    )(*arguments)

  return on_devices
