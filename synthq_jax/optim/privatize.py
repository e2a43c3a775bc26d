"""Turns a clipped sum into a private mean: adds noise, divides by a constant."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from synthq_jax.optim import keys as keys_lib
from synthq_jax.optim import noise as noise_lib
from synthq_jax.optim.bookkeeping import devices

__all__ = [
  "Number",
  "PrivatizeState",
  "check_shapes",
  "check_whole",
  "privatize",
]

Number = float | jax.Array | Callable[[jax.Array], Any]
"""A constant, a scalar that may be traced, or a schedule: a function of the
step, as in optax."""


class PrivatizeState(NamedTuple):
  """State of `privatize`."""

  step: jax.Array  # [] int32
  noise: Any = ()  # state of the noise; () for independent noise


def privatize(
  *,
  l2_sensitivity: Number,
  noise_multiplier: Number,
  denominator: Number,
  key: jax.Array,
  noise: noise_lib.Noise | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Builds the transform from a clipped sum to a private mean.

  The update is (sum + noise) / denominator, with noise of standard deviation
  noise_multiplier x l2_sensitivity in every coordinate. The noise of step t is
  a function of the key and t alone, so a resumed run draws the same noise.

  Formal guarantee:
    Assumed: one unit moves the incoming sum by at most `l2_sensitivity` in L2
    norm, under ADD_OR_REMOVE_ONE or REPLACE_SPECIAL. Then each step is a
    Gaussian mechanism with the given noise multiplier for that unit and
    relation, and everything computed from its output is post-processing.

    `denominator` has to be public: a constant such as the expected batch size,
    never the number of examples in this batch. The key has to stay secret and
    must not be used for anything else. The noise of a step is derived from the
    key with a tag of its own, so a child of this key (`split`, `fold_in`) may
    serve another release. Gaussians are drawn in float32: attacks on the low
    bits of floating-point noise are outside this claim.

    A schedule has to be public. A traced number has to be public, or to follow
    from earlier private sums alone. The mechanism of a step then has that
    step's noise multiplier. A claim is about the least of all multipliers, or,
    for a schedule, about each step's own (`claim.Claim`). If multipliers follow
    from the data, the least one has to be declared beforehand.

    A wrapper has to pass on every update, and to read none of them itself.
    `optax.MultiSteps` with `should_skip_update_fn` decides by the sum before
    noise. `optax.conditionally_transform` passes on that sum itself in the
    steps that it skips. `optax.contrib.mechanize` and `optax.contrib.sam`
    compute with it. Nothing is claimed of these around this transform; chain
    `mechanize` and `sam` behind it. An optimizer after this transform
    that gets the loss, or a function of it (line searches, Polyak's steps,
    Hessians), would read the records again, and is refused. The transform has
    to see the whole sum: sums from which `optax.masked` or
    `optax.multi_transform` hide a part are refused, as are parts of sums or
    parameters inside of `jax.shard_map`.

  >>> import jax, jax.numpy as jnp
  >>> transform = privatize(l2_sensitivity=1.0, noise_multiplier=0.0,
  ...                       denominator=4.0, key=jax.random.key(0))
  >>> mean, state = transform.update(jnp.array([8.0]), transform.init(None))
  >>> print(mean, state.step)
  [2.] 1

  Args:
    l2_sensitivity: `grad_fn.sensitivity("ADD_OR_REMOVE_ONE")` of the clipped
      gradient, above 0. This and the next two arguments are numbers, traced
      scalars (`optax.inject_hyperparams(privatize, static_args="key")`) or
      schedules of the step. A traced or scheduled value out of range gives nan.
    noise_multiplier: standard deviation of the noise over the sensitivity, at
      least 0; 0 adds none.
    denominator: public divisor, above 0.
    key: one secret key, for the noise of all steps and nothing else. A step
      that closes over it holds it as a constant (pitfall 37). A key of a seed
      below 2^32, such as `jax.random.key(0)`, is logged.
    noise: `iid()` or `banded(...)`; None means `iid()`. Correlated noise needs
      a sampler that keeps a record's steps apart (see `banded`).

  Returns:
    An optax transform; its state holds the step count and the noise's state.

  Raises:
    TypeError: if `key` is no random key.
    ValueError: if a number is out of its range; in a call, if the update is not
      the whole sum in single precision at least, and nothing else, or the state's
      step is no integer of 32 bits.

  References:
    Abadi et al. (2016), arXiv:1607.00133, algorithm 1.
  """
  numbers: tuple[Any, ...] = (l2_sensitivity, noise_multiplier, denominator)
  fixed = [
    _check_number(name, value, above_zero=name != "noise_multiplier")
    for name, value in zip(
      ("l2_sensitivity", "noise_multiplier", "denominator"),
      numbers,
      strict=True,
    )
  ]
  if keys_lib.check("key", key):
    raise ValueError(f"expected one key, got keys of shape {key.shape}")
  keys_lib.log_guessable(key)
  noise = noise_lib.iid() if noise is None else noise

  def init_fn(params: optax.Params) -> PrivatizeState:
    check_whole(params)
    return PrivatizeState(jnp.zeros([], jnp.int32), noise.init(params))

  def update_fn(
    updates: optax.Updates,
    state: Any,  # PrivatizeState: optax's type takes any tree
    params: optax.Params | None = None,
    **extra: Any,
  ) -> tuple[optax.Updates, PrivatizeState]:
    _check_extra(extra)
    check_whole(updates, is_sum=True)
    check_shapes(updates, params)
    updates = _refuse_mapped(updates, key)
    _check_step(state.step)
    step = jnp.asarray(optax.safe_increment(state.step))
    total = jax.tree.map(lambda x: x.astype(jnp.float32), updates)
    if all(fixed):
      sensitivity, multiplier, divisor = numbers
      std = multiplier * sensitivity
    else:
      std, divisor = _evaluate_step_numbers(numbers, state.step)
      std = _refuse_mapped(std, key)  # s z and 2 s z give the sum away
    if all(fixed) and std == 0:
      mean = jax.tree.map(lambda x: x / divisor, total)
      return mean, PrivatizeState(step, state.noise)
    drawn, noise_state = noise.draw(key, state.step, updates, state.noise)
    mean = jax.tree.map(lambda x, z: (x + std * z) / divisor, total, drawn)
    return mean, PrivatizeState(step, noise_state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def check_shapes(
  updates: Any, params: Any, *, is_stacked: bool = False
) -> None:
  """Refuses per-example gradients in place of a sum, and a sum in place of them.

  Unchecked they would pass: optax adds arrays of any shapes that broadcast.

  Args:
    updates: the updates that a transform gets.
    params: the parameters; None, or of another structure: nothing is checked.
    is_stacked: whether per-example gradients [batch, ...] are expected.

  Raises:
    ValueError: if a shape is not the expected one.
  """
  if jax.tree.structure(updates) != jax.tree.structure(params):
    return
  leaves = zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True)
  for got, expected in leaves:
    if jnp.shape(got)[int(is_stacked) :] != jnp.shape(expected):
      needed = "gradients [batch, ...]" if is_stacked else "a sum"
      raise ValueError(
        f"expected {needed} with the parameters' shapes, got"
        f" {jnp.shape(got)} for {jnp.shape(expected)}: give clipped_grad's sum to"
        " privatize, and gradients [batch, ...] of examples to dp_aggregate"
      )


