"""Where a loss uses a parameter: products and lookups, perhaps in a scan.

A site describes one use by the parameter's gradient that it makes. That is a
sum over positions of left[position] right[position]^T for a product, and of
right[position] added to the row ids[position] for a lookup. `left` and `ids`
are recorded while the loss is evaluated, `right` is what `columns` makes of the
cotangent of the use's result.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from synthq_jax.optim import _views

__all__ = ["Dense", "Lookup", "Record", "Repeated", "Site", "find"]

Record = Callable[[jax.Array], jax.Array]
"""What is kept of the other operand of a use."""

_Mode = jax.lax.GatherScatterMode


@dataclasses.dataclass(frozen=True)
class Dense:
  """A matrix product of a parameter with data.

  Attributes:
    leaf: position of the parameter among the flattened parameters.
    layout: where the gradient [groups, rows, columns] lies in the parameter;
      rows are the contracted axes.
    output: shape and dtype of the product, and so of its perturbation.
    positions: number of rows of data, `position` below.
    parameter_first: whether the parameter is the left operand.
    scale: constant that the parameter is multiplied with before use.
    dtype: of the parameter where it is used.
  """

  leaf: int
  layout: _views.Layout
  output: jax.ShapeDtypeStruct
  positions: int
  parameter_first: bool
  scale: float
  dtype: Any

  is_lookup = False
  is_shared = False

  def columns(self, cotangent: jax.Array) -> jax.Array:
    """Returns an output cotangent as [groups, position, columns]."""
    shape = (-1, self.positions, self.layout.num_columns)
    if self.parameter_first:
      swapped = cotangent.reshape(-1, shape[2], shape[1])
      return self.scale * jnp.swapaxes(swapped, 1, 2)
    return self.scale * cotangent.reshape(shape)


@dataclasses.dataclass(frozen=True)
class Lookup:
  """A lookup of rows of a parameter; `columns` makes it [position, columns].

  Attributes:
    leaf: position of the parameter among the flattened parameters.
    layout: where the gradient [rows, columns] lies in the parameter.
    output: shape and dtype of the rows found, and so of their perturbation.
    positions: number of lookups.
    offsets: axes of the output that run along a row.
    scale: constant that the parameter is multiplied with before use.
    dtype: of the parameter where it is used.
  """

  leaf: int
  layout: _views.Layout
  output: jax.ShapeDtypeStruct
  positions: int
  offsets: tuple[int, ...]
  scale: float
  dtype: Any

  is_lookup = True
  is_shared = False

  def columns(self, cotangent: jax.Array) -> jax.Array:
    """Returns an output cotangent as [position, columns]."""
    rest = [a for a in range(cotangent.ndim) if a not in self.offsets]
    rows = jnp.transpose(cotangent, rest + list(self.offsets))
    return self.scale * rows.reshape(self.positions, -1)


@dataclasses.dataclass(frozen=True)
class Repeated:
  """A use in the body of a scan: one for each iteration.

  Attributes:
    leaf: position of the parameter among the flattened parameters.
    site: the use in one iteration.
    length: number of iterations.
    own: where the slices of the iterations lie in the parameter, if each has
      its own; None if all share it, so that pairs of iterations count.
  """

  leaf: int
  site: "Site"
  length: int
  own: tuple[_views.Atom, ...] | None

  @property
  def is_lookup(self) -> bool:
    """Whether the parameter is looked up, not multiplied."""
    return self.site.is_lookup

  @property
  def scale(self) -> float:
    """Constant that the parameter is multiplied with before use."""
    return self.site.scale

  @property
  def dtype(self) -> Any:
    """Of the parameter where it is used."""
    return self.site.dtype

  @property
  def is_shared(self) -> bool:
    """Whether an entry of the parameter is used in several iterations."""
    return self.own is None or self.site.is_shared

  @property
  def layout(self) -> _views.Layout:
    """Own slices are groups of a product, and further rows of a lookup."""
    layout = self.site.layout
    if self.own is None:
      return layout
    if self.is_lookup:
      return dataclasses.replace(layout, rows=self.own + layout.rows)
    return dataclasses.replace(layout, groups=self.own + layout.groups)

  @property
  def output(self) -> jax.ShapeDtypeStruct:
    """Shape and dtype of all iterations' results, stacked."""
    inner = self.site.output
    return jax.ShapeDtypeStruct((self.length, *inner.shape), inner.dtype)

  @property
  def positions(self) -> int:
    """Positions of the whole scan, in each group."""
    more = self.own is None or self.is_lookup
    return self.site.positions * (self.length if more else 1)

  def columns(self, cotangent: jax.Array) -> jax.Array:
    """Returns the stacked cotangents in the form of `site.columns`."""
    return self._join(jax.vmap(self.site.columns)(cotangent))

  def join(self, records: jax.Array) -> jax.Array:
    """Returns the stacked records of the iterations as one."""
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
  equation: Any, view: _views.View, values: list[Any], position: int
) -> tuple[Dense | Lookup, Record] | None:
  """Describes the use that an equation makes of a view.

  Args:
    equation: of a jaxpr.
    view: the operand that is a parameter.
    values: all operands, as arrays.
    position: of the view among them.

  Returns:
    The use and how to record the other operand, None if it is neither a product
    with data nor a lookup of whole rows.
  """
  if equation.primitive.name == "dot_general":
    return _dense(equation, view, values[1 - position], position)
  if equation.primitive.name == "gather" and position == 0:
    return _lookup(equation, view, *values)
  return None


def _dense(
  equation: Any, view: _views.View, other: jax.Array, position: int
) -> tuple[Dense, Record] | None:
  """Describes a product of a parameter with data."""
  contracted, grouped = equation.params["dimension_numbers"]
  if not jnp.issubdtype(jnp.result_type(other), jnp.floating):
    return None
  ndim = len(view.axes)
  groups, rows = tuple(grouped[position]), tuple(contracted[position])
  free = tuple(axis for axis in range(ndim) if axis not in groups + rows)
  layout = _views.Layout(
    view.select(groups), view.select(rows), view.select(free)
  )
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


def _lookup(
  equation: Any, view: _views.View, table: jax.Array, indices: jax.Array
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
  layout = _views.Layout((), view.select((axis,)), view.select(rest))
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
    if mode == _Mode.FILL_OR_DROP:
      return jnp.where((ids >= 0) & (ids < shape[axis]), ids, -1)
    return jnp.clip(ids, 0, shape[axis] - 1)

  return site, record
