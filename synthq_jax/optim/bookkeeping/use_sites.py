"""Describes how a loss uses a parameter: in products and lookups, perhaps in scans.

A parameter that is cast, reshaped, transposed or scaled before its use is a
view. A view is described by strides into the flat parameter. Each of its axes
is a sequence of atoms `(stride, size)`, major first. Two uses of one parameter
can then be compared without touching its values. `w` and `w.T` have the same
atoms in another order, and `w.reshape(a, b * c)` has one axis of two atoms.

A site describes one use by its contribution to the parameter's gradient. For a
product it is the sum over positions of left[position] right[position]^T. For a
lookup, right[position] is added to the row ids[position]. `left` and `ids` are
recorded while the loss is evaluated; `columns` computes `right` from the
cotangent of the use's result.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = [
  "Atom",
  "Dense",
  "Layout",
  "Lookup",
  "Record",
  "Repeated",
  "Site",
  "View",
  "find",
  "make_view",
]

Atom = tuple[int, int]
"""Stride in the flat parameter, and size, both in entries."""


@dataclasses.dataclass(frozen=True)
class View:
  """A parameter after linear maps that only move or scale its entries.

  Attributes:
    leaf: position of the parameter among the flattened parameters.
    axes: the atoms of each axis of the view, major first, with sizes above 1.
    scale: factor that multiplies all entries.
  """

  leaf: int
  axes: tuple[tuple[Atom, ...], ...]
  scale: float = 1.0

  def transpose(self, permutation: tuple[int, ...]) -> "View":
    """Returns the view with its axes in another order."""
    axes = tuple(self.axes[axis] for axis in permutation)
    return dataclasses.replace(self, axes=axes)

  def scaled(self, factor: float) -> "View":
    """Returns the view times a constant."""
    return dataclasses.replace(self, scale=self.scale * factor)

  def reshape(self, shape: tuple[int, ...]) -> "View | None":
    """Returns the view in another shape, or None if no strides describe it."""
    waiting = [atom for axis in self.axes for atom in axis][::-1]
    axes = []
    for size in shape:
      axis = _take(waiting, size)
      if axis is None:
        return None
      axes.append(axis)
    return dataclasses.replace(self, axes=tuple(axes))

  def select(self, axes: tuple[int, ...]) -> tuple[Atom, ...]:
    """Returns the atoms of some axes in order; contiguous neighbours are merged."""
    merged: list[Atom] = []
    for stride, size in (atom for axis in axes for atom in self.axes[axis]):
      if merged and merged[-1][0] == stride * size:
        merged[-1] = (stride, merged[-1][1] * size)
      else:
        merged.append((stride, size))
    return tuple(merged)


def _take(waiting: list[Atom], size: int) -> tuple[Atom, ...] | None:
  """Pops atoms that make up one axis of `size`; `waiting` is minor first."""
  axis = []
  while size > 1:
    stride, extent = waiting.pop()
    if size % extent == 0:
      axis.append((stride, extent))
      size //= extent
    elif extent % size == 0:
      inner = extent // size
      axis.append((stride * inner, size))
      waiting.append((stride, inner))
      size = 1
    else:
      return None
  return tuple(axis)


def make_view(leaf: int, shape: tuple[int, ...]) -> View:
  """Makes the view of a whole parameter, in its own shape."""
  strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
  axes = tuple(
    ((stride, size),) if size > 1 else ()
    for stride, size in zip(strides, shape, strict=True)
  )
  return View(leaf, axes)


@dataclasses.dataclass(frozen=True)
class Layout:
  """Layout of a gradient [groups, rows, columns] in its parameter."""

  groups: tuple[Atom, ...]
  rows: tuple[Atom, ...]
  columns: tuple[Atom, ...]

  def swap(self) -> "Layout":
    """Returns the layout of the transposed matrices."""
    return Layout(self.groups, self.columns, self.rows)

  @property
  def num_rows(self) -> int:
    """Number of rows."""
    return math.prod(size for _, size in self.rows)

  @property
  def num_columns(self) -> int:
    """Number of columns."""
    return math.prod(size for _, size in self.columns)

  def restore(self, matrices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Puts a gradient [groups, rows, columns] into the parameter's shape."""
    atoms = self.groups + self.rows + self.columns
    order = np.argsort([-stride for stride, _ in atoms], kind="stable")
    split = matrices.reshape([size for _, size in atoms])
    return jnp.transpose(split, [int(axis) for axis in order]).reshape(shape)