def _evaluate_step_numbers(
  numbers: tuple[Any, ...], step: jax.Array
) -> tuple[Any, Any]:
  """Returns the noise's standard deviation and the divisor of one step."""
  sensitivity, multiplier, divisor = (
    jnp.asarray(value(step) if callable(value) else value, jnp.float32)
    for value in numbers
  )
  std = multiplier * sensitivity
  good = (sensitivity > 0) & (multiplier >= 0) & jnp.isfinite(std)
  std = jnp.where(good, std, jnp.nan)
  good = (divisor > 0) & jnp.isfinite(divisor)
  return std, jnp.where(good, divisor, jnp.nan)


def _refuse_mapped(tree: Any, key: jax.Array) -> Any:
  """Returns the tree; refuses a `jax.vmap` over it that does not map the key."""

  @jax.custom_batching.custom_vmap
  def same(tree: Any, key: jax.Array) -> Any:
    del key
    return tree

  @same.def_vmap
  def _(size: int, mapped: Any, tree: Any, key: jax.Array) -> Any:
    del size
    if any(jax.tree.leaves(mapped[0])) and not mapped[1]:
      raise ValueError(
        "expected one sum and one noise multiplier, got several under jax.vmap and"
        " one key for all: each would get the same noise, which cancels; build"
        " the transform inside the mapped function, with a key for each"
      )
    return tree, mapped[0]

  is_typed = jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
  return same(tree, jax.random.key_data(key) if is_typed else key)


