"""Checks that the loss of one example does not depend on the others.

Losses are compared where there are values to look at. Elsewhere the examples' axis
is followed through the traced loss: each value of the trace is independent of the
examples, or has an axis along which entry i depends on example i alone, or is
mixed: its entries depend on several examples. A pair of example axes, as of a
matrix of similarities, is mixed once one of them is summed over. What no rule
knows is unknown, and nothing is concluded from it.
"""

import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching

from synthq_jax import typing
from synthq_jax.optim.bookkeeping import devices, jaxprs

__all__ = ["check_independence", "refuse_batch_rules", "refuse_contrastive"]

_TOLERANCE = 1e-4
_HALF_TOLERANCE = 2e-2
_HALF = ("bf16[", "f16[")
_COUPLED = 1e-2

_BATCHED = {
  "custom_vmap_call": "a function with a rule of its own for jax.vmap",
  "rng_bit_generator": "random bits of a generator other than Threefry",
  "rng_uniform": "random bits that follow from no key",
}
"""Primitives that may look at several examples where one is written down."""

_COLLECTIVES = frozenset(
  [
    *("psum", "psum_invariant", "psum2", "pmax", "pmin", "ppermute"),
    *("all_gather", "all_gather_invariant", "all_to_all", "pgather"),
    *("reduce_scatter", "psum_scatter", "pbroadcast"),
  ]
)
"""Primitives that bring values of several devices together."""

_AT_ONCE = ("expand_dims", "broadcast_all", "legacy_vectorized")
"""How callbacks and foreign functions are handed several examples at once."""


def check_independence(
  loss_fn: Callable[..., jax.Array],
  params: typing.Params,
  batch: typing.Batch,
) -> None:
  """Refuses a loss in which one example moves another example's loss.

  Per-example clipping bounds what one example does to the sum of gradients
  only if no example reaches into another's loss (batch norm, in-batch
  negatives, division by the batch's number of tokens). This replaces one
  example by another and compares the losses of the rest; and it compares each
  loss with the loss of the same example alone.

  It is a test at one point: passing is evidence, not proof. Relative moves of
  up to 1e-4 count as rounding, 2e-2 where the loss computes in half precision.
  Use a loss without dropout. The message says nothing of the losses' values,
  which are as private as the batch.

  >>> import jax.numpy as jnp
  >>> check_independence(
  ...     lambda params, batch: params * batch["x"],
  ...     jnp.array(2.0), {"x": jnp.array([1.0, 2.0])})

  Args:
    loss_fn: `(params, batch)` to losses [batch], or to (losses, aux).
    params: the parameters.
    batch: arrays with a leading axis [batch], at least 2 different examples.

  Raises:
    ValueError: if another example's loss moves, or the batch cannot show it.
  """
  leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]
  size = leaves[0].shape[0]
  donor = _different_example(leaves, size)
  tolerance = _tolerance(loss_fn, params, batch)
  loss_fn = jax.jit(loss_fn)
  losses = _losses(loss_fn, params, batch)
  replaced = jax.tree.map(lambda x: jnp.asarray(x).at[0].set(x[donor]), batch)
  after = _losses(loss_fn, params, replaced)
  _compare(losses[1:], after[1:], "replaced", tolerance)
  for index in {0, donor, size - 1}:
    alone = jax.tree.map(lambda x, i=index: x[i : i + 1], batch)
    single = _losses(loss_fn, params, alone)
    _compare(losses[index : index + 1], single, "removed", tolerance)


