"""Runs the trace of a loss and finds where it uses its parameters.

The loss of one example is a jaxpr. `Walk` evaluates it equation by equation
and follows each parameter through casts, reshapes, transposes, scalings and
inner functions. Where a parameter meets data in a matrix product or a lookup,
the walk adds a perturbation to the result and records the other operand: the
cotangent of the perturbation and the record together are the parameter's
gradient, kept apart as two small factors. Every other use is reported as odd.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from synthq_jax.optim import _views

__all__ = ["Dense", "Lookup", "Walk"]

_CALLS = frozenset(
  ["jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2"]
)
_RESHAPES = frozenset(["reshape", "squeeze", "expand_dims", "broadcast_in_dim"])
_SAME = frozenset(["copy", "copy_p", "sharding_constraint", "name"])
_Mode = jax.lax.GatherScatterMode


@dataclasses.dataclass(frozen=True)
class _Tracked:
  """A value of the walk that is a view of one parameter."""

  view: _views.View
  value: jax.Array


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
  """

  leaf: int
  layout: _views.Layout
  output: jax.ShapeDtypeStruct
  positions: int
  parameter_first: bool
  scale: float

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
  """

  leaf: int
  layout: _views.Layout
  output: jax.ShapeDtypeStruct
  positions: int
  offsets: tuple[int, ...]
  scale: float

  def columns(self, cotangent: jax.Array) -> jax.Array:
    """Returns an output cotangent as [position, columns]."""
    rest = [a for a in range(cotangent.ndim) if a not in self.offsets]
    rows = jnp.transpose(cotangent, rest + list(self.offsets))
    return self.scale * rows.reshape(self.positions, -1)


class Walk:
  """One evaluation of a traced loss.

  Attributes:
    sites: the uses found so far, in order: Dense or Lookup.
    records: the other operand at each site: [groups, position, rows] of a
      Dense; of a Lookup the ids [position], -1 where they are out of bounds.
    odd: for each parameter used in any other way, the first such primitive.
  """

  def __init__(self, perturbations: Sequence[jax.Array] | None = None):
    """Starts a walk; without perturbations it only finds out the sites."""
    self.sites: list[Dense | Lookup] = []
    self.records: list[jax.Array] = []
    self.odd: dict[int, str] = {}
    self._perturbations = perturbations

  def run(
    self,
    closed: Any,
    arguments: Sequence[jax.Array],
    followed: Sequence[int],
  ) -> list[jax.Array]:
    """Evaluates a closed jaxpr.

    Args:
      closed: the traced function.
      arguments: its arguments, flat.
      followed: positions of the parameters to follow among the arguments.

    Returns:
      The outputs, flat.
    """
    values = [
      _Tracked(_views.whole(index, value.shape), value)
      if index in followed
      else value
      for index, value in enumerate(arguments)
    ]
    outputs = self._evaluate(closed.jaxpr, closed.consts, values)
    return [self._plain(value, "output") for value in outputs]

  def _evaluate(
    self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]
  ) -> list[Any]:
    environment: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
      return atom.val if isinstance(atom, core.Literal) else environment[atom]

    environment.update(zip(jaxpr.constvars, consts, strict=True))
    environment.update(zip(jaxpr.invars, arguments, strict=True))
    for equation in jaxpr.eqns:
      outputs = self._step(equation, [read(atom) for atom in equation.invars])
      environment.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]

  def _step(self, equation: Any, values: list[Any]) -> list[Any]:
    """Evaluates one equation."""
    tracked = [i for i, v in enumerate(values) if isinstance(v, _Tracked)]
    if not tracked:
      return _bind(equation, values)
    name = equation.primitive.name
    if name in _CALLS:
      return self._inline(equation, values)
    if len(tracked) == 1:
      view = _view_after(equation, values, tracked[0])
      if view is not None:
        plain = [v.value if isinstance(v, _Tracked) else v for v in values]
        return [_Tracked(view, _bind(equation, plain)[0])]
      site = _site(equation, values, tracked[0])
      if site is not None:
        return [self._use(equation, values, tracked[0], *site)]
    return _bind(equation, [self._plain(value, name) for value in values])

  def _inline(self, equation: Any, values: list[Any]) -> list[Any]:
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    if isinstance(inner, core.ClosedJaxpr):
      return self._evaluate(inner.jaxpr, inner.consts, values)
    return self._evaluate(inner, (), values)

  def _plain(self, value: Any, name: str) -> Any:
    """Returns a value; one that is a parameter was used in an odd way."""
    if not isinstance(value, _Tracked):
      return value
    self.odd.setdefault(value.view.leaf, name)
    return value.value

  def _use(
    self,
    equation: Any,
    values: list[Any],
    position: int,
    site: Dense | Lookup,
    record: Callable[[jax.Array], jax.Array],
  ) -> jax.Array:
    """Records one use of a parameter and perturbs its result."""
    other = values[1 - position]
    plain = [v.value if isinstance(v, _Tracked) else v for v in values]
    output = _bind(equation, plain)[0]
    self.sites.append(site)
    self.records.append(record(other))
    if self._perturbations is None:
      return output
    return output + self._perturbations[len(self.sites) - 1]


def _bind(equation: Any, values: Sequence[Any]) -> list[Any]:
  """Evaluates an equation whose inputs are all plain arrays."""
  parameters = equation.primitive.get_bind_params(equation.params)
  functions = ()
  if isinstance(parameters, tuple):  # JAX before 0.10
    functions, parameters = parameters
  result = equation.primitive.bind(*functions, *values, **parameters)
  return list(result) if equation.primitive.multiple_results else [result]


def _view_after(
  equation: Any, values: list[Any], position: int
) -> _views.View | None:
  """Returns the view that an equation makes of a view, None if it is none."""
  name, view = equation.primitive.name, values[position].view
  output = equation.outvars[0].aval
  if name in _SAME:
    return view
  if name == "convert_element_type":
    return view if jnp.issubdtype(output.dtype, jnp.floating) else None
  if name == "transpose":
    return view.transpose(equation.params["permutation"])
  if name in _RESHAPES:
    same_size = output.size == values[position].value.size
    reordered = equation.params.get("dimensions") and name == "reshape"
    return view.reshape(output.shape) if same_size and not reordered else None
  if name == "neg":
    return view.scaled(-1.0)
  if name == "mul" or (name == "div" and position == 0):
    factor = equation.invars[1 - position]
    if isinstance(factor, core.Literal) and jnp.ndim(factor.val) == 0:
      number = float(factor.val)
      return view.scaled(number if name == "mul" else 1.0 / number)
  return None


def _site(
  equation: Any, values: list[Any], position: int
) -> tuple[Dense | Lookup, Callable[[jax.Array], jax.Array]] | None:
  """Returns the use and how to record the other operand, None if odd."""
  if equation.primitive.name == "dot_general":
    return _dense(equation, values, position)
  if equation.primitive.name == "gather" and position == 0:
    return _lookup(equation, values)
  return None


def _dense(
  equation: Any, values: list[Any], position: int
) -> tuple[Dense, Callable[[jax.Array], jax.Array]] | None:
  """Describes a product of a parameter with data."""
  contracted, grouped = equation.params["dimension_numbers"]
  view, other = values[position].view, values[1 - position]
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
  )

  def record(data: jax.Array) -> jax.Array:
    moved = jnp.transpose(data, groups + free + rows)
    return moved.reshape(-1, positions, layout.num_rows)

  return site, record


def _lookup(
  equation: Any, values: list[Any]
) -> tuple[Lookup, Callable[[jax.Array], jax.Array]] | None:
  """Describes a gather that takes whole rows along one axis of a parameter."""
  view, shape = values[0].view, values[0].value.shape
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
    positions=math.prod(jnp.shape(values[1])[:-1]),
    offsets=tuple(numbers.offset_dims),
    scale=view.scale,
  )
  mode = _Mode.from_any(equation.params["mode"])

  def record(indices: jax.Array) -> jax.Array:
    ids = indices.reshape(-1).astype(jnp.int32)
    if mode == _Mode.FILL_OR_DROP:
      return jnp.where((ids >= 0) & (ids < shape[axis]), ids, -1)
    return jnp.clip(ids, 0, shape[axis] - 1)

  return site, record
