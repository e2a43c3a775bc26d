"""Checks and marks arrays that are divided among devices.

Without `training.sharded_grad` the compiler's partitioner divides a batch among
devices. It is right about products, lookups and sums (held by tests). Of the
gradient of a convolution that is mapped over examples it loses all examples but
those of the first device, in plain JAX, too.

Inside of `jax.shard_map` JAX tracks which values differ between devices. The
gradient with respect to a shared value would be summed over devices before any
example is clipped. So all differentiated values are marked as differing.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import jax

__all__ = [
  "compiler_divides",
  "get_axes",
  "get_first_example",
  "get_manual_axes",
  "get_shape",
  "get_untracked_axes",
  "refuse_batches",
  "refuse_divided",
  "refuse_explicit",
  "refuse_parts",
  "vary",
]

_Axes = AbstractSet[str]


def get_axes(*trees: Any) -> frozenset[str]:
  """Returns the manual axes of the mesh along which some leaf differs."""
  leaves = jax.tree.leaves(trees)
  return frozenset().union(*[_axes(leaf) for leaf in leaves])


def get_manual_axes() -> frozenset[str]:
  """Returns the mesh axes of an enclosing `jax.shard_map` or `jax.pmap`, along
  which each device sees its own part of an array."""
  return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def refuse_batches(name: str, *, among: Sequence[str] = ()) -> None:
  """Refuses a gradient that clips several examples, inside of `jax.shard_map`.

  Args:
    name: name of the gradient, for the message.
    among: mesh axes along which the gradient divides its work by itself.

  Raises:
    ValueError: if devices see rows of their own along other axes.
  """
  sizes = jax.sharding.get_abstract_mesh().shape
  axes = get_manual_axes().difference(among)
  if among:  # with one device along an axis nothing is divided there
    axes = {axis for axis in axes if sizes[axis] > 1}
  if axes:
    raise ValueError(
      "expected a gradient that clips each example by itself on several devices,"
      f" got {name} inside of shard_map or pmap over {sorted(axes)}: adding or"
      " removing a record would move others to other devices and change every"
      " device's batch; leave the mesh out, or call it outside, under jax.jit"
    )


def compiler_divides() -> bool:
  """Returns True inside of a shard_map if the partitioner divides work, too.

  Then devices may wait for each other while each processes its rows.
  """
  mesh = jax.sharding.get_abstract_mesh()
  return bool(mesh.manual_axes) and any(
    size > 1 and axis not in mesh.manual_axes
    for axis, size in mesh.shape.items()
  )


def refuse_divided(batch: Any) -> None:
  """Refuses arrays that are divided among devices.

  The sharding of traced arrays is known at compilation: the error is raised
  then, as a `jax.errors.JaxRuntimeError`.

  Args:
    batch: arrays.

  Raises:
    ValueError: if one of them is divided.
  """
  if jax.device_count() == 1:
    return
  for leaf in jax.tree.leaves(batch):
    if not isinstance(leaf, jax.core.Tracer):
      _refuse_sharding(getattr(leaf, "sharding", None))
    elif not get_manual_axes():
      jax.debug.inspect_array_sharding(leaf, callback=_refuse_sharding)


def _refuse_sharding(sharding: jax.sharding.Sharding | None) -> None:
  if sharding is not None and not sharding.is_fully_replicated:
    raise ValueError(
      "expected a batch on one device for a loss with a convolution, got one"
      " divided among several: the compiler's partitioner loses examples there;"
      " take training.sharded_grad.ShardedGrad, which divides the rows itself"
    )


def refuse_explicit(batch: Any) -> None:
  """Refuses rows on a mesh whose axes are explicit, `jax.make_mesh`'s default.

  There JAX asks for a sharding of each single slice and product.

  Args:
    batch: arrays.

  Raises:
    ValueError: if an array is divided along an explicit axis.
  """
  for leaf in jax.tree.leaves(batch):
    spec = getattr(getattr(_aval(leaf), "sharding", None), "spec", ())
    axes = [axis for axis in spec if axis is not None]
    if axes:
      raise ValueError(
        f"expected a batch without explicit axes of a mesh, got one along {axes}:"
        " make the mesh with jax.make_mesh(..., axis_types=(jax.sharding"
        ".AxisType.Auto,) * (number of axes))"
      )


def refuse_parts(tree: Any) -> None:
  """Refuses a sum that differs between the devices of a `jax.shard_map`.

  Args:
    tree: arrays.

  Raises:
    ValueError: if a leaf differs, or may differ, between devices.
  """
  axes = get_axes(tree).union(get_untracked_axes())
  if axes:
    raise ValueError(
      "expected a whole sum that all devices share, got one that differs, or"
      f" may differ, along the mesh axes {sorted(axes)}: every device would add"
      " the same noise to its part; add the devices' sums (jax.lax.psum) under"
      " check_vma=True, or call privatize outside of jax.shard_map"
    )


def get_untracked_axes() -> tuple[str, ...]:
  """Returns the manual axes along which JAX does not track what differs.

  They are those of `jax.shard_map(..., check_vma=False)`, which `get_axes`
  misses.
  """
  return tuple(
    axis
    for axis in sorted(get_manual_axes())
    if not get_axes(jax.lax.axis_index(axis))
  )


def vary(tree: Any, axes: _Axes) -> Any:
  """Marks values as differing along these mesh axes, too."""

  def mark(leaf: Any) -> Any:
    missing = tuple(sorted(axes - _axes(leaf)))
    if not missing:
      return leaf
    if hasattr(jax.lax, "pcast"):
      return jax.lax.pcast(leaf, missing, to="varying")
    # For versions of JAX without pcast.
    return jax.lax.pvary(leaf, missing)  # pyrefly: ignore[missing-attribute]

  return jax.tree.map(mark, tree)


def get_first_example(batch: Any) -> Any:
  """Returns the first example: shapes and dtypes, or arrays that differ by device.

  Args:
    batch: arrays or shapes with a leading axis [batch].
  """

  def first(leaf: Any) -> Any:
    if _axes(leaf):
      return leaf[0]
    aval = _aval(leaf)  # whose dtype is JAX's, also of NumPy's float64
    return jax.ShapeDtypeStruct(aval.shape[1:], aval.dtype)

  return jax.tree.map(first, batch)


def get_shape(aval: Any) -> jax.ShapeDtypeStruct:
  """Converts an abstract value of a jaxpr to an argument of `jax.eval_shape`."""
  more = {}
  if _axes(aval):
    name = "manual_axis_type" if hasattr(aval, "mat") else "vma"
    more = {name: getattr(aval, name), "sharding": aval.sharding}
  return jax.ShapeDtypeStruct(aval.shape, aval.dtype, **more)


def _aval(leaf: Any) -> Any:
  is_shape = isinstance(leaf, (jax.ShapeDtypeStruct, jax.core.ShapedArray))
  return leaf if is_shape else jax.typeof(leaf)


def _axes(leaf: Any) -> frozenset[str]:
  aval = _aval(leaf)
  varying = getattr(aval, "vma", None)  # its name before JAX 0.10
  if varying is None:
    varying = getattr(getattr(aval, "mat", None), "varying", None)
  return frozenset(varying or ())
