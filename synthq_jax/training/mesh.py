"""Makes meshes of devices and shards arrays over their axes: data, fsdp, tensor.

A parameter's axes have the names of T5X (embed, mlp, heads, joined_kv, vocab, ...),
and `RULES` maps each name to an axis of the mesh. Rows of a batch are split over
`data` and `fsdp`. `fsdp` also splits parameters and optimizer, which are gathered
while a gradient is computed. `tensor` splits the layers themselves. A mesh changes
results by rounding alone, and noise not at all.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

__all__ = [
  "AXES",
  "BATCH_AXES",
  "RULES",
  "Shape",
  "batch_sharding",
  "batch_ways",
  "gather",
  "logical_axes",
  "make",
  "of_all",
  "place",
  "place_rows",
  "place_state",
  "shardings",
  "whole",
]

AXES = ("data", "fsdp", "tensor")
"""Names of the axes of every mesh."""
BATCH_AXES = ("data", "fsdp")
"""Names of the axes over which the rows of a batch are split."""

RULES: Mapping[str, tuple[str, ...]] = {
  "batch": BATCH_AXES,
  "embed": ("fsdp",),
  "mlp": ("tensor",),
  "heads": ("tensor",),
  "joined_kv": ("tensor",),
  "vocab": ("tensor",),
}
"""Map from T5X's logical axes to axes of the mesh; other axes are not split."""

