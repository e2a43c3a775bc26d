"""Clipped gradients over a mesh: every device its own rows, then one sum.

Clipping needs whole gradients of single examples and nothing of the others, so
the rows of a batch are divided among the devices before a loss is traced: what
runs on a device is the gradient of one machine, with any strategy, and no rule
of a partitioner stands between an example and its norm.

A contrastive gradient needs the documents of the others, too. It is given the
whole batch on every device, gathers their vectors, and divides its own work.
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

__all__ = ["ShardedGrad", "bound", "divides_itself", "rows_multiple"]

_WHOLE = -1  # no axis is split


def rows_multiple(
  mesh: jax.sharding.Mesh, per_device: int | None = None
) -> int:
  """Returns what the rows of a batch have to be a multiple of.

  Args:
    mesh: from `mesh.make`.
    per_device: rows that a device processes at once; None: all it has.
  """
  return mesh_lib.batch_ways(mesh) * (per_device or 1)


def bound(grad_fn: Callable[..., Any], public: Any) -> Callable[..., Any]:
  """Returns the clipped gradient, given what it reads beside parameters.

  Args:
    grad_fn: a clipped gradient, or a function of `public` that returns one.
    public: what the loss reads and nothing trains, or None.
  """
  return grad_fn if public is None else grad_fn(public)


def divides_itself(grad_fn: Callable[..., Any]) -> bool:
  """Returns True if a gradient takes whole batches and divides its own work.

  Args:
    grad_fn: a clipped gradient, as `bound` returns it.
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
  """A clipped gradient that is computed by all devices of a mesh.

  Formal guarantee:
    The sum of the devices' sums is the sum over all rows: each example is
    clipped, by itself, on the devices that hold its row and is counted once. So
    the sensitivity is that of `grad_fn`, whatever the mesh. What clips batches,
    groups or pairs (`optim.contrastive_clipped_grad`) sees the whole batch on
    every device, and clips what it would clip on one. Anything else is refused:
    which records meet on a device depends on all.
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
      params: a dict by path or nested, split as `mesh.shardings` says.
      batch: rows, their number a multiple of `rows_multiple`; of any number, and
        public fields beside them, for a gradient that `divides_itself`.
      public: what the loss reads beside parameters, of the same kind; given,
        `grad_fn` is a function of it.
      key: of the step, for losses with dropout.
      is_padding_example: bool [batch].
    """
    mesh, rows = self.mesh, PartitionSpec(mesh_lib.BATCH_AXES)
    if key is not None and "example_id" not in batch:
      batch = {**batch, "example_id": jnp.arange(len(is_padding_example))}
    if rows_multiple(mesh) == 1:  # no rows to divide: the partitioner's alone
      grad_fn = bound(self.grad_fn, public)
      keys = {} if key is None else {"key": key}
      total, aux = grad_fn(
        params, batch, is_padding_example=is_padding_example, **keys
      )
      return _split(total, params, mesh), aux
    is_whole = divides_itself(bound(self.grad_fn, public))
    if is_whole:  # rows that meet in a loss are not parted
      rows = PartitionSpec()
    split = _fsdp_axes(params, mesh)
    public_split = _fsdp_axes(public, mesh)

    def on_device(params, public, batch, is_padding, key):
      params = _join(params, split)
      keys = {} if key is None else {"key": key}
      if public is not None:
        public = _join(public, public_split)
      grad_fn = bound(self.grad_fn, public)
      if is_whole:
        grad_fn = grad_fn.divide_among(mesh_lib.BATCH_AXES)
      else:
        _refuse_batches(grad_fn)
      total, aux = grad_fn(params, batch, is_padding_example=is_padding, **keys)
      return _sum(total, split), aux

    # Nothing but sums, and vectors that are losses' own, crosses devices; inside
    # of a layer `tensor` is the partitioner's.
    manual = mesh_lib.BATCH_AXES
    if mesh.shape["tensor"] == 1:
      manual = mesh_lib.AXES
    params_specs = _specs(split)
    total, aux = jax.shard_map(
      on_device,
      mesh=mesh,
      in_specs=(
        params_specs,
        _specs(public_split),
        rows,
        rows,
        PartitionSpec(),
      ),
      out_specs=(params_specs, rows),
      axis_names=set(manual),
      check_vma=False,  # sums of what no device shares are made by hand
    )(params, public, batch, is_padding_example, key)
    return _split(total, params, mesh), aux


def _split(total: Any, params: Any, mesh: jax.sharding.Mesh) -> Any:
  where = mesh_lib.shardings(total, params, mesh)
  return jax.lax.with_sharding_constraint(total, where)


def _fsdp_axes(params: Any, mesh: jax.sharding.Mesh) -> Any:
  """Returns the axis of each parameter that `fsdp` splits, or -1."""

  def axis(sharding: jax.sharding.NamedSharding) -> int:
    spec = tuple(sharding.spec)
    return spec.index("fsdp") if "fsdp" in spec else _WHOLE

  return jax.tree.map(axis, mesh_lib.shardings(params, params, mesh))


def _specs(split: Any) -> Any:
  return jax.tree.map(
    lambda axis: (
      PartitionSpec()
      if axis == _WHOLE
      else PartitionSpec(*(None,) * axis, "fsdp")
    ),
    split,
  )


def _join(params: Any, split: Any) -> Any:
  """Puts whole parameters together from their parts."""
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
  """Adds the devices' sums; each keeps the part that it holds."""

  def one(leaf: jax.Array, axis: int) -> jax.Array:
    if axis == _WHOLE:
      return jax.lax.psum(leaf, mesh_lib.BATCH_AXES)
    part = jax.lax.psum_scatter(
      leaf, "fsdp", scatter_dimension=axis, tiled=True
    )
    return jax.lax.psum(part, "data")

  return jax.tree.map(one, total, split)
