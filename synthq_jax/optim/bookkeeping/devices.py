"""What several devices ask of a clipped gradient.

A batch that is divided among devices without `training.sharded_grad` is left to
the compiler's partitioner. It is right about products, lookups and sums (held by
tests); of the gradient of a convolution that is mapped over examples it loses
all examples but those of the first device, in plain JAX, too.

Inside of `jax.shard_map` JAX knows which values differ between devices. The
gradient of a value that they share would be summed over them before any example
is clipped, so everything that a gradient is taken of is said to differ.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import jax

__all__ = [
  "axes_of",
  "compiler_divides",
  "first_of",
  "manual_axes",
  "refuse_batches",
  "refuse_divided",
  "refuse_parts",
  "shape_of",
  "unseen_axes",
  "vary",
]

_Axes = AbstractSet[str]


def axes_of(*trees: Any) -> frozenset[str]:
  """Returns the manual axes of the mesh along which some leaf differs."""
  leaves = jax.tree.leaves(trees)
  return frozenset().union(*[_axes(leaf) for leaf in leaves])


def manual_axes() -> frozenset[str]:
  """Returns the axes of the mesh along which devices see parts of their own here,
  inside of `jax.shard_map` or `jax.pmap`."""
  return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def refuse_batches(name: str, *, among: Sequence[str] = ()) -> None:
  """Refuses what clips more than one example, inside of `jax.shard_map`.

  Args:
    name: of what clips, for the message.
    among: axes of the mesh among whose devices it divides its work by itself.

  Raises:
    ValueError: if devices see rows of their own here.
  """
  sizes = jax.sharding.get_abstract_mesh().shape
  axes = manual_axes().difference(among)
  if among:  # with one device along an axis nothing is divided there
    axes = {axis for axis in axes if sizes[axis] > 1}
  if axes:
    raise ValueError(
      "expected a gradient that clips each example by itself on several devices,"
      f" got {name} inside of shard_map or pmap over {sorted(axes)}: a record that"
      " comes or goes would move others to other devices, and with them every"
      " device's batch; leave the mesh out, or call it outside, under jax.jit"
    )


def compiler_divides() -> bool:
  """Returns True if the partitioner divides work here, inside of shard_map.

  Then devices may wait for each other inside of what each does with its rows.
  """
  mesh = jax.sharding.get_abstract_mesh()
  return bool(mesh.manual_axes) and any(
    size > 1 and axis not in mesh.manual_axes
    for axis, size in mesh.shape.items()
  )


def refuse_divided(batch: Any) -> None:
  """Refuses arrays that are divided among devices.

  Where they are traced, what divides them is known when they are compiled: the
  error is raised then, as a `jax.errors.JaxRuntimeError`.

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
    elif not manual_axes():
      jax.debug.inspect_array_sharding(leaf, callback=_refuse_sharding)


def _refuse_sharding(sharding: jax.sharding.Sharding | None) -> None:
  if sharding is not None and not sharding.is_fully_replicated:
    raise ValueError(
      "expected a batch on one device for a loss with a convolution, got one"
      " divided among several: the compiler's partitioner loses examples there;"
      " take training.sharded_grad.ShardedGrad, which divides the rows itself"
    )


def refuse_parts(tree: Any) -> None:
  """Refuses a sum that gets noise and is no whole inside of `jax.shard_map`.

  Args:
    tree: arrays.

  Raises:
    ValueError: if a leaf differs, or may differ, between devices.
  """
  axes = axes_of(tree).union(unseen_axes())
  if axes:
    raise ValueError(
      "expected a whole sum that all devices share, got one that differs, or"
      f" may differ, along the mesh axes {sorted(axes)}: every device would add"
      " the same noise to its part; add the devices' sums (jax.lax.psum) under"
      " check_vma=True, or call privatize outside of jax.shard_map"
    )


def unseen_axes() -> tuple[str, ...]:
  """Returns the manual axes here along which nothing is said to differ.

  Those of `jax.shard_map(..., check_vma=False)`, where `axes_of` knows nothing.
  """
  return tuple(
    axis
    for axis in sorted(manual_axes())
    if not axes_of(jax.lax.axis_index(axis))
  )


def vary(tree: Any, axes: _Axes) -> Any:
  """Returns the same values, said to differ along these axes, too."""

  def one(leaf: Any) -> Any:
    missing = tuple(sorted(axes - _axes(leaf)))
    if not missing:
      return leaf
    if hasattr(jax.lax, "pcast"):
      return jax.lax.pcast(leaf, missing, to="varying")
    # Of versions of JAX that have no pcast.
    return jax.lax.pvary(leaf, missing)  # pyrefly: ignore[missing-attribute]

  return jax.tree.map(one, tree)


def first_of(batch: Any) -> Any:
  """Returns the first example's shapes and types, or where they differ itself.

  Args:
    batch: arrays or shapes with a leading axis [batch].
  """
  return jax.tree.map(
    lambda x: x[0] if _axes(x) else jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
    batch,
  )


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
  """Returns an abstract value of a jaxpr as an argument of `jax.eval_shape`."""
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
  found = getattr(aval, "vma", None)  # its name before JAX 0.10
  if found is None:
    found = getattr(getattr(aval, "mat", None), "varying", None)
  return frozenset(found or ())
