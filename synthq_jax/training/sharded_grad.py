"""Computes clipped gradients over a mesh: each device its rows, then one sum.

Clipping needs the whole gradient of each single example. So the rows of a batch
are divided among the devices before the loss is traced. A device runs the same
gradient as a single machine, with any strategy, and the partitioner does not
change an example's norm.

A contrastive gradient also needs the documents of other pairs. It gets the whole
batch on every device, gathers the vectors, and divides its own work.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from synthq_jax import typing
from synthq_jax.optim.bookkeeping import devices
from synthq_jax.training import mesh as mesh_lib

__all__ = ["ShardedGrad", "bind_public", "divides_itself", "rows_multiple"]

_WHOLE = -1  # stands for no split axis


def rows_multiple(
  mesh: jax.sharding.Mesh, per_device: int | None = None
) -> int:
  """Returns the number that must divide the number of rows of a batch.

  Args:
    mesh: a mesh of `mesh.make`.
    per_device: rows that a device processes at once; None: all its rows.
  """
  return mesh_lib.batch_ways(mesh) * (per_device or 1)


def bind_public(grad_fn: Callable[..., Any], public: Any) -> Callable[..., Any]:
  """Binds public arrays to a clipped gradient, if there are any.

  Args:
    grad_fn: a clipped gradient, or with public arrays a function of them that
      returns one.
    public: arrays that the loss reads and no step trains, or None.
  """
  return grad_fn if public is None else grad_fn(public)


def divides_itself(grad_fn: Callable[..., Any]) -> bool:
  """Checks whether a gradient takes whole batches and divides its own work.

  Args:
    grad_fn: a clipped gradient, as `bind_public` returns it.
  """
  return hasattr(grad_fn, "divide_among")


def _refuse_batches(grad_fn: Callable[..., Any]) -> None:
  """Refuses a gradient whose sensitivity is not that of single examples."""
  if hasattr(grad_fn, "sensitivity") and not getattr(
    grad_fn, "is_per_example", False
  ):
    devices.refuse_batches(type(grad_fn).__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedGrad:
  """A clipped gradient that all devices of a mesh compute together.

  Formal guarantee:
    The sum of the devices' sums is the sum over all rows. Each example is clipped
    by itself on the devices that hold its row, and counts once. So the sensitivity
    is that of `grad_fn`, whatever the mesh. A gradient that clips batches, groups
    or pairs (`optim.contrastive_clipped_grad`) sees the whole batch on every
    device, and clips the same vectors as on one device. Any other gradient with a
    `sensitivity` is refused, since the records that meet on a device depend on all
    records.
  """

  grad_fn: Callable[..., Any]
  """A clipped gradient as in `dp_step.Training`: (params, batch) -> (clipped sum,
  aux). Its microbatches are rows of one device."""
  mesh: jax.sharding.Mesh
  """A mesh of `mesh.make`."""

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
      params: a dict by path or nested, split as `mesh.shardings` returns.
      batch: rows, their number a multiple of `rows_multiple`. For a gradient that
        `divides_itself`, any number of rows, and public fields.
      public: public arrays that the loss reads, a dict like the parameters. If
        set, `grad_fn` is a function of them.
      key: the key of the step, for losses with dropout.
      is_padding_example: the padding mask, bool [batch].
    """
    mesh, rows = self.mesh, PartitionSpec(mesh_lib.BATCH_AXES)
    if key is not None and "example_id" not in batch:
      batch = {**batch, "example_id": jnp.arange(len(is_padding_example))}
    if rows_multiple(mesh) == 1:  # the partitioner alone divides the work
      grad_fn = bind_public(self.grad_fn, public)
      keys = {} if key is None else {"key": key}
      total, aux = grad_fn(
        params, batch, is_padding_example=is_padding_example, **keys
      )
      return _split(total, params, mesh), aux
    is_whole = divides_itself(bind_public(self.grad_fn, public))
    if is_whole:  # every device needs all rows of the loss
      rows = PartitionSpec()
    split = _find_fsdp_axes(params, mesh)
    public_split = _find_fsdp_axes(public, mesh)

    def on_device(params, public, batch, is_padding, key):
      params = _join(params, split)
      keys = {} if key is None else {"key": key}
      if public is not None:
        public = _join(public, public_split)
      grad_fn = bind_public(self.grad_fn, public)
      if is_whole:
        grad_fn = grad_fn.divide_among(mesh_lib.BATCH_AXES)
      else:
        _refuse_batches(grad_fn)
      total, aux = grad_fn(params, batch, is_padding_example=is_padding, **keys)
      return _sum(total, split), aux

    # Only sums and the vectors of contrastive losses cross devices. Within a layer,
    # the partitioner handles `tensor`.
    manual = mesh_lib.BATCH_AXES
    if mesh.shape["tensor"] == 1:
      manual = mesh_lib.AXES
    params_specs = _make_specs(split)
    total, aux = jax.shard_map(
      on_device,
      mesh=mesh,
      in_specs=(
        params_specs,
        _make_specs(public_split),
        rows,
        rows,
        PartitionSpec(),
      ),
      out_specs=(params_specs, rows),
      axis_names=set(manual),
      check_vma=False,  # the sums over devices are explicit, in `_sum`
    )(params, public, batch, is_padding_example, key)
    return _split(total, params, mesh), aux


def _split(total: Any, params: Any, mesh: jax.sharding.Mesh) -> Any:
  where = mesh_lib.shardings(total, params, mesh)
  return jax.lax.with_sharding_constraint(total, where)


def _find_fsdp_axes(params: Any, mesh: jax.sharding.Mesh) -> Any:
  """Returns the axis of each parameter that `fsdp` splits, or `_WHOLE`."""

  def axis(sharding: jax.sharding.NamedSharding) -> int:
    spec = tuple(sharding.spec)
    return spec.index("fsdp") if "fsdp" in spec else _WHOLE

  return jax.tree.map(axis, mesh_lib.shardings(params, params, mesh))


def _make_specs(split: Any) -> Any:
  return jax.tree.map(
    lambda axis: (
      PartitionSpec()
      if axis == _WHOLE
      else PartitionSpec(*(None,) * axis, "fsdp")
    ),
    split,
  )


def _join(params: Any, split: Any) -> Any:
  """Gathers whole parameters from their parts."""
  return jax.tree.map(
    lambda leaf, axis: (
      leaf
      if axis == _WHOLE
      else jax.lax.all_gather(leaf, "fsdp", axis=axis, tiled=True)
    ),
    params,
    split,
  )


def _sum(total: Any, split: Any) -> Any:
  """Adds the sums of the devices; each device keeps its part of the total."""

  def sum_leaf(leaf: jax.Array, axis: int) -> jax.Array:
    if axis == _WHOLE:
      return jax.lax.psum(leaf, mesh_lib.BATCH_AXES)
    part = jax.lax.psum_scatter(
      leaf, "fsdp", scatter_dimension=axis, tiled=True
    )
    return jax.lax.psum(part, "data")

  return jax.tree.map(sum_leaf, total, split)