def check_whole(tree: Any, *, is_sum: bool = False) -> None:
  """Refuses a tree with a missing part, or with leaves that are no gradients.

  Args:
    tree: a clipped sum, or parameters.
    is_sum: whether to refuse half precision, too. Rounding of a sum of many
      records moves it further than one record does.

  Raises:
    ValueError: if leaves are masked, are no floating-point arrays, differ
      between devices, or are the losses and norms that come with a sum.
  """
  if any(map(_is_beside_sum, jax.tree.leaves(tree, is_leaf=_is_beside_sum))):
    raise ValueError(
      "expected the clipped sum alone, got its losses and norms, too: write"
      " total, aux = grad_fn(...) and update(total, ...)"
    )
  nodes = jax.tree.leaves(tree, is_leaf=_is_masked)
  if any(_is_masked(node) for node in nodes):
    raise ValueError(
      "expected the whole clipped sum, got one with masked leaves, which would"
      " go on without noise: write optax.chain(privatize(...), masked or"
      " multi_transform of optimizers without privacy)"
    )
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    name = jax.tree_util.keystr(path) or "the parameter"
    dtype = getattr(leaf, "dtype", None) or type(leaf)
    if not jnp.issubdtype(dtype, jnp.floating):
      raise ValueError(
        f"expected floating-point parameters, got {name} of {dtype}, to which no"
        " noise can be added: keep it out of params"
      )
    if is_sum and jnp.finfo(dtype).bits < 32:
      raise ValueError(
        f"expected the clipped sum in float32, got {name} of {dtype}, whose"
        " rounding may move it by many clip norms when one record comes or goes:"
        " cast the updates after the noise, not the sum before it"
      )
  devices.refuse_parts(tree)


def _check_step(step: Any) -> None:
  """Refuses a step that a cast of the whole state has rounded.

  In bfloat16 256 + 1 is 256: every later step would get the noise of step 256.
  """
  dtype = jnp.result_type(step)
  if not (jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize >= 4):
    raise ValueError(
      f"expected the state's step as int32, got {dtype}, in which steps repeat and"
      " so does their noise: cast the floating-point leaves of a state alone, and"
      " restore the step"
    )


_READ_AGAIN = ("grad", "obj_fn", "value", "value_and_grad_fn", "value_fn")
"""Names of optax's further arguments that hold losses, gradients, or functions
of them."""


def _check_extra(extra: dict[str, Any]) -> None:
  """Refuses arguments through which optimizers see records without noise."""
  names = [name for name in _READ_AGAIN if extra.get(name) is not None]
  if names:
    raise ValueError(
      f"expected no {', '.join(names)} with a private sum, got some: the"
      " optimizer would read private records again; pass public values to an"
      " optimizer that is updated separately, after privatize"
    )


def _is_masked(node: Any) -> bool:
  return isinstance(node, optax.MaskedNode)


def _is_beside_sum(node: Any) -> bool:
  return getattr(node, "is_beside_sum", False) is True


def _check_number(name: str, value: Number, *, above_zero: bool = True) -> bool:
  """Refuses a number out of its range; returns False if it has no value yet."""
  dtype = getattr(value, "dtype", None)
  if getattr(dtype, "itemsize", 4) < 4:
    raise ValueError(
      f"expected {name} in single precision, got {dtype}, which rounds it;"
      " optax.inject_hyperparams takes hyperparam_dtype=jnp.float32"
    )
  if callable(value) or isinstance(value, jax.core.Tracer):
    return False
  if jnp.shape(value) == () and math.isfinite(value):
    if value > 0 or (value == 0 and not above_zero):
      return True
  least = "> 0" if above_zero else ">= 0"
  raise ValueError(
    f"expected {name} {least} and finite, got {name}={value!r}: a number, a"
    " scalar or a schedule of the step"
  )