_LOGICAL = (
  (r"(.*/)?token_embedder/embedding", ("vocab", "embed")),
  (r"(.*/)?(query|key|value)/kernel", ("embed", "joined_kv")),
  (r"(.*/)?out/kernel", ("joined_kv", "embed")),
  (r"(.*/)?wi(_\d+)?/kernel", ("embed", "mlp")),
  (r"(.*/)?wo/kernel", ("mlp", "embed")),
  (r"(.*/)?logits_dense/kernel", ("embed", "vocab")),
  (r"(.*/)?rel_embedding", ("heads", "relpos_buckets")),
  (r"(.*/)?scale", ("embed",)),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
  """The number of devices along each axis of a mesh."""

  data: int = -1
  """The number of copies of the model, each with its own rows; -1: as many as the
  devices allow."""
  fsdp: int = 1
  """The number of parts of parameters and optimizer, each with its own rows."""
  tensor: int = 1
  """The number of parts of the layers, which share the same rows."""

  def __post_init__(self):
    for name in AXES:
      size = getattr(self, name)
      may_be_rest = name == "data"
      if size < 1 and not (may_be_rest and size == -1):
        or_rest = ", or -1" if may_be_rest else ""
        raise ValueError(
          f"expected mesh.Shape.{name} of 1 or more{or_rest}, got {name}={size}"
        )

  def sizes(self, num_devices: int) -> tuple[int, int, int]:
    """Returns the sizes of the axes for a number of devices.

    >>> Shape(fsdp=2).sizes(8)
    (4, 2, 1)

    Args:
      num_devices: the number of devices.

    Raises:
      ValueError: unless the product of the axes is that number. One process that
        sets `data` may use fewer devices.
    """
    rest = self.fsdp * self.tensor
    data = num_devices // rest if self.data == -1 else self.data
    fits = data * rest == num_devices
    if self.data >= 1 and jax.process_count() == 1:  # devices may stay idle
      fits = data * rest <= num_devices
    if not fits:
      raise ValueError(
        f"expected a mesh of {num_devices} devices, all there are, got"
        f" data={self.data} x fsdp={self.fsdp} x tensor={self.tensor}: set"
        " MESH_DATA, MESH_FSDP and MESH_TENSOR to numbers with that product"
      )
    return data, self.fsdp, self.tensor


def make(
  shape: Shape, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
  """Arranges devices in a mesh, with neighbours along the last axis.

  Args:
    shape: sizes of the axes.
    devices: the devices to use; None: all devices of all processes.

  Returns:
    A mesh with `AXES`.

  Raises:
    ValueError: if the product of the axes does not fit the number of devices.
  """
  has_devices = devices is not None
  devices = list(devices if has_devices else jax.devices())
  sizes = shape.sizes(len(devices))
  devices = devices[: math.prod(sizes)]
  if has_devices or devices[0].platform == "cpu":
    return jax.sharding.Mesh(np.array(devices).reshape(sizes), AXES)
  return jax.make_mesh(
    sizes,
    AXES,
    devices=devices,
    axis_types=(jax.sharding.AxisType.Auto,) * len(AXES),
  )


def of_all(shape: Shape) -> jax.sharding.Mesh | None:
  """Makes the mesh of all devices; returns None for a mesh of one device.

  Args:
    shape: sizes of the axes.

  Raises:
    ValueError: if the product of the axes does not fit the number of devices.
  """
  mesh = make(shape)
  return mesh if mesh.size > 1 else None


def logical_axes(path: str, shape: Sequence[int]) -> tuple[str | None, ...]:
  """Returns T5X's names of a parameter's axes.

  >>> logical_axes("encoder/layers_0/mlp/wi_0/kernel", (512, 1024))
  ('embed', 'mlp')
  >>> logical_axes("encoder/layers/mlp/wi_0/kernel", (8, 512, 1024))
  ('layers', 'embed', 'mlp')

  Args:
    path: the path of the parameter, its parts joined by "/".
    shape: its shape. One more axis in front is the axis of stacked layers.

  Returns:
    A name for each axis; None for an axis without a name.
  """
  for pattern, names in _LOGICAL:
    if re.fullmatch(pattern, path):
      if len(shape) == len(names):
        return names
      if len(shape) == len(names) + 1:
        return ("layers", *names)
  return (None,) * len(shape)


def _make_spec(
  path: str, shape: Sequence[int], mesh: jax.sharding.Mesh
) -> PartitionSpec:
  """Returns the axes of the mesh over which a parameter is split."""
  parts = []
  for name, size in zip(logical_axes(path, shape), shape, strict=True):
    axes = RULES.get(name or "", ())
    ways = math.prod(mesh.shape[axis] for axis in axes)
    # An axis that does not divide is not split, e.g. 6 heads on 4 devices.
    parts.append(axes[0] if axes and ways > 1 and size % ways == 0 else None)
  return PartitionSpec(*parts)


def shardings(tree: Any, params: Any, mesh: jax.sharding.Mesh) -> Any:
  """Returns the sharding of each array of a state.

  Moments and noise buffers are split as their parameter. Such an array has a path
  that ends with the path of the parameter, and the parameter's shape, maybe with
  axes in front. All other arrays are copied to every device.

  Args:
    tree: arrays or their shapes, e.g. the state of an optimizer, or the
      parameters themselves.
    params: arrays or their shapes, a dict by path or nested.
    mesh: a mesh of `make`.

  Returns:
    A `NamedSharding` for each array.
  """
  param_shapes = {
    _path(keys): tuple(leaf.shape)
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params)
  }

  def make_sharding(keys: Any, leaf: Any) -> NamedSharding:
    path = _path(keys)
    while path and path not in param_shapes:
      path = path.partition("/")[2]
    shape = param_shapes.get(path)
    if shape is None:
      return whole(mesh)
    front = len(leaf.shape) - len(shape)
    if front < 0 or tuple(leaf.shape[front:]) != shape:
      return whole(mesh)
    spec = _make_spec(path, shape, mesh)
    return NamedSharding(mesh, PartitionSpec(*(None,) * front, *spec))

  return jax.tree_util.tree_map_with_path(make_sharding, tree)


_path = functools.partial(jax.tree_util.keystr, simple=True, separator="/")


def batch_ways(mesh: jax.sharding.Mesh) -> int:
  """Returns the number of devices among which the rows of a batch are divided."""
  return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Returns the sharding that splits the rows of a batch among the devices."""
  return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def whole(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Returns the sharding that copies an array to every device."""
  return NamedSharding(mesh, PartitionSpec())


def place(tree: Any, where: Any) -> Any:
  """Shards host arrays that every process holds in full.

  Args:
    tree: arrays of the host, the same in every process.
    where: a sharding for each array, as `shardings` returns it.

  Returns:
    Arrays over all processes. Each process copies only the parts of its devices.
  """

  def shard(leaf: Any, sharding: NamedSharding) -> jax.Array:
    host = np.asarray(leaf)
    return jax.make_array_from_callback(
      host.shape, sharding, lambda index: host[index]
    )

  return jax.tree.map(shard, tree, where)


def place_state(
  params: Any, init: Callable[[Any], Any], mesh: jax.sharding.Mesh
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
  """Shards parameters and the initial state of their optimizer over a mesh.

  Args:
    params: parameters on the host of every process.
    init: makes the state of the optimizer from parameters.
    mesh: a mesh of `make`.

  Returns:
    (parameters, state), and the shardings of both.
  """
  where = shardings(params, params, mesh)
  placed = place(params, where)
  state_where = shardings(jax.eval_shape(init, placed), params, mesh)
  state = jax.jit(init, out_shardings=state_where)(placed)
  return (placed, state), (where, state_where)


def place_rows(
  values: np.ndarray, rows: np.ndarray, sharding: NamedSharding
) -> jax.Array:
  """Reads rows of records; each process reads only the rows of its devices.

  Args:
    values: one row per record, [record, ...].
    rows: the row numbers, in order, [batch], the same in every process.
    sharding: a sharding of the rows, such as `batch_sharding`.

  Returns:
    An array [batch, ...] over all processes.
  """
  return jax.make_array_from_callback(
    (len(rows), *values.shape[1:]),
    sharding,
    lambda index: values[rows[index[0]]],
  )


def gather(tree: Any) -> Any:
  """Gathers whole arrays on the host of every process, one array at a time."""
  from jax.experimental import multihost_utils

  def gather_leaf(leaf: Any) -> np.ndarray:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
      return np.asarray(jax.device_get(leaf))
    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))

  return jax.tree.map(gather_leaf, tree)
