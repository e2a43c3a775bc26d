"""Views of a parameter: casts, reshapes, transposes and scalings of it.

A view is described by strides into the flat parameter. Each of its axes is a
sequence of atoms `(stride, size)`, major first. Two uses of one parameter can
then be compared without touching its values: `w` and `w.T` have the same atoms
in another order, and `w.reshape(a, b * c)` has one axis of two atoms.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["Atom", "Layout", "View", "whole"]

Atom = tuple[int, int]
"""Stride in the flat parameter, and size."""


@dataclasses.dataclass(frozen=True)
class View:
  """One parameter, seen through linear maps that only move or scale entries.

  Attributes:
    leaf: position of the parameter among the flattened parameters.
    axes: for each axis of the view its atoms, major first, sizes above 1.
    scale: the factor all entries were multiplied with.
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
    """Returns the view in another shape, or None if strides cannot say it."""
    waiting = [atom for axis in self.axes for atom in axis][::-1]
    axes = []
    for size in shape:
      axis = _take(waiting, size)
      if axis is None:
        return None
      axes.append(axis)
    return dataclasses.replace(self, axes=tuple(axes))

  def select(self, axes: tuple[int, ...]) -> tuple[Atom, ...]:
    """Returns the atoms of some axes in order, neighbours merged."""
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


def whole(leaf: int, shape: tuple[int, ...]) -> View:
  """Returns the view of a parameter that is the parameter itself."""
  strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
  axes = tuple(
    ((stride, size),) if size > 1 else ()
    for stride, size in zip(strides, shape, strict=True)
  )
  return View(leaf, axes)


@dataclasses.dataclass(frozen=True)
class Layout:
  """How a gradient in the form [groups, rows, columns] lies in a parameter."""

  groups: tuple[Atom, ...]
  rows: tuple[Atom, ...]
  columns: tuple[Atom, ...]

  def swap(self) -> "Layout":
    """Returns the layout of the transposed matrices."""
    return Layout(self.groups, self.columns, self.rows)

  @property
  def num_rows(self) -> int:
    """The number of rows."""
    return math.prod(size for _, size in self.rows)

  @property
  def num_columns(self) -> int:
    """The number of columns."""
    return math.prod(size for _, size in self.columns)

  def restore(self, matrices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Puts a gradient [groups, rows, columns] into the parameter's shape."""
    atoms = self.groups + self.rows + self.columns
    order = np.argsort([-stride for stride, _ in atoms], kind="stable")
    split = matrices.reshape([size for _, size in atoms])
    return jnp.transpose(split, [int(axis) for axis in order]).reshape(shape)
