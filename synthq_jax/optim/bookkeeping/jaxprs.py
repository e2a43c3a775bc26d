"""Reads jaxprs, with those inside of their equations."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

__all__ = [
  "COMPILED",
  "WRITTEN_OUT",
  "Products",
  "convolves_in_loops",
  "count_products",
  "equations",
  "half_precision",
  "inner",
  "primitives",
]


def inner(equation: Any) -> list[Any]:
  """Returns the open jaxprs among an equation's parameters."""
  found = []
  for value in equation.params.values():
    for each in value if isinstance(value, (tuple, list)) else (value,):
      if isinstance(each, core.ClosedJaxpr):
        found.append(each.jaxpr)
      elif isinstance(each, core.Jaxpr):
        found.append(each)
  return found


def equations(jaxpr: Any) -> Iterator[Any]:
  """Yields all equations of an open jaxpr; inner ones follow their own."""
  for equation in jaxpr.eqns:
    yield equation
    for each in inner(equation):
      yield from equations(each)


def primitives(jaxpr: Any) -> set[str]:
  """Returns the names of a jaxpr's primitives, those of its inner ones too."""
  return {equation.primitive.name for equation in equations(jaxpr)}


def half_precision(jaxpr: Any) -> str | None:
  """Returns the first dtype of half precision that a jaxpr computes in."""
  for equation in equations(jaxpr):
    for var in equation.outvars:
      dtype = getattr(var.aval, "dtype", None)
      if dtype in (jnp.bfloat16, jnp.float16):
        return str(dtype)
  return None


WRITTEN_OUT = 32
"""Turns up to which a loop is written out."""
COMPILED = 4096
"""Equations, of all turns together, that are compiled in some ten seconds; three
times as many, of a ResNet, took three minutes."""
CONVOLVED = 0.005
"""Share of the work from which on convolutions keep it out of loops: with less,
twenty times as slow costs a tenth, which microbatches of a loop bring in."""


def convolves_in_loops(function: Any, *arguments: Any, turns: int) -> bool:
  """Says whether the turns of a loop should be written out, one by one.

  XLA runs a convolution in a loop on CPUs some twenty times slower than outside.

  >>> convolves_in_loops(jnp.dot, jnp.ones(3), jnp.ones(3), turns=4)
  False

  Args:
    function: what a turn computes, or as much of it as tells.
    *arguments: of the function; arrays or shapes.
    turns: of the loop.
  """
  if jax.default_backend() != "cpu" or not 1 < turns <= WRITTEN_OUT:
    return False
  return count_products(jax.make_jaxpr(function)(*arguments).jaxpr).convolves


class Products(NamedTuple):
  """The matrix products and convolutions of a jaxpr."""

  flops: float
  """Two for each product of two numbers that is added to a sum."""
  traffic_bytes: float
  """Results, written and read once."""
  equations: float
  """Of every kind, as often as they are evaluated."""
  convolution_flops: float
  """The part of `flops` that convolutions have."""

  @property
  def convolves(self) -> bool:
    """Whether convolutions are more than a trifle of the work.

    The one that cuts a picture into patches for a transformer is a trifle: .35% of
    the work of six layers.
    """
    return self.convolution_flops > CONVOLVED * self.flops


def count_products(jaxpr: Any) -> Products:
  """Counts the products of a jaxpr, those of its inner jaxprs too.

  Args:
    jaxpr: an open jaxpr.

  Returns:
    The counts. Of branches the most expensive counts; a `while` loop counts
    once.
  """
  flops = traffic = total = convolved = 0.0
  for equation in jaxpr.eqns:
    depth = _depth(equation)
    if depth:
      output = equation.outvars[0].aval
      flops += 2.0 * depth * output.size
      if equation.primitive.name == "conv_general_dilated":
        convolved += 2.0 * depth * output.size
      traffic += 2.0 * output.size * output.dtype.itemsize
    parts = [count_products(each) for each in inner(equation)]
    if equation.primitive.name == "cond":
      parts = [max(parts)]
    repeats = equation.params.get("length", 1)
    flops += repeats * sum(each.flops for each in parts)
    traffic += repeats * sum(each.traffic_bytes for each in parts)
    total += 1 + repeats * sum(each.equations for each in parts)
    convolved += repeats * sum(each.convolution_flops for each in parts)
  return Products(flops, traffic, total, convolved)


def _depth(equation: Any) -> int:
  """Returns how many products make one entry of a result, 0 for none."""
  name, params = equation.primitive.name, equation.params
  if name == "dot_general":
    (contracted, _), _ = params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return math.prod(shape[axis] for axis in contracted)
  if name == "conv_general_dilated":
    kernel = equation.invars[1].aval.shape
    return math.prod(kernel) // kernel[params["dimension_numbers"].rhs_spec[0]]
  return 0
