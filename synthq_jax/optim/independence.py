"""Checks that the loss of one example does not depend on the others.

`refuse_contrastive` traces the loss for a batch of a prime size that divides no
axis of the parameters or of an example. Axes of the trace that this prime
divides hold the examples, wherever reshapes and lookups have put them. A value
that depends on the batch mixes examples if it is summed, compared, sorted or
scattered over such an axis. An operation mixes them, too, if it joins one
example's value to values of all.
"""

import functools
import itertools
import logging
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching

from synthq_jax import typing
from synthq_jax.optim.bookkeeping import devices, jaxprs

__all__ = [
  "Findings",
  "check_independence",
  "log_unmoved",
  "refuse_batch_rules",
  "refuse_contrastive",
]

_log = logging.getLogger(__name__)

_TOLERANCE = 1e-4
_HALF_TOLERANCE = 2e-2

_BATCHED = {
  "custom_vmap_call": "a function with a rule of its own for jax.vmap",
  "rng_bit_generator": "random bits of a generator other than Threefry",
  "rng_uniform": "random bits that follow from no key",
}
"""Primitives that may see several examples of a loss written for one, described."""

_COLLECTIVES = frozenset(
  [
    *("psum", "psum_invariant", "psum2", "pmax", "pmin", "ppermute"),
    *("all_gather", "all_gather_invariant", "all_to_all", "pgather"),
    *("reduce_scatter", "psum_scatter", "pbroadcast"),
  ]
)
"""Primitives that bring values of several devices together."""

_AT_ONCE = ("expand_dims", "broadcast_all", "legacy_vectorized")
"""Values of `vmap_method` that hand several examples at once to a callback."""


def check_independence(
  loss_fn: Callable[..., jax.Array],
  params: typing.Params,
  batch: typing.Batch,
) -> None:
  """Refuses a loss in which one example moves another example's loss.

  Per-example clipping bounds the effect of one example on the sum of gradients
  only if no example reaches into another's loss. Batch norm, in-batch negatives
  and division by the batch's number of tokens couple losses. This check
  replaces one example by another and compares the losses of the rest. It also
  compares the losses of up to three examples with those of the same examples
  alone.

  It is a test at one point: passing is evidence, not proof. Relative changes of
  up to 1e-4 count as rounding, 2e-2 if the loss computes in half precision. Use
  a loss without dropout. The message holds no value of a loss: losses are as
  private as the batch.

  >>> import jax.numpy as jnp
  >>> check_independence(
  ...     lambda params, batch: params * batch["x"],
  ...     jnp.array(2.0), {"x": jnp.array([1.0, 2.0])})

  Args:
    loss_fn: `(params, batch)` to losses [batch], or to (losses, aux).
    params: the parameters.
    batch: arrays with a leading axis [batch], at least 2 different examples.

  Raises:
    ValueError: if another example's loss moves, or all examples are equal.
  """
  leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]
  size = leaves[0].shape[0]
  donor = _find_different_example(leaves, size)
  tolerance = _get_tolerance(loss_fn, params, batch)
  loss_fn = jax.jit(loss_fn)
  losses = _compute_losses(loss_fn, params, batch)
  replaced = jax.tree.map(lambda x: jnp.asarray(x).at[0].set(x[donor]), batch)
  after = _compute_losses(loss_fn, params, replaced)
  _compare(losses[1:], after[1:], "replaced", tolerance)
  for index in {0, donor, size - 1}:
    example = jax.tree.map(lambda x, i=index: x[i : i + 1], batch)
    single = _compute_losses(loss_fn, params, example)
    _compare(losses[index : index + 1], single, "removed", tolerance)


class Findings(NamedTuple):
  """Findings in the traces of a loss and its gradient.

  Attributes:
    convolves: whether there is a convolution. Then no array with rows may be
      divided among devices.
    unmoved: positions of the parameters, flat, that get no gradient from any
      example.
  """

  convolves: bool
  unmoved: frozenset[int]