def refuse_batch_rules(
  loss_of_one: Callable[..., jax.Array], params: typing.Params, arguments: Any
) -> bool:
  """Refuses what may couple examples that are mapped over, unseen in one.

  Every strategy takes the loss of one example and maps over the batch. That
  keeps examples apart but where a primitive's own rule is handed the whole batch
  and may, say, divide by the largest example; where the loss asks other devices
  for theirs; and where a compiler that divides the batch among devices takes
  examples for others.

  Args:
    loss_of_one: `(params, arguments)` to a scalar, for one example.
    params: the parameters.
    arguments: arrays or shapes with a leading axis [batch].

  Returns:
    Whether the loss convolves: then nothing with rows may be divided among devices.

  Raises:
    TypeError: if a parameter is no floating-point array.
    ValueError: if the loss or its gradient has such a primitive.
  """
  example = devices.first_of(arguments)
  jaxpr = jax.make_jaxpr(loss_of_one)(params, example).jaxpr
  together = jaxprs.primitives(jaxpr) & _COLLECTIVES
  if together:
    raise ValueError(
      "expected a loss of each example alone, got one with"
      f" {', '.join(sorted(together))}: it brings examples of several devices"
      " together; add up the clipped sums behind the gradient instead"
    )
  _refuse_primitives(jaxpr)
  jaxpr = jax.make_jaxpr(jax.grad(loss_of_one))(params, example).jaxpr
  _refuse_primitives(jaxpr)
  convolves = "conv_general_dilated" in jaxprs.primitives(jaxpr)
  if convolves:
    devices.refuse_divided(arguments)
  return convolves


def _refuse_primitives(jaxpr: Any) -> None:
  equations = list(jaxprs.equations(jaxpr))
  foreign = {
    one
    for one in {equation.primitive for equation in equations}
    if not _is_mapped_by_jax(one)
  }
  for equation in equations:
    name, params = equation.primitive.name, equation.params
    what = _BATCHED.get(name)
    if any(_is_odd_key(atom.aval) for atom in equation.invars):
      what = _BATCHED["rng_bit_generator"]
    if what is None and params.get("vmap_method") in _AT_ONCE:
      what = f"a call with vmap_method={params['vmap_method']!r}"
    if what is None and equation.primitive in foreign:
      what = "a primitive whose rule for jax.vmap is not JAX's own"
    if what is not None:
      raise ValueError(
        f"expected a loss of each example alone, got {what} ({name}): it is"
        " handed all examples of a batch at once and may couple them; write it"
        " in jax.numpy, with vmap_method='sequential', or with keys of Threefry"
      )


def _is_mapped_by_jax(primitive: Any) -> bool:
  """Whether JAX itself maps a primitive, or nobody does.

  A rule of another package may reduce over the mapped axis, as those behind
  `equinox.error_if` do: one example then removes all others.
  """
  tables = (batching.fancy_primitive_batchers, batching.primitive_batchers)
  rules = [
    table[primitive]
    for table in tables
    if isinstance(table, Mapping) and primitive in table
  ]
  seen = set()
  while rules:
    rule = rules.pop()
    while isinstance(rule, functools.partial):
      rule = rule.func
    module = getattr(rule, "__module__", None) or type(rule).__module__
    if module.partition(".")[0] not in ("jax", "jaxlib"):
      return False
    seen.add(id(rule))
    cells = getattr(rule, "__closure__", None) or ()
    inside = [cell.cell_contents for cell in cells]  # what JAX was given
    rules += [
      one
      for one in inside
      if isinstance(one, types.FunctionType | functools.partial)
      and id(one) not in seen
    ]
  return True


def _is_odd_key(aval: Any) -> bool:
  """Whether a value is a random key of another generator than Threefry."""
  is_key = jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)
  return is_key and str(aval.dtype) != "key<fry>"