Record = Callable[[jax.Array], jax.Array]
"""Function from the other operand of a use to its record."""

_Mode = jax.lax.GatherScatterMode


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Single:
  """One use of a parameter, outside of scans.

  Attributes:
    leaf: position of the parameter among the flattened parameters.
    layout: layout of the gradient [groups, rows, columns] in the parameter;
      rows are the contracted axes of a product and the indexed axis of a
      lookup.
    output: shape and dtype of the result, and so of its perturbation.
    positions: number of data rows that the parameter multiplies, or of lookups.
    scale: constant that multiplies the parameter before its use.
    dtype: dtype of the parameter in this use.
  """

  leaf: int
  layout: Layout
  output: jax.ShapeDtypeStruct
  positions: int
  scale: float
  dtype: Any

  is_shared = False
  turns = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense(_Single):
  """A matrix product of a parameter with data.

  Attributes:
    parameter_first: whether the parameter is the left operand.
  """

  parameter_first: bool

  is_lookup = False

  def columns(self, cotangent: jax.Array) -> jax.Array:
    """Scales an output cotangent and reshapes it to [groups, position, columns]."""
    shape = (-1, self.positions, self.layout.num_columns)
    if self.parameter_first:
      swapped = cotangent.reshape(-1, shape[2], shape[1])
      return self.scale * jnp.swapaxes(swapped, 1, 2)
    return self.scale * cotangent.reshape(shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lookup(_Single):
  """A lookup of rows of a parameter.

  Attributes:
    offsets: axes of the output that run along a row.
  """

  offsets: tuple[int, ...]

  is_lookup = True

  def columns(self, cotangent: jax.Array) -> jax.Array:
    """Scales an output cotangent and reshapes it to [position, columns]."""
    rest = [a for a in range(cotangent.ndim) if a not in self.offsets]
    rows = jnp.transpose(cotangent, rest + list(self.offsets))
    return self.scale * rows.reshape(self.positions, -1)


@dataclasses.dataclass(frozen=True)
class Repeated:
  """A use in the body of a scan, once in each iteration.

  Attributes:
    leaf: position of the parameter among the flattened parameters.
    site: the use in one iteration.
    length: number of iterations.
    own: atoms of the axis that the scan slices, if each iteration has its own
      slice; None if all share the parameter, so that pairs of iterations count.
  """

  leaf: int
  site: "Site"
  length: int
  own: tuple[Atom, ...] | None

  @property
  def is_lookup(self) -> bool:
    """True for a lookup, False for a product."""
    return self.site.is_lookup

  @property
  def scale(self) -> float:
    """Constant that multiplies the parameter before its use."""
    return self.site.scale

  @property
  def dtype(self) -> Any:
    """Dtype of the parameter in this use."""
    return self.site.dtype

  @property
  def is_shared(self) -> bool:
    """True if several iterations use the same entry of the parameter."""
    return self.own is None or self.site.is_shared

  @property
  def turns(self) -> int:
    """Number of uses of each entry of the parameter."""
    return self.site.turns * (self.length if self.own is None else 1)

  @property
  def layout(self) -> Layout:
    """Layout of all iterations: own slices add groups to a product, rows to a
    lookup."""
    layout = self.site.layout
    if self.own is None:
      return layout
    if self.is_lookup:
      return dataclasses.replace(layout, rows=self.own + layout.rows)
    return dataclasses.replace(layout, groups=self.own + layout.groups)

  @property
  def output(self) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the stacked results of all iterations."""
    inner = self.site.output
    return jax.ShapeDtypeStruct((self.length, *inner.shape), inner.dtype)

  @property
  def positions(self) -> int:
    """Number of positions of the whole scan in each group."""
    more = self.own is None or self.is_lookup
    return self.site.positions * (self.length if more else 1)

  def columns(self, cotangent: jax.Array) -> jax.Array:
    """Returns stacked cotangents in the form of `site.columns`."""
    return self._join(jax.vmap(self.site.columns)(cotangent))

  def join(self, records: jax.Array) -> jax.Array:
    """Joins the stacked records of the iterations to one record."""
    if self.is_lookup and self.own is not None:
      first_row = self.site.layout.num_rows * jnp.arange(self.length)
      records = jnp.where(records < 0, -1, records + first_row[:, None])
    return self._join(records)

  def _join(self, stacked: jax.Array) -> jax.Array:
    if self.is_lookup:
      return stacked.reshape(-1, *stacked.shape[2:])
    length, groups, positions, width = stacked.shape
    if self.own is not None:
      return stacked.reshape(length * groups, positions, width)
    return jnp.swapaxes(stacked, 0, 1).reshape(groups, -1, width)


Site = Dense | Lookup | Repeated


def find(
  equation: Any, view: View, values: list[Any], position: int
) -> tuple[Dense | Lookup, Record] | None:
  """Describes the use that an equation makes of a view.

  Args:
    equation: an equation of a jaxpr.
    view: the view of a parameter that is one of the operands.
    values: all operands, as arrays.
    position: position of the view among the operands.

  Returns:
    The site, and the function that records the other operand. None if the use
    is neither a product with data nor a lookup of whole rows.
  """
  if equation.primitive.name == "dot_general":
    return _describe_product(equation, view, values[1 - position], position)
  if equation.primitive.name == "gather" and position == 0:
    return _describe_lookup(equation, view, *values)
  return None


def _describe_product(
  equation: Any, view: View, other: jax.Array, position: int
) -> tuple[Dense, Record] | None:
  """Describes a product of a parameter with data."""
  contracted, grouped = equation.params["dimension_numbers"]
  if not jnp.issubdtype(jnp.result_type(other), jnp.floating):
    return None
  ndim = len(view.axes)
  groups, rows = tuple(grouped[position]), tuple(contracted[position])
  free = tuple(axis for axis in range(ndim) if axis not in groups + rows)
  layout = Layout(view.select(groups), view.select(rows), view.select(free))
  groups, rows = tuple(grouped[1 - position]), tuple(contracted[1 - position])
  free = tuple(a for a in range(jnp.ndim(other)) if a not in groups + rows)
  positions = math.prod(jnp.shape(other)[axis] for axis in free)
  output = equation.outvars[0].aval
  site = Dense(
    leaf=view.leaf,
    layout=layout,
    output=jax.ShapeDtypeStruct(output.shape, output.dtype),
    positions=positions,
    parameter_first=position == 0,
    scale=view.scale,
    dtype=equation.invars[position].aval.dtype,
  )

  def record(data: jax.Array) -> jax.Array:
    moved = jnp.transpose(data, groups + free + rows)
    return moved.reshape(-1, positions, layout.num_rows)

  return site, record


def _describe_lookup(
  equation: Any, view: View, table: jax.Array, indices: jax.Array
) -> tuple[Lookup, Record] | None:
  """Describes a gather that takes whole rows along one axis of a parameter."""
  shape = table.shape
  numbers = equation.params["dimension_numbers"]
  sizes = equation.params["slice_sizes"]
  if len(numbers.start_index_map) != 1 or numbers.operand_batching_dims:
    return None
  (axis,) = numbers.start_index_map
  expected = tuple(1 if i == axis else n for i, n in enumerate(shape))
  if numbers.collapsed_slice_dims != (axis,) or tuple(sizes) != expected:
    return None
  rest = tuple(i for i in range(len(shape)) if i != axis)
  layout = Layout((), view.select((axis,)), view.select(rest))
  output = equation.outvars[0].aval
  site = Lookup(
    leaf=view.leaf,
    layout=layout,
    output=jax.ShapeDtypeStruct(output.shape, output.dtype),
    positions=math.prod(jnp.shape(indices)[:-1]),
    offsets=tuple(numbers.offset_dims),
    scale=view.scale,
    dtype=table.dtype,
  )
  mode = _Mode.from_any(equation.params["mode"])

  def record(indices: jax.Array) -> jax.Array:
    ids = indices.reshape(-1).astype(jnp.int32)
    if mode == _Mode.CLIP:
      return jnp.clip(ids, 0, shape[axis] - 1)
    # JAX's own gradient drops ids out of range, even if the lookup read a row.
    return jnp.where((ids >= 0) & (ids < shape[axis]), ids, -1)

  return site, record