def refuse_batch_rules(
  example_loss: Callable[..., jax.Array],
  params: typing.Params,
  arguments: Any,
  batch: typing.Batch | None = None,
) -> Findings:
  """Refuses a loss with primitives that may couple examples under `jax.vmap`.

  Every strategy maps the loss of one example over the batch, which keeps
  examples apart, with three exceptions. A primitive's own batching rule gets
  the whole batch and may, say, divide by the largest example. A collective
  reads the examples of other devices. And the compiler loses examples of a
  batch that it divides among devices, if the loss has a convolution.

  Args:
    example_loss: `(params, arguments)` to a scalar, for one example.
    params: the parameters.
    arguments: arrays or shapes with a leading axis [batch].
    batch: the batch as the caller passed it, which the loss may read by its
      argument alone.

  Returns:
    The findings.

  Raises:
    TypeError: if a parameter is no floating-point array.
    ValueError: if the loss or its gradient has such a primitive, convolves
      over a batch that is divided among devices, or reads the whole batch.
  """
  example = devices.get_first_example(arguments)
  traced = jax.make_jaxpr(example_loss)(params, example)
  _refuse_whole_batch(traced.consts, batch)
  jaxpr = traced.jaxpr
  collectives = jaxprs.get_primitives(jaxpr) & _COLLECTIVES
  if collectives:
    raise ValueError(
      "expected a loss of each example alone, got one with"
      f" {', '.join(sorted(collectives))}: it brings examples of several devices"
      " together; add up the clipped sums after the gradient instead"
    )
  _refuse_primitives(jaxpr)
  jaxpr = jax.make_jaxpr(jax.grad(example_loss))(params, example).jaxpr
  _refuse_primitives(jaxpr)
  convolves = "conv_general_dilated" in jaxprs.get_primitives(jaxpr)
  if convolves:
    devices.refuse_divided(arguments)
  return Findings(convolves, jaxprs.find_zero_outputs(jaxpr))


def _refuse_whole_batch(constants: Sequence[Any], batch: Any) -> None:
  """Refuses a loss of one example that also reads a field of all examples.

  It sees the very arrays of the batch, not what was computed from them.
  """
  names = {
    id(leaf): jax.tree_util.keystr(path)
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]
  }
  read = [names[id(each)] for each in constants if id(each) in names]
  if read:
    raise ValueError(
      "expected a loss that reads the batch by its own argument alone, got one"
      f" that reads batch{read[0]} of all examples, by a closure or another"
      " argument: one example would move the others' gradients; take"
      " contrastive_clipped_grad for in-batch negatives"
    )


def log_unmoved(params: typing.Params, unmoved: Iterable[int]) -> None:
  """Logs parameters without a gradient, once: an optimizer moves them by noise.

  Args:
    params: the parameters.
    unmoved: positions of flat parameters, as in `Findings`.
  """
  leaves, _ = jax.tree_util.tree_flatten_with_path(params)
  names = [
    jax.tree_util.keystr(leaves[i][0])
    for i in sorted(unmoved)
    if jnp.size(leaves[i][1])
  ]
  if names:
    _log_names(tuple(names), len(leaves))


@functools.cache
def _log_names(names: tuple[str, ...], count: int) -> None:
  _log.warning(
    "%d of %d parameters get no gradient from the loss, among them %s, and a"
    " private optimizer moves them by noise alone: if they are frozen, close over"
    " them or give them as another argument",
    len(names),
    count,
    names[0] or "the only one",
  )


def _refuse_primitives(jaxpr: Any) -> None:
  equations = list(jaxprs.get_equations(jaxpr))
  foreign = {
    primitive
    for primitive in {equation.primitive for equation in equations}
    if not _is_mapped_by_jax(primitive)
  }
  for equation in equations:
    name, params = equation.primitive.name, equation.params
    fault = _BATCHED.get(name)
    if any(_is_odd_key(atom.aval) for atom in equation.invars):
      fault = _BATCHED["rng_bit_generator"]
    if fault is None and params.get("vmap_method") in _AT_ONCE:
      fault = f"a call with vmap_method={params['vmap_method']!r}"
    if fault is None and equation.primitive in foreign:
      fault = "a primitive whose rule for jax.vmap is not JAX's own"
    if fault is not None:
      raise ValueError(
        f"expected a loss of each example alone, got {fault} ({name}): it is"
        " handed all examples of a batch at once and may couple them; write it"
        " in jax.numpy, with vmap_method='sequential', or with keys of Threefry"
      )