def refuse_contrastive(
  loss_fn: Callable[..., jax.Array],
  params: typing.Params,
  batch: typing.Batch,
  key: jax.Array | None = None,
) -> None:
  """Refuses a loss that depends on the other examples of its batch.

  Where there are values to look at and no key, the losses of two examples are
  compared with those of each alone: moves of up to 1e-2, relative or absolute,
  pass. Under `jax.jit`, and with a key, the trace of the loss is followed
  instead: sums, products and statistics over the examples are seen there, unless
  they pass through what no rule knows, as a sort of all examples. So passing is
  evidence, not proof.

  Args:
    loss_fn: `(params, batch)` or `(params, batch, key)` to losses [batch].
    params: the parameters.
    batch: arrays with a leading axis [batch].
    key: of one example; given, the loss takes it.

  Raises:
    ValueError: if a loss depends on another example.
  """
  leaves = jax.tree.leaves((params, batch, key))
  if key is not None or any(
    isinstance(leaf, jax.core.Tracer) for leaf in leaves
  ):
    _refuse_mixed(loss_fn, params, batch, key)
    return
  of = jax.jit(loss_fn)
  together, *alone = (
    of(params, jax.tree.map(lambda x, part=part: x[part], batch))
    for part in (slice(0, 2), slice(0, 1), slice(1, 2))
  )
  if isinstance(together, jax.core.Tracer):  # of values that jit closes over
    _refuse_mixed(loss_fn, params, batch, key)
    return
  if together.shape != (2,) or any(loss.shape != (1,) for loss in alone):
    return
  together, alone = (
    np.asarray(x, np.float64) for x in (together, jnp.concatenate(alone))
  )
  moved = np.abs(together - alone)
  scale = np.maximum(np.maximum(np.abs(together), np.abs(alone)), 1.0)
  if np.any(moved > _COUPLED * scale):
    raise ValueError(_REFUSAL)


_REFUSAL = (
  "expected a loss of each example alone, got one that moves when another is"
  " beside it: take contrastive_clipped_grad for a contrastive loss,"
  " batch_clipped_grad for another, or remove what couples its examples"
)


def _refuse_mixed(
  loss_fn: Callable[..., jax.Array],
  params: typing.Params,
  batch: typing.Batch,
  key: jax.Array | None,
) -> None:
  """Follows the examples through the loss's trace; refuses if they mix."""
  rest = () if key is None else (key,)
  closed = jax.make_jaxpr(lambda params, batch: loss_fn(params, batch, *rest))(
    params, batch
  )
  size = jnp.shape(jax.tree.leaves(batch)[0])[0]
  if [aval.shape for aval in closed.out_avals] != [(size,)]:
    return  # a loss that is written for one example alone
  states = _states_of_batch(closed, len(jax.tree.leaves(params)))
  if _MIXED in states:
    raise ValueError(_REFUSAL)


def _tolerance(
  loss_fn: Callable[..., jax.Array],
  params: typing.Params,
  batch: typing.Batch,
) -> float:
  """Returns the relative move that counts as rounding."""
  trace = str(jax.make_jaxpr(loss_fn)(params, batch))
  is_half = any(name in trace for name in _HALF)
  return _HALF_TOLERANCE if is_half else _TOLERANCE


def _different_example(leaves: list[np.ndarray], size: int) -> int:
  """Returns the position of an example that differs from the first."""
  for index in range(1, size):
    if any((leaf[index] != leaf[0]).any() for leaf in leaves):
      return index
  raise ValueError(
    "expected a batch with 2 different examples, got none among batch="
    f"{size}: pass examples that differ from each other"
  )


def _losses(
  loss_fn: Callable[..., jax.Array],
  params: typing.Params,
  batch: typing.Batch,
) -> np.ndarray:
  size = jax.tree.leaves(batch)[0].shape[0]
  losses = loss_fn(params, batch)
  if isinstance(losses, tuple):  # with aux behind them
    losses = losses[0]
  losses = np.asarray(losses, np.float64)
  if losses.shape != (size,):
    raise ValueError(
      f"expected losses of shape ({size},), got shape={losses.shape}: "
      "return one loss for each example"
    )
  return losses


def _compare(
  before: np.ndarray, after: np.ndarray, change: str, tolerance: float
) -> None:
  scale = np.maximum(np.maximum(np.abs(before), np.abs(after)), 1e-6)
  with np.errstate(invalid="ignore"):
    close = np.abs(after - before) / scale <= tolerance
  same = (before == after) | (np.isnan(before) & np.isnan(after))
  if not np.all(close | same):
    raise ValueError(
      "expected independent losses, got a loss that moved by more than a "
      f"relative {tolerance:g} when other examples were {change}: clip this "
      "loss as a whole (batch_clipped_grad) or remove what couples its examples"
    )


