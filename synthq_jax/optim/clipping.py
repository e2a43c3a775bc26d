"""Sums clipped per-example gradients behind one interface."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from synthq_jax import checks, typing
from synthq_jax.optim import auto, independence, loss_calls, strategies
from synthq_jax.optim import keys as keys_lib
from synthq_jax.optim.bookkeeping import devices, jaxprs, plans, sums
from synthq_jax.privacy import batches, sampling

__all__ = [
  "Aux",
  "ClippedGrad",
  "check_arrays",
  "check_params",
  "clipped_grad",
  "count_rows",
  "split_padding",
  "split_rows",
]

_CLIP_RANGE = (1e-12, 1e30)  # least and largest clip norm of a call


class Aux(NamedTuple):
  """Per-example values that come with a clipped sum, as private as the data.

  Attributes:
    losses: float32 [batch]; 0 for a padding example.
    norms: float32 [batch], gradient norms before clipping; 0 for a padding
      example, nan for one whose loss or gradient is not finite.
    aux: the loss's second value, with rows [batch, ...]; None without
      `has_aux`.
  """

  losses: jax.Array
  norms: jax.Array
  aux: Any = None
  is_beside_sum = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClippedGrad:
  """Sums clipped per-example gradients when it is called; see `clipped_grad`.

  Attributes: the arguments of `clipped_grad`, with their meaning there.
  """

  loss_fn: Callable[..., Any]
  l2_clip_norm: float
  strategy: str
  microbatch_size: int | None = None
  has_aux: bool = False
  argnums: int | tuple[int, ...] = 0
  batch_argnum: int = 1
  rescale_to_unit_norm: bool = False
  is_per_example = True  # clips each example by itself, whatever its position

  def __call__(
    self,
    *arguments: Any,
    key: jax.Array | None = None,
    is_padding_example: jax.Array | None = None,
    l2_clip_norm: jax.typing.ArrayLike | None = None,
  ) -> tuple[typing.Params, Aux]:
    """Returns the sum of clipped gradients and per-example losses and norms.

    Args:
      *arguments: the loss's arguments without its key: `params, batch` and
        whatever else it takes. Parameters are pytrees of floating-point arrays.
        A batch is a pytree of arrays with a common leading axis [batch]; if it
        has a field "example_id" (integers [batch]), keys are derived from it.
        Other arguments are public, or follow from earlier private sums.
      key: one key of this step, or an array of keys [batch], one for each
        example, which must not depend on the other examples. From one key the
        loss gets fold_in(key, example id) for each example, or fold_in(key,
        position) if there are no ids. None for a loss without a key.
      is_padding_example: bool [batch]; True makes an example contribute zero.
        So does the batch's own field of that name (`sampler.take`), which the
        loss does not see.
      l2_clip_norm: the clip norm of this call, in place of the declared one: a
        number or a traced scalar, public or computed from earlier private sums.
        Only with `rescale_to_unit_norm`, where the sensitivity does not depend
        on it.

    Returns:
      The sum, float32 in the structure of the differentiated arguments, and an
      `Aux`.

    Raises:
      TypeError: if a parameter is no floating-point array, or `key` is no
        random key.
      ValueError: if the batch's axes disagree, microbatch_size does not divide
        the batch, or the loss needs a key and gets none or the reverse; if the
        loss of an example depends on other examples, or a function that it
        calls may see several examples at once.
    """
    loss_calls.check_arguments(self.loss_fn, len(arguments), key is not None)
    params, whole_batch, loss_fn = self._split_arguments(arguments)
    check_params(params)
    batch, is_padding_example, size = split_rows(
      whole_batch, is_padding_example
    )
    _refuse_no_rows(size)
    devices.refuse_explicit((batch, is_padding_example))
    keys = (
      None if key is None else keys_lib.derive_example_keys(key, batch, size)
    )
    losses_fn = self._get_losses_fn(loss_fn)
    if size > 1:
      first = None if keys is None else keys[0]
      independence.refuse_contrastive(losses_fn, params, batch, first)
    has_padding = is_padding_example is not None
    if not has_padding:
      is_padding_example = jnp.zeros(size, bool)
    params = devices.vary(
      jax.tree.map(jnp.asarray, params), devices.get_axes(batch, keys)
    )
    examples = (batch,) if keys is None else (batch, keys)
    convolves, unmoved = independence.refuse_batch_rules(
      plans.make_example_loss(losses_fn), params, examples, whole_batch
    )
    independence.log_unmoved(params, unmoved)
    clip = self._get_clip_norm(l2_clip_norm)
    strategy, num_at_once = self._choose_strategy(
      losses_fn, params, examples, size
    )

    def sum_part(part: Any) -> tuple[typing.Params, Aux]:
      return self._sum_microbatch(
        strategy, loss_fn, losses_fn, clip, params, *part
      )

    total, aux = sums.add_up(
      sum_part,
      (examples, is_padding_example),
      params,
      num_at_once,
      is_unrolled=jaxprs.convolves_in_loops(
        plans.make_example_loss(losses_fn),
        params,
        devices.get_first_example(examples),
        turns=size // num_at_once,
      ),
      is_empty=(lambda part: jnp.all(part[1]))
      if has_padding and not self.has_aux
      else None,
    )
    if convolves:  # the caller may ask for divided results
      devices.refuse_divided((is_padding_example, aux))
    if self.rescale_to_unit_norm:
      total = jax.tree.map(lambda x: x / clip, total)
    return total, aux

  def sensitivity(self, relation: Any) -> float:
    """Returns the L2 sensitivity: how far one example moves the sum.

    Formal guarantee: that of `clipped_grad`. The value is attained by one
    gradient of the clip norm and, under REPLACE_ONE, by two in opposite
    directions.

    Args:
      relation: a `dp_accounting.NeighboringRelation` or its name.

    Returns:
      The clip norm, or 1 with `rescale_to_unit_norm`, for ADD_OR_REMOVE_ONE and
      REPLACE_SPECIAL, twice as much for REPLACE_ONE.

    Raises:
      ValueError: for any other relation.
    """
    norm = 1.0 if self.rescale_to_unit_norm else self.l2_clip_norm
    return 2.0 * norm if checks.relation(relation) == "REPLACE_ONE" else norm

  def _get_clip_norm(
    self, l2_clip_norm: jax.typing.ArrayLike | None
  ) -> jax.typing.ArrayLike:
    """Returns the clip norm of this call."""
    if l2_clip_norm is None:
      return self.l2_clip_norm
    if not self.rescale_to_unit_norm:
      raise ValueError(
        "expected l2_clip_norm in the call with rescale_to_unit_norm=True alone,"
        " got it without: the noise is made for the sensitivity of the declared"
        f" {self.l2_clip_norm}"
      )
    if jnp.shape(l2_clip_norm) != ():
      raise ValueError(
        "expected one l2_clip_norm for all examples, got an array of shape"
        f" {jnp.shape(l2_clip_norm)}"
      )
    if not isinstance(l2_clip_norm, jax.core.Tracer):
      checks.clip_norm(np.asarray(l2_clip_norm).item())
    return jnp.clip(jnp.asarray(l2_clip_norm, jnp.float32), *_CLIP_RANGE)

  @functools.cached_property
  def _losses(self) -> Callable[..., jax.Array]:
    """Loss without its aux: one function object, so that it is compiled once."""
    return lambda *arguments: self._split_aux(self.loss_fn(*arguments))[0]

  def _get_losses_fn(
    self, loss_fn: Callable[..., Any]
  ) -> Callable[..., jax.Array]:
    """Returns `loss_fn`, which may take fewer arguments, without its aux."""
    if loss_fn is self.loss_fn:
      return self._losses
    return lambda *arguments: self._split_aux(loss_fn(*arguments))[0]

  def _split_aux(self, value: Any) -> tuple[Any, Any]:
    """Splits a returned value of the loss into losses and aux."""
    if not self.has_aux and not isinstance(value, tuple):
      return value, None
    if self.has_aux and isinstance(value, tuple) and len(value) == 2:
      return value
    form = "(losses [batch], aux)" if self.has_aux else "losses [batch]"
    raise ValueError(
      f"expected a loss_fn that returns {form} with has_aux={self.has_aux}, got"
      f" {type(value).__name__}: has_aux=True is for losses with a second value"
    )

  def _split_arguments(
    self, arguments: Sequence[Any]
  ) -> tuple[typing.Params, typing.Batch, Callable[..., Any]]:
    """Returns parameters, batch, and the loss as a function of these two."""
    several = not isinstance(self.argnums, int)
    positions = (
      (self.argnums,) if isinstance(self.argnums, int) else self.argnums
    )
    params = tuple(arguments[i] for i in positions)
    batch = arguments[self.batch_argnum]
    loss_calls.check_batch(batch, self.batch_argnum)
    if (*positions, self.batch_argnum) == (0, 1) and len(arguments) == 2:
      return (params if several else params[0]), batch, self.loss_fn

    def loss_fn(params: Any, batch: Any, *key: jax.Array) -> Any:
      by_position = dict(enumerate(arguments))
      trained = params if several else (params,)
      by_position |= zip(positions, trained, strict=True)
      by_position[self.batch_argnum] = batch
      values = (by_position[i] for i in range(len(by_position)))
      return loss_calls.call(self.loss_fn, (*values, *key), batch, hint)

    others = set(range(len(arguments))) - {*positions, self.batch_argnum}
    hint = loss_calls.write_rows_hint(
      self.loss_fn, arguments, self.batch_argnum, others
    )
    return (params if several else params[0]), batch, loss_fn

  def _choose_strategy(
    self,
    losses_fn: Callable[..., jax.Array],
    params: typing.Params,
    examples: tuple[Any, ...],
    size: int,
  ) -> tuple[str, int]:
    """Returns the strategy and the number of examples processed at once."""
    num_at_once = self.microbatch_size or size
    if size % num_at_once:
      raise ValueError(
        "expected microbatch_size to divide the batch, got microbatch_size="
        f"{num_at_once} for a batch of {size}: choose a divisor"
      )
    if self.strategy != "auto":
      return self.strategy, num_at_once
    choice = auto.choose(
      losses_fn, params, *examples, microbatch_size=self.microbatch_size
    )
    return choice.strategy, choice.microbatch_size

  def _sum_microbatch(
    self,
    strategy: str,
    loss_fn: Callable[..., Any],
    losses_fn: Callable[..., jax.Array],
    l2_clip_norm: jax.typing.ArrayLike,
    params: typing.Params,
    examples: tuple[Any, ...],
    is_padding: jax.Array,
  ) -> tuple[typing.Params, Aux]:
    """Sums the clipped gradients of examples that are processed together."""
    total, losses, norms = strategies.STRATEGIES[strategy](
      losses_fn, params, examples, is_padding, l2_clip_norm
    )
    norms = jnp.where(
      jnp.isfinite(losses) & jnp.isfinite(norms), norms, jnp.nan
    )
    norms = jnp.where(is_padding, 0.0, norms)
    losses = jnp.where(is_padding, 0.0, losses)
    if not self.has_aux:
      return total, Aux(losses, norms)

    def call_aux(example: tuple[Any, ...]) -> Any:
      batch = jax.tree.map(lambda x: x[None], example[0])
      _, aux = self._split_aux(loss_fn(params, batch, *example[1:]))
      return jax.tree_util.tree_map_with_path(_take_only_row, aux)

    return total, Aux(losses, norms, jax.vmap(call_aux)(examples))


def clipped_grad(
  loss_fn: Callable[..., Any],
  *,
  l2_clip_norm: float,
  strategy: str = "auto",
  microbatch_size: int | None = None,
  has_aux: bool = False,
  argnums: int | Sequence[int] = 0,
  batch_argnum: int = 1,
  rescale_to_unit_norm: bool = False,
) -> ClippedGrad:
  """Builds a function that sums per-example gradients clipped to a norm.

  The sum is for `optim.privatize`, which adds noise and divides by a public
  constant; it is never divided by the size of the batch.

  Formal guarantee:
    Unit: one example, that is one entry of the batch's leading axis. Adding,
    removing or zeroing out one example moves the returned sum by at most
    `l2_clip_norm` in L2 norm; replacing one moves it by at most twice that.
    This holds for every loss that is a function of one example (and its own
    key): every strategy evaluates the loss of one example and maps it over the
    batch. An example whose loss, gradient or squared norm is not finite
    contributes zero. With `rescale_to_unit_norm` the sum is divided by the clip
    norm and the bounds are 1 and 2, whatever clip norm a call passes. That clip
    norm may depend on the examples only through private sums.

    Operations that get several mapped examples at once are refused: rules of
    `jax.custom_batching.custom_vmap`, callbacks that are not sequential, keys
    of other generators than Threefry. A loss that couples its examples is
    another loss on batches of one. It is refused if its trace shows the
    coupling, and by `check_independence`, which compares values.

    The bounds hold up to float32 rounding of the sum, whatever precision the
    loss computes in: tests hold half a percent, on CPUs, for batches of up to
    8,192. Norms from factors include a bound of their own rounding
    (`rules.compute_allowance`).

    Without ids an example's key is derived from its position: the step's key
    has to be secret. Losses, norms and aux in `Aux` are not protected. Public:
    the shapes, and so the padded batch size. Every argument of the loss other
    than the batch is public, or follows from earlier private sums.

  >>> import jax.numpy as jnp
  >>> def loss_fn(params, batch):
  ...   return 0.5 * (params - batch["x"]) ** 2
  >>> grad_fn = clipped_grad(loss_fn, l2_clip_norm=1.0)
  >>> total, aux = grad_fn(jnp.array(0.0), {"x": jnp.array([0.5, -3.0])})
  >>> print(total, aux.norms)
  0.5 [0.5 3. ]

  Args:
    loss_fn: `(params, batch)` to losses [batch]; `(params, batch, key)` if the
      call passes a key. Further arguments, such as frozen parameters or public
      negatives, stand before the key. It is always called with a batch of one
      example (and that example's own key). Only a batch that is a mapping
      carries the mask of `sampler.take`: `grad_fn(params, batch["x"])` is
      refused, but inside of a compiled function it is not, and padding counts.
      There, pass `is_padding_example=batch["is_padding_example"]`.
    l2_clip_norm: the clip norm, finite and at least 1e-12.
    strategy: "bookkeeping": one backward pass, keeps gradients in factors if
      these are smaller. "ghost": two backward passes, keeps what ordinary
      training keeps. "vmap": one backward pass, takes the memory of all
      per-example gradients. "auto": chooses for the backend by counted work and
      memory, and logs its choice (`optim.auto.choose` returns it).
    microbatch_size: examples processed at once; it must divide the batch and
      changes memory and speed only. None: all, or the choice of "auto".
    has_aux: whether the loss returns (losses [batch], aux), where aux is a tree
      of arrays [batch, ...]; it comes back as `Aux.aux`, at the cost of one
      more forward pass.
    argnums: position of the loss's argument that is differentiated, or several
      positions; their gradients are clipped together and returned as a tuple.
    batch_argnum: position of the argument whose rows are the examples.
    rescale_to_unit_norm: whether to divide the sum by the clip norm, so that
      its sensitivity is 1 and the clip norm may change from call to call.

  Returns:
    A function `(params, batch, *, key=None, is_padding_example=None,
    l2_clip_norm=None)` to `(sum, Aux)`, with a method `sensitivity(relation)`.

  Raises:
    TypeError: if `loss_fn` cannot be called like this, as the losses of
      `losses.contrastive`, which take a matrix of similarities; or if
      `l2_clip_norm` is a schedule or traced.
    ValueError: if an argument is out of its range.

  References:
    Abadi et al. (2016), arXiv:1607.00133, algorithm 1.
  """
  positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
  used = (*positions, batch_argnum)
  if not positions or len(set(used)) <= len(positions) or min(used) < 0:
    raise ValueError(
      "expected argnums and batch_argnum to be different positions >= 0, got"
      f" {argnums=} and {batch_argnum=}"
    )
  loss_calls.check_signature(loss_fn, 1 + max(used))
  if callable(l2_clip_norm) or isinstance(l2_clip_norm, jax.core.Tracer):
    raise TypeError(
      "expected a number for l2_clip_norm, got a schedule or a traced value:"
      " declare a first norm with rescale_to_unit_norm=True, and give each call"
      " its own"
    )
  checks.clip_norm(l2_clip_norm)
  if strategy != "auto" and strategy not in strategies.STRATEGIES:
    names = ", ".join(["auto", *sorted(strategies.STRATEGIES)])
    raise ValueError(f"expected a strategy among {names}, got {strategy=}")
  if microbatch_size is not None:
    checks.at_least(1, microbatch_size=microbatch_size)
  return ClippedGrad(
    loss_fn=loss_fn,
    l2_clip_norm=float(l2_clip_norm),
    strategy=strategy,
    microbatch_size=microbatch_size,
    has_aux=has_aux,
    argnums=argnums if isinstance(argnums, int) else positions,
    batch_argnum=batch_argnum,
    rescale_to_unit_norm=rescale_to_unit_norm,
  )


def check_params(params: typing.Params) -> None:
  """Refuses parameters with leaves that are no floating-point arrays.

  Raises:
    TypeError: naming the first such leaf.
  """
  for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None and isinstance(leaf, (bool, int, float, complex)):
      dtype = jnp.result_type(leaf)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
      name = jax.tree_util.keystr(path) or "it"
      kind = type(leaf).__name__ if dtype is None else dtype
      raise TypeError(
        "expected params of floating-point arrays, all of them trained, got"
        f" {name} of {kind}: split it off (equinox.partition(model,"
        " equinox.is_inexact_array), flax.nnx.split) and close over it, or give"
        " it as another argument"
      )


def _take_only_row(path: Any, leaf: Any) -> jax.Array:
  """Returns the only row of one example's aux."""
  if jnp.shape(leaf)[:1] != (1,):
    raise ValueError(
      "expected aux with rows [batch, ...], got aux"
      f"{jax.tree_util.keystr(path)} of shape {jnp.shape(leaf)} for a batch of"
      " one: no means over the batch"
    )
  return jnp.asarray(leaf)[0]


def split_padding(
  batch: typing.Batch, is_padding_example: jax.Array | None
) -> tuple[typing.Batch, jax.Array | None]:
  """Removes the padding mask from a batch of `sampler.take`.

  Args:
    batch: arrays with a leading axis [batch].
    is_padding_example: bool [batch], or None.

  Returns:
    The batch without its mask, and the union of both masks, bool [batch]; None
    without any mask.

  Raises:
    ValueError: if the two masks have different shapes, the batch has a mask
      nested in a field, or fields of `sampler.take` come without their mask.
      The last is detected outside of compiled functions alone.
  """
  if not isinstance(batch, Mapping) or sampling.IS_PADDING not in batch:
    _refuse_inner_mask(batch)
    if is_padding_example is None:
      _refuse_lost_mask(batch)
      return batch, None
    return batch, jnp.asarray(is_padding_example, bool)  # 2 counts as True
  own = jnp.asarray(batch[sampling.IS_PADDING], bool)
  rest = {name: x for name, x in batch.items() if name != sampling.IS_PADDING}
  _refuse_inner_mask(rest)
  if is_padding_example is None:
    return rest, own
  if jnp.shape(is_padding_example) != own.shape:
    raise ValueError(
      f"expected is_padding_example of shape {own.shape}, got shape="
      f"{jnp.shape(is_padding_example)}: one flag for each example"
    )
  return rest, own | jnp.asarray(is_padding_example, bool)


def _refuse_inner_mask(batch: typing.Batch) -> None:
  """Refuses a mask that would be taken for a field of the examples."""
  for path, _ in jax.tree_util.tree_flatten_with_path(batch)[0]:
    names = [getattr(key, "key", getattr(key, "name", None)) for key in path]
    if sampling.IS_PADDING in names:
      raise ValueError(
        f"expected {sampling.IS_PADDING} beside the fields of a batch that is a"
        f" mapping, got batch{jax.tree_util.keystr(path)}, which has no effect"
        f" there: pass {sampling.IS_PADDING}= to the call, and leave it out of"
        " the batch"
      )


def _refuse_lost_mask(batch: typing.Batch) -> None:
  """Refuses fields of `sampler.take` without their mask; sees no traced ones."""
  for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
    if batches.is_padded_field(leaf):
      raise ValueError(
        f"expected {sampling.IS_PADDING} with rows of sampler.take, got batch"
        f"{jax.tree_util.keystr(path)} without: pass the whole mapping, or"
        f" {sampling.IS_PADDING}=taken['{sampling.IS_PADDING}']"
      )


def _refuse_no_rows(size: int) -> None:
  if not size:
    raise ValueError(
      "expected a batch of at least one row, got none: keep its size, and mark"
      " rows that were not drawn by is_padding_example"
    )


def split_rows(
  batch: typing.Batch, is_padding_example: jax.Array | None
) -> tuple[typing.Batch, jax.Array | None, int]:
  """Removes the mask from a batch, as `split_padding`, and counts its rows.

  Args:
    batch: arrays with a leading axis [batch].
    is_padding_example: bool [batch], or None.

  Returns:
    Batch and mask as from `split_padding`, and the number of rows.

  Raises:
    TypeError: if a leaf of the batch is no array.
    ValueError: if leaves and mask have no common leading axis; see also
      `split_padding`.
  """
  batch, is_padding_example = split_padding(batch, is_padding_example)
  size = count_rows(batch)
  if is_padding_example is not None and is_padding_example.shape != (size,):
    raise ValueError(
      f"expected is_padding_example of shape ({size},), got shape="
      f"{is_padding_example.shape}: one flag for each example"
    )
  return batch, is_padding_example, size


def count_rows(batch: typing.Params) -> int:
  """Returns the length of the common leading axis of a tree of arrays.

  Raises:
    TypeError: if a leaf is no array of numbers.
    ValueError: if the leaves have no common leading axis.
  """
  check_arrays(batch)
  sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
  if len(sizes) != 1 or () in sizes:
    raise ValueError(
      "expected arrays with one common leading axis [batch], got sizes "
      f"{sorted(sizes)}: give every field one row for each example"
    )
  return sizes.pop()[0]


def check_arrays(batch: typing.Params) -> None:
  """Refuses leaves that are no arrays of numbers, by a TypeError that names one."""
  for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
    if isinstance(leaf, (batches.Batch, batches.Indices)):
      raise TypeError(
        f"expected records in batch{jax.tree_util.keystr(path)}, got a drawn"
        f" {type(leaf).__name__}: pass sampler.take(records, drawn)"
      )
    dtype = getattr(leaf, "dtype", None)
    is_text = getattr(dtype, "kind", "?") in "MOSUm"
    if is_text or (dtype is None and not isinstance(leaf, (int, float))):
      raise TypeError(
        "expected a batch of arrays, got batch"
        f"{jax.tree_util.keystr(path)} of {dtype or type(leaf).__name__}: leave"
        " it out, or make numbers of it, with a row for each example"
      )