def _is_mapped_by_jax(primitive: Any) -> bool:
  """Checks that a primitive's batching rule is JAX's own, if it has one.

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
    inside = [cell.cell_contents for cell in cells]  # functions passed to JAX
    rules += [
      value
      for value in inside
      if isinstance(value, types.FunctionType | functools.partial)
      and id(value) not in seen
    ]
  return True


def _is_odd_key(aval: Any) -> bool:
  """Checks for a random key of another generator than Threefry."""
  is_key = jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)
  return is_key and str(aval.dtype) != "key<fry>"


def refuse_contrastive(
  loss_fn: Callable[..., jax.Array],
  params: typing.Params,
  batch: typing.Batch,
  key: jax.Array | None = None,
) -> None:
  """Refuses a loss that depends on the other examples of its batch.

  The loss is traced and no value is read: the answer is the same with and
  without `jax.jit`. The check detects sums, products, statistics, sorts and
  scatters over the examples, and one example's value combined with values of
  all, or with that of a neighbour that `jnp.roll` or `[::-1]` brings. It does not
  detect that a permutation moves examples. It does not trace a loss that takes no
  batch of another size, such as one that closes over an array with a row for each
  example. So passing is evidence, not proof.

  Args:
    loss_fn: `(params, batch)` or `(params, batch, key)` to losses [batch].
    params: the parameters.
    batch: arrays with a leading axis [batch].
    key: key of one example; None for a loss without a key.

  Raises:
    ValueError: if a loss depends on another example.
  """
  leaves = jax.tree.leaves((params, batch))
  axes = {size for leaf in leaves for size in jnp.shape(leaf) if size}
  size = len(jax.tree.leaves(batch)[0])
  # A loss may need a multiple of its batch, or no more rows than its tables have.
  for primes, times in ((_PRIMES, 1), (_PRIMES, size), (_SMALL_PRIMES, 1)):
    verdicts = (
      _trace_mixing(loss_fn, params, batch, key, prime, times)
      for prime in primes
      if all(axis % prime for axis in axes)
    )
    # Two have to agree: one may divide an axis by chance.
    clear = (verdict for verdict in verdicts if verdict is not None)
    agreed = [*itertools.islice(clear, 2)]
    if agreed and all(agreed):
      raise ValueError(_REFUSAL)
    if agreed:
      return


_REFUSAL = (
  "expected a loss of each example alone, got one that moves when another is"
  " beside it: take contrastive_clipped_grad for a contrastive loss,"
  " batch_clipped_grad for another, or remove what couples its examples"
)


_PRIMES = (101, 103, 107, 109, 113, 127, 131, 137)
_SMALL_PRIMES = (61, 59, 53, 47, 43, 41, 37, 31)
"""Sizes of batches for which losses are traced."""


def _trace_mixing(
  loss_fn: Callable[..., jax.Array],
  params: typing.Params,
  batch: typing.Batch,
  key: jax.Array | None,
  prime: int,
  times: int,
) -> bool | None:
  """Traces a loss of prime * times examples; returns True if it mixes them.

  None: the loss takes no such batch.
  """
  rest, size = () if key is None else (key,), prime * times

  def resize(x: Any) -> jax.Array:
    return jnp.broadcast_to(x[:1], (size, *x.shape[1:]))

  try:
    examples = jax.eval_shape(lambda batch: jax.tree.map(resize, batch), batch)
    closed: Any = jax.make_jaxpr(
      lambda params, batch: loss_fn(params, batch, *rest)
    )(params, examples)
  except Exception:
    return None  # the call itself reports other errors
  if [aval.shape for aval in closed.out_avals] != [(size,)]:
    return False  # a loss that is written for one example alone
  levels = [_PUBLIC] * len(jax.tree.leaves(params))
  levels += [_OF_EXAMPLES] * len(jax.tree.leaves(batch))
  return _MIXED in _get_levels(closed.jaxpr, levels, prime)


def _get_tolerance(
  loss_fn: Callable[..., jax.Array],
  params: typing.Params,
  batch: typing.Batch,
) -> float:
  """Returns the relative change that counts as rounding."""
  jaxpr = jax.make_jaxpr(loss_fn)(params, batch).jaxpr
  return _HALF_TOLERANCE if jaxprs.get_half_precision(jaxpr) else _TOLERANCE


def _find_different_example(leaves: list[np.ndarray], size: int) -> int:
  """Returns the position of an example that differs from the first."""
  for index in range(1, size):
    if any((leaf[index] != leaf[0]).any() for leaf in leaves):
      return index
  raise ValueError(
    "expected a batch with 2 different examples, got none among batch="
    f"{size}: pass examples that differ from each other"
  )


def _compute_losses(
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


_PUBLIC, _OF_EXAMPLES, _MOVED, _MIXED = range(4)
"""Levels of a value: independent of the batch; dependent on it; likewise, with
examples in other rows; certainly dependent on several examples in one entry. A
result has the largest level of its operands. An operand with moved examples and
one without make it the last."""


def _get_levels(
  jaxpr: Any, levels: Sequence[int], size: int, *, in_turn: bool = False
) -> list[int]:
  """Returns the levels of an open jaxpr's outputs, from those of its inputs.

  With `in_turn`, in a loop that may take the examples one after the other, a
  value without an axis of examples belongs to the example of the iteration.
  """
  environment = dict(zip(jaxpr.invars, levels, strict=True))

  def read(atom: Any) -> int:
    # Literals are not hashable in all versions, variables are.
    return _PUBLIC if hasattr(atom, "val") else environment.get(atom, _PUBLIC)

  for equation in jaxpr.eqns:
    inputs = [read(atom) for atom in equation.invars]
    outputs = _get_output_levels(equation, inputs, size, in_turn)
    environment.update(zip(equation.outvars, outputs, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


def _get_output_levels(
  equation: Any, levels: list[int], size: int, in_turn: bool
) -> list[int]:
  """Returns the levels of one equation's results."""
  name, params = equation.primitive.name, equation.params
  inner, largest = jaxprs.get_inner(equation), max(levels, default=_PUBLIC)
  if largest == _PUBLIC:
    return [_PUBLIC] * len(equation.outvars)
  if name == "cond":
    which, *rest = levels
    if params.get("branches_platforms"):  # equal results on every platform
      inner = inner[-1:]
    branches = [
      _get_levels(each, rest, size, in_turn=in_turn) for each in inner
    ]
    which = _MIXED if which == _MIXED else _PUBLIC
    return [max(which, *each) for each in zip(*branches, strict=True)]
  if name == "while":  # ignores its condition: the slowest example decides it
    first, count = params["cond_nconsts"], params["body_nconsts"]
    body, levels = params["body_jaxpr"].jaxpr, levels[first:]
    return _follow_loop(
      body, levels, slice(count, len(levels)), size, in_turn=True
    )
  if name == "scan":
    start, count = jaxprs.count_scan_inputs(equation)
    carried = slice(start, start + count)
    if params["length"] % size:
      return _follow_loop(inner[0], levels, carried, size, in_turn=in_turn)
    before = levels[carried]
    after = _follow_loop(inner[0], levels, carried, size, in_turn=True)
    for index, atom in enumerate(equation.invars[carried]):
      if before[index] < after[index] and not _has_examples(
        atom.aval.shape, size
      ):
        levels[start + index] = _MIXED  # passed from one example to the next
    return _follow_loop(inner[0], levels, carried, size, in_turn=True)
  if len(inner) == 1 and len(inner[0].invars) == len(levels):
    # Jit, remat and custom derivatives.
    return _get_levels(inner[0], levels, size, in_turn=in_turn)
  if largest != _MIXED and (
    _reduces_examples(equation, levels, size)
    or not in_turn
    and _combines_one_with_all(equation, levels, size)
    or {_OF_EXAMPLES, _MOVED}.issubset(levels)
  ):
    largest = _MIXED
  elif largest != _MIXED and _moves_examples(equation, levels, size):
    largest = _MOVED
  return [largest] * len(equation.outvars)