_NONE, _MIXED, _UNKNOWN = "none", "mixed", "unknown"

_State = int | str
"""An axis, or one of _NONE, _MIXED, _UNKNOWN."""

_PAIR = "pair"
_ORDER = (_UNKNOWN, _PAIR, _MIXED)  # the later prevails


def _follow(jaxpr: Any, states: Sequence[_State]) -> list[_State]:
  """Returns the states of a jaxpr's outputs.

  Args:
    jaxpr: open.
    states: of its inputs.
  """
  known: dict[Any, _State] = dict(zip(jaxpr.invars, states, strict=True))

  def read(atom: Any) -> _State:
    return _NONE if hasattr(atom, "val") else known.get(atom, _NONE)

  for equation in jaxpr.eqns:
    inputs = [read(atom) for atom in equation.invars]
    outputs = _step(equation, inputs)
    known.update(zip(equation.outvars, outputs, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


def _join(states: Sequence[_State]) -> _State:
  """Returns the state of a function of all of them, entry by entry."""
  axes = {state for state in states if isinstance(state, int)}
  others = [state for state in states if isinstance(state, str)]
  worst = [state for state in _ORDER if state in others]
  if len(axes) > 1:
    worst.append(_PAIR if worst != [_MIXED] else _MIXED)
  if worst:
    return max(worst, key=_ORDER.index)
  return axes.pop() if axes else _NONE


def _step(equation: Any, states: list[_State]) -> list[_State]:
  """Returns the states of one equation's results."""
  count = len(equation.outvars)
  joined = _join(states)
  if joined == _NONE:
    return [_NONE] * count
  name = equation.primitive.name
  if name == "scan":
    return _scan(equation, states)
  inner = jaxprs.inner(equation)
  if len(inner) == 1 and len(inner[0].invars) == len(states):
    return _follow(inner[0], states)  # jit, remat, custom derivatives
  if inner:
    return [_MIXED if joined == _MIXED else _UNKNOWN] * count
  if joined == _MIXED:
    return [_MIXED] * count
  if joined == _UNKNOWN:
    return [_UNKNOWN] * count
  if name == "dot_general" and _PAIR not in states:
    return [_dot(equation, states)]
  if joined == _PAIR:
    return [_of_pair(equation, name)] * count
  if name in _RULES:
    return [_RULES[name](equation, states, joined)] * count
  if name.startswith(("reduce_", "arg")) and "axes" in equation.params:
    return [_reduced(joined, equation.params["axes"])] * count
  return [_elementwise(equation, states, joined)] * count


def _elementwise(equation: Any, states: list[_State], axis: int) -> _State:
  """Of a function whose operands with examples have the results' shape."""
  shapes = {
    atom.aval.shape
    for atom, state in zip(equation.invars, states, strict=True)
    if state != _NONE
  }
  shapes |= {var.aval.shape for var in equation.outvars}
  return axis if len(shapes) == 1 else _UNKNOWN


def _of_pair(equation: Any, name: str) -> _State:
  """Of a matrix with two axes of examples: sums over either mix them."""
  if name.startswith("reduce_") and name != "reduce_precision":
    return _MIXED
  same = equation.invars[0].aval.shape == equation.outvars[0].aval.shape
  return _PAIR if same else _UNKNOWN


def _reduced(axis: int, axes: Sequence[int]) -> _State:
  if axis in axes:
    return _MIXED
  return axis - sum(other < axis for other in axes)


def _dot(equation: Any, states: list[_State]) -> _State:
  """Of a product: contracting the axis mixes, two free ones are a pair."""
  contracted, grouped = equation.params["dimension_numbers"]
  sides = []
  for side, state in enumerate(states):
    if state == _NONE:
      continue
    if state in contracted[side]:
      return _MIXED
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


def _broadcast(equation: Any, states: list[_State], axis: int) -> _State:
  return equation.params["broadcast_dimensions"][axis]


def _transpose(equation: Any, states: list[_State], axis: int) -> _State:
  return tuple(equation.params["permutation"]).index(axis)


def _reshape(equation: Any, states: list[_State], axis: int) -> _State:
  """The axis that has the same size and as many entries before it."""
  before, after = (
    atom.aval.shape for atom in (equation.invars[0], equation.outvars[0])
  )
  for place, size in enumerate(after):
    if size == before[axis] and math.prod(after[:place]) == math.prod(
      before[:axis]
    ):
      return place
  return _UNKNOWN


def _squeeze(equation: Any, states: list[_State], axis: int) -> _State:
  return axis - sum(other < axis for other in equation.params["dimensions"])


def _expand(equation: Any, states: list[_State], axis: int) -> _State:
  for other in sorted(equation.params["dimensions"]):
    axis += other <= axis
  return axis


def _along(name: str) -> Callable[..., _State]:
  """Of functions along one axis, which mix what lies along it."""

  def rule(equation: Any, states: list[_State], axis: int) -> _State:
    return _MIXED if equation.params[name] == axis else axis

  return rule


def _concatenate(equation: Any, states: list[_State], axis: int) -> _State:
  return _UNKNOWN if equation.params["dimension"] == axis else axis


def _same_size(equation: Any, states: list[_State], axis: int) -> _State:
  """Of parts of arrays: those that have all examples."""
  before, after = (
    atom.aval.shape for atom in (equation.invars[0], equation.outvars[0])
  )
  whole = len(before) == len(after) and before[axis] == after[axis]
  return axis if whole and states[0] == axis else _UNKNOWN


def _gather(equation: Any, states: list[_State], axis: int) -> _State:
  """Of lookups by examples in what does not depend on them."""
  if states[0] != _NONE:
    return _UNKNOWN
  offsets = equation.params["dimension_numbers"].offset_dims
  places = range(equation.outvars[0].aval.ndim)
  return [place for place in places if place not in offsets][axis]


def _convolution(equation: Any, states: list[_State], axis: int) -> _State:
  numbers = equation.params["dimension_numbers"]
  of_examples = states[1] == _NONE and numbers.lhs_spec[0] == axis
  return numbers.out_spec[0] if of_examples else _UNKNOWN


def _unknown(equation: Any, states: list[_State], axis: int) -> _State:
  return _UNKNOWN


_RULES: dict[str, Callable[..., _State]] = {
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


def _scan(equation: Any, states: list[_State]) -> list[_State]:
  """Follows the body of a scan until its carries stay what they are."""
  consts, carries = (equation.params[n] for n in ("num_consts", "num_carry"))
  (body,) = jaxprs.inner(equation)
  first = consts + carries
  slices = []
  for state in states[first:]:
    is_axis = isinstance(state, int)
    if is_axis and state == 0:  # one example after the other
      return [_UNKNOWN] * len(equation.outvars)
    slices.append(state - 1 if is_axis else state)
  carry = list(states[consts:first])
  while True:
    outputs = _follow(body, [*states[:consts], *carry, *slices])
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


def _states_of_batch(closed: Any, num_params: int) -> list[_State]:
  """Returns the states of a loss's results, of parameters and a batch.

  Args:
    closed: its trace; the parameters' leaves come first, and every other
      argument has the examples as its first axis, but for keys.
    num_params: how many leaves the parameters have.
  """
  inputs = closed.jaxpr.invars
  states: list[_State] = [_NONE] * num_params
  states += [
    0
    if var.aval.ndim
    and not jax.dtypes.issubdtype(var.aval.dtype, jax.dtypes.prng_key)
    else _NONE
    for var in inputs[num_params:]
  ]
  return _follow(closed.jaxpr, states)
