"""Follows the examples' axis through a traced loss.

Each value of the trace is independent of the examples, or has an axis along
which entry i depends on example i alone, or is mixed: its entries depend on
several examples. A pair of example axes, as of a matrix of similarities, is
mixed once one of them is summed over. What no rule knows is unknown, and nothing
is concluded from it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from synthq_jax.optim.bookkeeping import jaxprs

__all__ = ["MIXED", "of_batch"]

NONE, MIXED, UNKNOWN = "none", "mixed", "unknown"

State = int | str
"""An axis, or one of NONE, MIXED, UNKNOWN."""

_PAIR = "pair"
_ORDER = (UNKNOWN, _PAIR, MIXED)  # the later prevails


def follow(jaxpr: Any, states: Sequence[State]) -> list[State]:
  """Returns the states of a jaxpr's outputs.

  Args:
    jaxpr: open.
    states: of its inputs.
  """
  known: dict[Any, State] = dict(zip(jaxpr.invars, states, strict=True))

  def read(atom: Any) -> State:
    return NONE if hasattr(atom, "val") else known.get(atom, NONE)

  for equation in jaxpr.eqns:
    inputs = [read(atom) for atom in equation.invars]
    outputs = _step(equation, inputs)
    known.update(zip(equation.outvars, outputs, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


def _join(states: Sequence[State]) -> State:
  """Returns the state of a function of all of them, entry by entry."""
  axes = {state for state in states if isinstance(state, int)}
  others = [state for state in states if isinstance(state, str)]
  worst = [state for state in _ORDER if state in others]
  if len(axes) > 1:
    worst.append(_PAIR if worst != [MIXED] else MIXED)
  if worst:
    return max(worst, key=_ORDER.index)
  return axes.pop() if axes else NONE


def _step(equation: Any, states: list[State]) -> list[State]:
  """Returns the states of one equation's results."""
  count = len(equation.outvars)
  joined = _join(states)
  if joined == NONE:
    return [NONE] * count
  name = equation.primitive.name
  if name == "scan":
    return _scan(equation, states)
  inner = jaxprs.inner(equation)
  if len(inner) == 1 and len(inner[0].invars) == len(states):
    return follow(inner[0], states)  # jit, remat, custom derivatives
  if inner:
    return [MIXED if joined == MIXED else UNKNOWN] * count
  if joined == MIXED:
    return [MIXED] * count
  if joined == UNKNOWN:
    return [UNKNOWN] * count
  if name == "dot_general" and _PAIR not in states:
    return [_dot(equation, states)]
  if joined == _PAIR:
    return [_of_pair(equation, name)] * count
  if name in _RULES:
    return [_RULES[name](equation, states, joined)] * count
  if name.startswith(("reduce_", "arg")) and "axes" in equation.params:
    return [_reduced(joined, equation.params["axes"])] * count
  return [_elementwise(equation, states, joined)] * count


def _elementwise(equation: Any, states: list[State], axis: int) -> State:
  """Of a function whose operands with examples have the results' shape."""
  shapes = {
    atom.aval.shape
    for atom, state in zip(equation.invars, states, strict=True)
    if state != NONE
  }
  shapes |= {var.aval.shape for var in equation.outvars}
  return axis if len(shapes) == 1 else UNKNOWN


def _of_pair(equation: Any, name: str) -> State:
  """Of a matrix with two axes of examples: sums over either mix them."""
  if name.startswith("reduce_") and name != "reduce_precision":
    return MIXED
  same = equation.invars[0].aval.shape == equation.outvars[0].aval.shape
  return _PAIR if same else UNKNOWN


def _reduced(axis: int, axes: Sequence[int]) -> State:
  if axis in axes:
    return MIXED
  return axis - sum(other < axis for other in axes)


def _dot(equation: Any, states: list[State]) -> State:
  """Of a product: contracting the axis mixes, two free ones are a pair."""
  contracted, grouped = equation.params["dimension_numbers"]
  sides = []
  for side, state in enumerate(states):
    if state == NONE:
      continue
    if state in contracted[side]:
      return MIXED
    if state in grouped[side]:
      sides.append(tuple(grouped[side]).index(state))
      continue
    used = set(contracted[side]) | set(grouped[side])
    free = [a for a in range(equation.invars[side].aval.ndim) if a not in used]
    place = len(grouped[side]) + free.index(state)
    if side == 1:
      first = equation.invars[0].aval.ndim
      place += first - len(contracted[0]) - len(grouped[0])
    sides.append(place)
  return sides[0] if len(set(sides)) == 1 else _PAIR


def _broadcast(equation: Any, states: list[State], axis: int) -> State:
  return equation.params["broadcast_dimensions"][axis]