def _follow_loop(
  body: Any, levels: Sequence[int], carried: slice, size: int, *, in_turn: bool
) -> list[int]:
  """Follows a loop's body until the levels of its carry stay the same."""
  levels = list(levels)
  while True:
    outputs = _get_levels(body, levels, size, in_turn=in_turn)
    carries = levels[carried]
    joined = list(map(max, carries, outputs[: len(carries)]))
    if joined == carries:
      return [*carries, *outputs[len(carries) :]]
    levels[carried] = joined


def _has_examples(shape: Sequence[int], size: int) -> bool:
  """Checks whether an axis holds the examples."""
  return any(n and n % size == 0 for n in shape)


_MOVES = frozenset(
  ["concatenate", "dynamic_slice", "dynamic_update_slice", "gather"]
)
"""Primitives that may write, or look up, one example at its own index."""


def _combines_one_with_all(equation: Any, levels: list[int], size: int) -> bool:
  """Checks whether one example's value is combined with values of all examples."""
  name = equation.primitive.name
  if name in _MOVES or name.startswith("scatter"):
    return False
  sides = {
    _has_examples(atom.aval.shape, size)
    for level, atom in zip(levels, equation.invars, strict=True)
    if level
  }
  if name == "broadcast_in_dim":
    sides.add(_has_examples(equation.outvars[0].aval.shape, size))
  return len(sides) == 2


