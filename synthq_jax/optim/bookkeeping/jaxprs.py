"""Reads jaxprs, including those inside of their equations."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

__all__ = [
  "MAX_EQUATIONS",
  "MAX_UNROLLED",
  "Products",
  "convolves_in_loops",
  "count_products",
  "count_scan_inputs",
  "find_zero_outputs",
  "get_equations",
  "get_half_precision",
  "get_inner",
  "get_primitives",
]


def get_inner(equation: Any) -> list[Any]:
  """Returns the open jaxprs among an equation's parameters."""
  jaxprs = []
  for value in equation.params.values():
    for each in value if isinstance(value, (tuple, list)) else (value,):
      if isinstance(each, core.ClosedJaxpr):
        jaxprs.append(each.jaxpr)
      elif isinstance(each, core.Jaxpr):
        jaxprs.append(each)
  return jaxprs


def count_scan_inputs(equation: Any) -> tuple[int, int]:
  """Returns the numbers of constants and of carries that a scan begins with."""
  params = equation.params
  if "num_consts" in params:  # before JAX 0.11
    return params["num_consts"], params["num_carry"]
  consts, carries, _ = params["ft_in"].unpack()
  return len(consts), len(carries)


def get_equations(jaxpr: Any) -> Iterator[Any]:
  """Yields all equations of an open jaxpr, each before those inside of it."""
  for equation in jaxpr.eqns:
    yield equation
    for each in get_inner(equation):
      yield from get_equations(each)


def get_primitives(jaxpr: Any) -> set[str]:
  """Returns the names of the primitives of a jaxpr and of those inside of it."""
  return {equation.primitive.name for equation in get_equations(jaxpr)}


def find_zero_outputs(jaxpr: Any) -> frozenset[int]:
  """Returns the positions of outputs that are zero whatever the inputs are.

  The gradient of a function with respect to what it does not use, or uses in
  `jax.lax.stop_gradient` alone, is such an output.
  """
  filled = {
    equation.outvars[0]: equation.invars[0]
    for equation in jaxpr.eqns
    if equation.primitive.name == "broadcast_in_dim"
  }
  values = [
    atom if isinstance(atom, core.Literal) else filled.get(atom)
    for atom in jaxpr.outvars
  ]
  return frozenset(
    position
    for position, value in enumerate(values)
    if isinstance(value, core.Literal) and not np.any(value.val)
  )


def get_half_precision(jaxpr: Any) -> str | None:
  """Returns the first dtype of half precision that a jaxpr computes in."""
  for equation in get_equations(jaxpr):
    for var in equation.outvars:
      dtype = getattr(var.aval, "dtype", None)
      if dtype in (jnp.bfloat16, jnp.float16):
        return str(dtype)
  return None


MAX_UNROLLED = 32
"""Largest number of iterations of a loop that is unrolled."""
MAX_EQUATIONS = 4096
"""Number of equations, over all unrolled iterations, that compile in some ten
seconds. Three times as many, of a ResNet, took three minutes."""
CONVOLUTION_SHARE = 0.005
"""Share of convolutions in the work above which loops are unrolled. Below it,
their being twenty times slower costs a tenth, which the loop's microbatches
save."""


def convolves_in_loops(function: Any, *arguments: Any, turns: int) -> bool:
  """Checks whether a loop should be unrolled because of its convolutions.

  On CPUs XLA runs a convolution in a loop some twenty times slower than
  outside.

  >>> convolves_in_loops(jnp.dot, jnp.ones(3), jnp.ones(3), turns=4)
  False

  Args:
    function: the body of the loop, or the part of it with its products.
    *arguments: arguments of the function; arrays or shapes.
    turns: number of iterations of the loop.
  """
  if jax.default_backend() != "cpu" or not 1 < turns <= MAX_UNROLLED:
    return False
  return count_products(jax.make_jaxpr(function)(*arguments).jaxpr).convolves


class Products(NamedTuple):
  """Counted work of the matrix products and convolutions of a jaxpr."""

  flops: float
  """FLOPs: two for each product of two numbers that is added to a sum."""
  traffic_bytes: float
  """Bytes of the results, written and read once."""
  equations: float
  """Number of equations of every kind, as often as they are evaluated."""
  convolution_flops: float
  """FLOPs of the convolutions, a part of `flops`."""

  @property
  def convolves(self) -> bool:
    """True if the share of convolutions is above `CONVOLUTION_SHARE`.

    The convolution that cuts a picture into patches for a transformer is below:
    0.35% of the work of six layers.
    """
    return self.convolution_flops > CONVOLUTION_SHARE * self.flops


def count_products(jaxpr: Any) -> Products:
  """Counts the products of a jaxpr and of the jaxprs inside of it.

  Args:
    jaxpr: an open jaxpr.

  Returns:
    The counts, with the most expensive of several branches and one iteration of
    a `while` loop.
  """
  flops = traffic = total = convolved = 0.0
  for equation in jaxpr.eqns:
    depth = _count_depth(equation)
    if depth:
      output = equation.outvars[0].aval
      flops += 2.0 * depth * output.size
      if equation.primitive.name == "conv_general_dilated":
        convolved += 2.0 * depth * output.size
      traffic += 2.0 * output.size * output.dtype.itemsize
    parts = [count_products(each) for each in get_inner(equation)]
    if equation.primitive.name == "cond":
      parts = [max(parts)]
    repeats = equation.params.get("length", 1)
    flops += repeats * sum(each.flops for each in parts)
    traffic += repeats * sum(each.traffic_bytes for each in parts)
    total += 1 + repeats * sum(each.equations for each in parts)
    convolved += repeats * sum(each.convolution_flops for each in parts)
  return Products(flops, traffic, total, convolved)


def _count_depth(equation: Any) -> int:
  """Counts the products in one entry of a result; 0 for other operations."""
  name, params = equation.primitive.name, equation.params
  if name == "dot_general":
    (contracted, _), _ = params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return math.prod(shape[axis] for axis in contracted)
  if name == "conv_general_dilated":
    kernel = equation.invars[1].aval.shape
    return math.prod(kernel) // kernel[params["dimension_numbers"].rhs_spec[0]]
  return 0
