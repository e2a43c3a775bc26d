"""Meshes of devices, and which of them holds what: data, fsdp, tensor.

A parameter's axes have names (T5X's: embed, mlp, heads, joined_kv, vocab, ...),
and `RULES` says over which axis of the mesh each is split. Rows of a batch are
split over `data` and `fsdp`; `fsdp` splits parameters and optimizer as well,
which are put together for the length of a gradient; `tensor` splits the layers
themselves. None of it changes what is computed: results differ by rounding,
noise not at all.
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
"""Of every mesh."""
BATCH_AXES = ("data", "fsdp")
"""Those over which the rows of a batch are split."""

RULES: Mapping[str, tuple[str, ...]] = {
  "batch": BATCH_AXES,
  "embed": ("fsdp",),
  "mlp": ("tensor",),
  "heads": ("tensor",),
  "joined_kv": ("tensor",),
  "vocab": ("tensor",),
}
"""From T5X's logical axes to those of the mesh; others are not split."""

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
  """How many devices lie along each axis of a mesh."""

  data: int = -1
  """Copies of the model, each with rows of its own; -1: as many as there are
  devices for."""
  fsdp: int = 1
  """Parts of parameters and optimizer, which have rows of their own, too."""
  tensor: int = 1
  """Parts of the layers, with the same rows."""

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
    """Returns the sizes of the axes on so many devices.

    >>> Shape(fsdp=2).sizes(8)
    (4, 2, 1)

    Args:
      num_devices: how many devices there are.

    Raises:
      ValueError: if the axes do not come to that number; fewer will do in
        one process that says `data`.
    """
    rest = self.fsdp * self.tensor
    data = num_devices // rest if self.data == -1 else self.data
    fits = data * rest == num_devices
    if self.data >= 1 and jax.process_count() == 1:  # some may stay idle
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
  """Lays devices out in a mesh, neighbours along the last axis.

  Args:
    shape: sizes of the axes.
    devices: those to use; all of all processes if not given.

  Returns:
    A mesh with `AXES`.

  Raises:
    ValueError: if the axes do not come to the number of devices.
  """
  given = devices is not None
  devices = list(devices if given else jax.devices())
  sizes = shape.sizes(len(devices))
  devices = devices[: math.prod(sizes)]
  if given or devices[0].platform == "cpu":
    return jax.sharding.Mesh(np.array(devices).reshape(sizes), AXES)
  return jax.make_mesh(
    sizes,
    AXES,
    devices=devices,
    axis_types=(jax.sharding.AxisType.Auto,) * len(AXES),
  )


def of_all(shape: Shape) -> jax.sharding.Mesh | None:
  """Returns the mesh of all devices; None if one device is all it has.

  Args:
    shape: sizes of the axes.

  Raises:
    ValueError: if the axes do not come to the number of devices.
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
    path: of the parameter, parts joined by "/".
    shape: its shape; an axis in front of those of the layer is its stack's.

  Returns:
    A name for each axis; None where there is none.
  """
  for pattern, names in _LOGICAL:
    if re.fullmatch(pattern, path):
      if len(shape) == len(names):
        return names
      if len(shape) == len(names) + 1:
        return ("layers", *names)
  return (None,) * len(shape)


def _spec(
  path: str, shape: Sequence[int], mesh: jax.sharding.Mesh
) -> PartitionSpec:
  """Returns over which axes of the mesh a parameter is split."""
  parts = []
  for name, size in zip(logical_axes(path, shape), shape, strict=True):
    axes = RULES.get(name or "", ())
    ways = math.prod(mesh.shape[axis] for axis in axes)
    # What does not divide is not split: 6 heads on 4 devices.
    parts.append(axes[0] if axes and ways > 1 and size % ways == 0 else None)
  return PartitionSpec(*parts)


def shardings(tree: Any, params: Any, mesh: jax.sharding.Mesh) -> Any:
  """Returns where each array of a state belongs.

  An array whose path ends with that of a parameter, and that has its shape,
  maybe with axes in front, is split as the parameter is: moments, buffers of
  noise. All others are copied to every device.

  Args:
    tree: arrays or their shapes, e.g. the state of an optimizer; the
      parameters themselves will do.
    params: arrays or their shapes, a dict by path or nested.
    mesh: from `make`.

  Returns:
    A `NamedSharding` for each array.
  """
  known = {
    _path(keys): tuple(leaf.shape)
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params)
  }

  def one(keys: Any, leaf: Any) -> NamedSharding:
    path = _path(keys)
    while path and path not in known:
      path = path.partition("/")[2]
    shape = known.get(path)
    if shape is None:
      return whole(mesh)
    front = len(leaf.shape) - len(shape)
    if front < 0 or tuple(leaf.shape[front:]) != shape:
      return whole(mesh)
    spec = _spec(path, shape, mesh)
    return NamedSharding(mesh, PartitionSpec(*(None,) * front, *spec))

  return jax.tree_util.tree_map_with_path(one, tree)


_path = functools.partial(jax.tree_util.keystr, simple=True, separator="/")


def batch_ways(mesh: jax.sharding.Mesh) -> int:
  """Returns among how many devices the rows of a batch are divided."""
  return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Returns where the rows of a batch belong."""
  return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def whole(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Returns where an array is copied to every device."""
  return NamedSharding(mesh, PartitionSpec())


def place(tree: Any, where: Any) -> Any:
  """Puts arrays that every process holds in full where they belong.

  Args:
    tree: arrays of the host, the same in every process.
    where: a sharding for each, from `shardings`.

  Returns:
    Arrays over all processes; each copies what its devices hold.
  """

  def one(leaf: Any, sharding: NamedSharding) -> jax.Array:
    host = np.asarray(leaf)
    return jax.make_array_from_callback(
      host.shape, sharding, lambda index: host[index]
    )

  return jax.tree.map(one, tree, where)


def place_state(
  params: Any, init: Callable[[Any], Any], mesh: jax.sharding.Mesh
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
  """Puts parameters and the first state of their optimizer on a mesh.

  Args:
    params: on the host of every process.
    init: from parameters to the state of the optimizer.
    mesh: from `make`.

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
  """Reads rows of records: each process those alone that its devices hold.

  Args:
    values: [record, ...].
    rows: which of them, in order, [batch]: the same in every process.
    sharding: from `batch_sharding`.

  Returns:
    [batch, ...], over all processes.
  """
  return jax.make_array_from_callback(
    (len(rows), *values.shape[1:]),
    sharding,
    lambda index: values[rows[index[0]]],
  )


def gather(tree: Any) -> Any:
  """Returns the whole arrays on the host of every process, one at a time."""
  from jax.experimental import multihost_utils

  def one(leaf: Any) -> np.ndarray:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
      return np.asarray(jax.device_get(leaf))
    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))

  return jax.tree.map(one, tree)