def _moves_examples(equation: Any, levels: list[int], size: int) -> bool:
  """Checks whether an equation turns the examples around, or rolls them.

  `jnp.roll` joins the two parts of an axis in the other order.
  """
  name, params = equation.primitive.name, equation.params
  shapes = [atom.aval.shape for atom in equation.invars]
  if name == "rev":
    return _has_examples([shapes[0][i] for i in params["dimensions"]], size)
  if name != "concatenate" or len(shapes) != 2 or not all(levels):
    return False
  first, second = (shape[params["dimension"]] for shape in shapes)
  return first % size > 0 and (first + second) % size == 0


def _reduces_examples(equation: Any, levels: list[int], size: int) -> bool:
  """Checks whether an equation combines entries along an axis of examples."""
  name, params = equation.primitive.name, equation.params
  if name.startswith("scatter"):
    return _scatters_examples(equation, levels, size)
  sides: Sequence[Sequence[int]] = [()] * len(levels)
  if name == "dot_general":
    sides = params["dimension_numbers"][0]
  elif name.startswith(("reduce_", "arg")) and "axes" in params:
    sides = [params["axes"]] * len(levels)
  elif name.startswith("cum"):
    sides = [(params["axis"],)] * len(levels)
  elif name == "sort":
    sides = [(params["dimension"],)] * len(levels)
  return any(
    level and _has_examples([atom.aval.shape[axis] for axis in axes], size)
    for level, atom, axes in zip(levels, equation.invars, sides, strict=True)
  )


def _scatters_examples(equation: Any, levels: list[int], size: int) -> bool:
  """Checks whether several examples are scattered to rows that no example owns.

  An operand with an axis of examples is assumed to keep each in its own row.
  """
  operand, _, updates = (atom.aval.shape for atom in equation.invars)
  window = equation.params["dimension_numbers"].update_window_dims
  written = [n for axis, n in enumerate(updates) if axis not in window]
  return (
    max(levels[1:]) > _PUBLIC
    and _has_examples(written, size)
    and not _has_examples(operand, size)
  )
