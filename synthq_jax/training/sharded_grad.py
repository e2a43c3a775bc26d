"""Clipped gradients over a mesh: every device its own rows, then one sum.

Clipping needs whole gradients of single examples and nothing of the others, so
the rows of a batch are divided among the devices before a loss is traced: what
runs on a device is the gradient of one machine, with any strategy, and no rule
of a partitioner stands between an example and its norm.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from synthq_jax import typing
from synthq_jax.training import mesh as mesh_lib

__all__ = ["ShardedGrad", "rows_multiple"]


def rows_multiple(
  mesh: jax.sharding.Mesh, per_device: int | None = None
) -> int:
  """Returns what the rows of a batch have to be a multiple of.

  Args:
    mesh: from `mesh.make`.
    per_device: rows that a device processes at once; None: all it has.
  """
  ways = int(np.prod([mesh.shape[axis] for axis in mesh_lib.BATCH_AXES]))
  return ways * (per_device or 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedGrad:
  """A clipped gradient that is computed by all devices of a mesh.

  Formal guarantee:
    The sum of the devices' sums is the sum over all rows: each example is
    clipped, by itself, on the devices that hold its row and is counted once. So
    the sensitivity is that of `grad_fn`, whatever the mesh.
  """

  grad_fn: Callable[..., Any]
  """As in `dp_step.train`: from (params, batch) to (clipped sum, aux). Where it
  works in microbatches, these are rows of one device."""
  mesh: jax.sharding.Mesh
  """From `mesh.make`."""

  def __call__(
    self,
    params: typing.Params,
    batch: Mapping[str, jax.Array],
    public: Any = None,
    *,
    key: jax.Array | None = None,
    is_padding_example: jax.Array,
  ) -> tuple[typing.Params, Any]:
    """Returns the clipped sum, split as the parameters are, and `Aux`.

    Args:
      params: by path, split as `mesh.shardings` says.
      batch: rows, their number a multiple of `rows_multiple`.
      public: what the loss reads beside parameters, by path; given, `grad_fn`
        is a function of it.
      key: of the step, for losses with dropout.
      is_padding_example: bool [batch].
    """
    mesh, rows = self.mesh, PartitionSpec(mesh_lib.BATCH_AXES)
    if key is not None and "example_id" not in batch:
      batch = {**batch, "example_id": jnp.arange(len(is_padding_example))}
    if rows_multiple(mesh) == 1:  # no rows to divide: the partitioner's alone
      grad_fn = self.grad_fn if public is None else self.grad_fn(public)
      keys = {} if key is None else {"key": key}
      total, aux = grad_fn(
        params, batch, is_padding_example=is_padding_example, **keys
      )
      return _split(total, params, mesh), aux
    split = _fsdp_axes(params, mesh)
    public_split = _fsdp_axes(public or {}, mesh)

    def on_device(params, public, batch, is_padding, key):
      params = _join(params, split)
      keys = {} if key is None else {"key": key}
      grad_fn = self.grad_fn
      if public is not None:
        grad_fn = grad_fn(_join(public, public_split))
      total, aux = grad_fn(params, batch, is_padding_example=is_padding, **keys)
      return _sum(total, split), aux

    # Nothing but the sums crosses devices, but the `tensor` axis inside of a
    # layer, which is the partitioner's.
    manual = mesh_lib.BATCH_AXES
    if mesh.shape["tensor"] == 1:
      manual = mesh_lib.AXES
    params_specs = _specs(split, params)
    total, aux = jax.shard_map(
      on_device,
      mesh=mesh,
      in_specs=(
        params_specs,
        None if public is None else _specs(public_split, public),
        rows,
        rows,
        PartitionSpec(),
      ),
      out_specs=(params_specs, rows),
      axis_names=set(manual),
      check_vma=False,  # sums of what no device shares are made by hand
    )(params, public, batch, is_padding_example, key)
    return _split(total, params, mesh), aux


def _split(
  total: Any, params: Mapping[str, Any], mesh: jax.sharding.Mesh
) -> Any:
  where = mesh_lib.shardings(total, params, mesh)
  return jax.lax.with_sharding_constraint(total, where)


def _fsdp_axes(
  params: Mapping[str, Any], mesh: jax.sharding.Mesh
) -> dict[str, int | None]:
  """Returns the axis of each parameter that `fsdp` splits."""
  where = mesh_lib.shardings(dict(params), params, mesh)
  return {
    path: sharding.spec.index("fsdp") if "fsdp" in sharding.spec else None
    for path, sharding in where.items()
  }


def _specs(
  split: Mapping[str, int | None], params: Mapping[str, Any]
) -> dict[str, PartitionSpec]:
  return {
    path: PartitionSpec()
    if axis is None
    else PartitionSpec(*(None,) * axis, "fsdp")
    for path, axis in split.items()
    if path in params
  }


def _join(
  params: Mapping[str, jax.Array], split: Mapping[str, int | None]
) -> dict[str, jax.Array]:
  """Puts whole parameters together from their parts."""
  return {
    path: leaf
    if split[path] is None
    else jax.lax.all_gather(leaf, "fsdp", axis=split[path], tiled=True)
    for path, leaf in params.items()
  }


def _sum(
  total: Mapping[str, jax.Array], split: Mapping[str, int | None]
) -> dict[str, jax.Array]:
  """Adds the devices' sums; each keeps the part that it holds."""
  summed = {}
  for path, leaf in total.items():
    if split[path] is None:
      summed[path] = jax.lax.psum(leaf, mesh_lib.BATCH_AXES)
    else:
      part = jax.lax.psum_scatter(
        leaf, "fsdp", scatter_dimension=split[path], tiled=True
      )
      summed[path] = jax.lax.psum(part, "data")
  return summed