def _transpose(equation: Any, states: list[State], axis: int) -> State:
  return tuple(equation.params["permutation"]).index(axis)


def _reshape(equation: Any, states: list[State], axis: int) -> State:
  """The axis that has the same size and as many entries before it."""
  before, after = (
    atom.aval.shape for atom in (equation.invars[0], equation.outvars[0])
  )
  for place, size in enumerate(after):
    if size == before[axis] and math.prod(after[:place]) == math.prod(
      before[:axis]
    ):
      return place
  return UNKNOWN


def _squeeze(equation: Any, states: list[State], axis: int) -> State:
  return axis - sum(other < axis for other in equation.params["dimensions"])


def _expand(equation: Any, states: list[State], axis: int) -> State:
  for other in sorted(equation.params["dimensions"]):
    axis += other <= axis
  return axis


def _along(name: str) -> Callable[..., State]:
  """Of functions along one axis, which mix what lies along it."""

  def rule(equation: Any, states: list[State], axis: int) -> State:
    return MIXED if equation.params[name] == axis else axis

  return rule


def _concatenate(equation: Any, states: list[State], axis: int) -> State:
  return UNKNOWN if equation.params["dimension"] == axis else axis


def _same_size(equation: Any, states: list[State], axis: int) -> State:
  """Of parts of arrays: those that have all examples."""
  before, after = (
    atom.aval.shape for atom in (equation.invars[0], equation.outvars[0])
  )
  whole = len(before) == len(after) and before[axis] == after[axis]
  return axis if whole and states[0] == axis else UNKNOWN


def _gather(equation: Any, states: list[State], axis: int) -> State:
  """Of lookups by examples in what does not depend on them."""
  if states[0] != NONE:
    return UNKNOWN
  offsets = equation.params["dimension_numbers"].offset_dims
  places = range(equation.outvars[0].aval.ndim)
  return [place for place in places if place not in offsets][axis]


def _convolution(equation: Any, states: list[State], axis: int) -> State:
  numbers = equation.params["dimension_numbers"]
  of_examples = states[1] == NONE and numbers.lhs_spec[0] == axis
  return numbers.out_spec[0] if of_examples else UNKNOWN


def _unknown(equation: Any, states: list[State], axis: int) -> State:
  return UNKNOWN


_RULES: dict[str, Callable[..., State]] = {
  "broadcast_in_dim": _broadcast,
  "transpose": _transpose,
  "reshape": _reshape,
  "squeeze": _squeeze,
  "expand_dims": _expand,
  "concatenate": _concatenate,
  "slice": _same_size,
  "dynamic_slice": _same_size,
  "pad": _same_size,
  "gather": _gather,
  "conv_general_dilated": _convolution,
  "cumsum": _along("axis"),
  "cumprod": _along("axis"),
  "cummax": _along("axis"),
  "cummin": _along("axis"),
  "cumlogsumexp": _along("axis"),
  "sort": _along("dimension"),
  "rev": _unknown,
  "while": _unknown,
  "cond": _unknown,
}


def _scan(equation: Any, states: list[State]) -> list[State]:
  """Follows the body of a scan until its carries stay what they are."""
  consts, carries = (equation.params[n] for n in ("num_consts", "num_carry"))
  (body,) = jaxprs.inner(equation)
  first = consts + carries
  slices = []
  for state in states[first:]:
    is_axis = isinstance(state, int)
    if is_axis and state == 0:  # one example after the other
      return [UNKNOWN] * len(equation.outvars)
    slices.append(state - 1 if is_axis else state)
  carry = list(states[consts:first])
  while True:
    outputs = follow(body, [*states[:consts], *carry, *slices])
    joined = [
      _join(pair) for pair in zip(carry, outputs[:carries], strict=True)
    ]
    if joined == carry:
      break
    carry = joined
  stacked = [
    state + 1 if isinstance(state, int) else state
    for state in outputs[carries:]
  ]
  return [*carry, *stacked]


def of_batch(closed: Any, num_params: int) -> list[State]:
  """Returns the states of a loss's results, of parameters and a batch.

  Args:
    closed: its trace; the parameters' leaves come first, and every other
      argument has the examples as its first axis, but for keys.
    num_params: how many leaves the parameters have.
  """
  inputs = closed.jaxpr.invars
  states: list[State] = [NONE] * num_params
  states += [
    0
    if var.aval.ndim
    and not jax.dtypes.issubdtype(var.aval.dtype, jax.dtypes.prng_key)
    else NONE
    for var in inputs[num_params:]
  ]
  return follow(closed.jaxpr, states)
