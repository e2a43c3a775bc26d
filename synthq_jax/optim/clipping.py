"""Sums of clipped per-example gradients behind one interface."""

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
  "clipped_grad",
  "split_padding",
  "split_rows",
]

_CLIP_RANGE = (1e-12, 1e30)  # of clip norms that calls give


class Aux(NamedTuple):
  """Per-example values beside a clipped sum. They are as private as the data.

  Attributes:
    losses: float32 [batch]; 0 for a padding example.
    norms: float32 [batch], gradient norms before clipping; 0 for a padding
      example, nan for one whose loss or gradient is not finite.
    aux: what the loss returned beside its value, with rows [batch, ...]; None
      without `has_aux`.
  """

  losses: jax.Array
  norms: jax.Array
  aux: Any = None
  is_beside_sum = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClippedGrad:
  """A function that sums clipped per-example gradients; see `clipped_grad`.

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
  is_per_example = True  # clips each by itself, wherever its row lies

  def __call__(
    self,
    *arguments: Any,
    key: jax.Array | None = None,
    is_padding_example: jax.Array | None = None,
    l2_clip_norm: jax.typing.ArrayLike | None = None,
  ) -> tuple[typing.Params, Aux]:
    """Returns the sum of clipped gradients and per-example losses and norms.

    Args:
      *arguments: of the loss: `params, batch` and whatever else it takes, but
        for its key. Parameters are pytrees of floating-point arrays. A batch is
        a pytree of arrays with a common leading axis [batch]; if it has a field
        "example_id" (integers [batch]), keys are made from it. Other arguments
        are public, or follow from earlier private sums.
      key: one key of this step; given, the loss gets a key for each example,
        fold_in(key, example id), or by position where there are no ids. Or an
        array of keys [batch], one for each example, which then must not depend
        on the other examples.
      is_padding_example: bool [batch]; such examples contribute zero, and so do
        those that the batch's own field of that name says are padding
        (`sampler.take`), which the loss does not see.
      l2_clip_norm: in place of the declared one: a number or a traced scalar,
        public or computed from earlier private sums.
        Only with `rescale_to_unit_norm`, where the sensitivity does not depend
        on it.

    Returns:
      The sum, float32 in the structure of what is differentiated, and an `Aux`.

    Raises:
      TypeError: if a parameter is no floating-point array, or the key is none.
      ValueError: if the batch's axes disagree, microbatch_size does not divide
        the batch, the loss has no key or takes none, the loss of an example
        depends on another beside it, or what it calls may see several examples
        at once.
    """
    loss_calls.check_arguments(self.loss_fn, len(arguments), key is not None)
    params, batch, loss_fn = self._canonical(arguments)
    _check_params(params)
    batch, is_padding_example, size = split_rows(batch, is_padding_example)
    keys = None if key is None else keys_lib.of_examples(key, batch, size)
    losses_of = self._losses_of(loss_fn)
    if size > 1:
      first = None if keys is None else keys[0]
      independence.refuse_contrastive(losses_of, params, batch, first)
    has_padding = is_padding_example is not None
    if not has_padding:
      is_padding_example = jnp.zeros(size, bool)
    params = devices.vary(
      jax.tree.map(jnp.asarray, params), devices.axes_of(batch, keys)
    )
    examples = (batch,) if keys is None else (batch, keys)
    convolves = independence.refuse_batch_rules(
      plans.loss_of_one(losses_of), params, examples
    )
    clip = self._clip_norm(l2_clip_norm)
    strategy, together = self._choice(losses_of, params, examples, size)

    def of_part(part: Any) -> tuple[typing.Params, Aux]:
      return self._microbatch(strategy, loss_fn, losses_of, clip, params, *part)

    total, aux = sums.add_up(
      of_part,
      (examples, is_padding_example),
      params,
      together,
      is_written_out=jaxprs.convolves_in_loops(
        plans.loss_of_one(losses_of),
        params,
        devices.first_of(examples),
        turns=size // together,
      ),
      is_empty=(lambda part: jnp.all(part[1]))
      if has_padding and not self.has_aux
      else None,
    )
    if convolves:  # what comes out is divided, too, if one asks for it so
      devices.refuse_divided((is_padding_example, aux))
    if self.rescale_to_unit_norm:
      total = jax.tree.map(lambda x: x / clip, total)
    return total, aux

  def sensitivity(self, relation: Any) -> float:
    """Returns the L2 sensitivity: how far one example moves the sum.

    Formal guarantee: that of `clipped_grad`; attained by one gradient of the clip
    norm, and by two in opposite directions.

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

  def _clip_norm(
    self, given: jax.typing.ArrayLike | None
  ) -> jax.typing.ArrayLike:
    """Returns the norm to clip to in this call."""
    if given is None:
      return self.l2_clip_norm
    if not self.rescale_to_unit_norm:
      raise ValueError(
        "expected l2_clip_norm in the call with rescale_to_unit_norm=True alone,"
        " got it without: the noise is made for the sensitivity of the declared"
        f" {self.l2_clip_norm}"
      )
    if jnp.shape(given) != ():
      raise ValueError(
        "expected one l2_clip_norm for all examples, got an array of shape"
        f" {jnp.shape(given)}"
      )
    if not isinstance(given, jax.core.Tracer):
      checks.clip_norm(np.asarray(given).item())
    return jnp.clip(jnp.asarray(given, jnp.float32), *_CLIP_RANGE)

  @functools.cached_property
  def _losses(self) -> Callable[..., jax.Array]:
    """The loss without its aux: one object, so that it is compiled once."""
    return lambda *arguments: self._split_aux(self.loss_fn(*arguments))[0]

  def _losses_of(self, loss_fn: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Returns a loss, maybe one of fewer arguments, without its aux."""
    if loss_fn is self.loss_fn:
      return self._losses
    return lambda *arguments: self._split_aux(loss_fn(*arguments))[0]

  def _split_aux(self, value: Any) -> tuple[Any, Any]:
    """Returns losses and aux of what the loss returned."""
    if not self.has_aux and not isinstance(value, tuple):
      return value, None
    if self.has_aux and isinstance(value, tuple) and len(value) == 2:
      return value
    form = "(losses [batch], aux)" if self.has_aux else "losses [batch]"
    raise ValueError(
      f"expected a loss_fn that returns {form} with has_aux={self.has_aux}, got"
      f" {type(value).__name__}: has_aux=True is for losses with a second value"
    )

  def _canonical(
    self, arguments: Sequence[Any]
  ) -> tuple[typing.Params, typing.Batch, Callable[..., Any]]:
    """Returns parameters, batch, and the loss as a function of these two."""
    several = not isinstance(self.argnums, int)
    at = (self.argnums,) if isinstance(self.argnums, int) else self.argnums
    params = tuple(arguments[i] for i in at)
    batch = arguments[self.batch_argnum]
    if (*at, self.batch_argnum) == (0, 1) and len(arguments) == 2:
      return (params if several else params[0]), batch, self.loss_fn

    def loss_fn(params: Any, batch: Any, *key: jax.Array) -> Any:
      given = dict(enumerate(arguments))
      given |= zip(at, params if several else (params,), strict=True)
      given[self.batch_argnum] = batch
      values = (given[i] for i in range(len(given)))
      return loss_calls.call(self.loss_fn, (*values, *key), batch, hint)

    others = set(range(len(arguments))) - {*at, self.batch_argnum}
    hint = loss_calls.hint_of_rows(
      self.loss_fn, arguments, self.batch_argnum, others
    )
    return (params if several else params[0]), batch, loss_fn

  def _choice(
    self,
    losses_of: Callable[..., jax.Array],
    params: typing.Params,
    examples: tuple[Any, ...],
    size: int,
  ) -> tuple[str, int]:
    """Returns the strategy, and how many examples are processed at once."""
    together = self.microbatch_size or size
    if size % together:
      raise ValueError(
        "expected microbatch_size to divide the batch, got microbatch_size="
        f"{together} for a batch of {size}: choose a divisor"
      )
    if self.strategy != "auto":
      return self.strategy, together
    choice = auto.choose(
      losses_of, params, *examples, microbatch_size=self.microbatch_size
    )
    return choice.strategy, choice.microbatch_size

  def _microbatch(
    self,
    strategy: str,
    loss_fn: Callable[..., Any],
    losses_of: Callable[..., jax.Array],
    l2_clip_norm: jax.typing.ArrayLike,
    params: typing.Params,
    examples: tuple[Any, ...],
    is_padding: jax.Array,
  ) -> tuple[typing.Params, Aux]:
    """Sums the clipped gradients of examples that are processed together."""
    total, losses, norms = strategies.STRATEGIES[strategy](
      losses_of, params, examples, is_padding, l2_clip_norm
    )
    norms = jnp.where(
      jnp.isfinite(losses) & jnp.isfinite(norms), norms, jnp.nan
    )
    norms = jnp.where(is_padding, 0.0, norms)
    losses = jnp.where(is_padding, 0.0, losses)
    if not self.has_aux:
      return total, Aux(losses, norms)

    def of_one(example: tuple[Any, ...]) -> Any:
      batch = jax.tree.map(lambda x: x[None], example[0])
      _, aux = self._split_aux(loss_fn(params, batch, *example[1:]))
      return jax.tree_util.tree_map_with_path(_first_row, aux)

    return total, Aux(losses, norms, jax.vmap(of_one)(examples))


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
    Unit: one example, that is one entry of the batch's leading axis.
    Adding, removing or zeroing out one example moves the returned sum by at
    most `l2_clip_norm` in L2 norm, replacing one by at most twice that, for
    every loss that is a function of one example (and its own key): every
    strategy writes down the loss of one example and maps over the batch. What
    is handed several mapped examples at once is refused: rules of
    `jax.custom_batching.custom_vmap`, callbacks that are not sequential, keys of
    other generators than Threefry. A loss that couples its batch means something
    else; it is refused where values or the trace show that, and by
    `check_independence`. An example whose loss, gradient or squared norm is not
    finite contributes zero. Up to float32 rounding of the sum, whatever
    precision the loss computes in: tests hold half a percent, on CPUs, for
    batches of up to 8,192. Norms from factors come with a bound of their own
    rounding (`rules.allowance`). Without ids a key is made from the
    example's place: the key has to be secret. Losses, norms and aux in `Aux` are
    not protected. Public: the shapes, so also the padded batch size, and every
    argument of the loss that is no batch, or it follows from earlier private
    sums. With `rescale_to_unit_norm` the sum is divided by the clip norm, and 1
    and 2 take the place of the clip norm and twice it, whatever clip norm a
    call gives: it only must not depend on the examples but through private sums.

  >>> import jax.numpy as jnp
  >>> def loss_fn(params, batch):
  ...   return 0.5 * (params - batch["x"]) ** 2
  >>> grad_fn = clipped_grad(loss_fn, l2_clip_norm=1.0)
  >>> total, aux = grad_fn(jnp.array(0.0), {"x": jnp.array([0.5, -3.0])})
  >>> print(total, aux.norms)
  0.5 [0.5 3. ]

  Args:
    loss_fn: `(params, batch)` to losses [batch]; `(params, batch, key)` if a
      key is given in the call. Only a batch that is a mapping carries the mask
      of `sampler.take`: `grad_fn(params, batch["x"])` is refused, and counts
      padding inside of a compiled function, where nothing shows it, unless
      the call gives `is_padding_example=batch["is_padding_example"]`. Further
      arguments, such as frozen parameters or public negatives, stand before the
      key. It is always called with a batch of one example (and that example's
      own key).
    l2_clip_norm: the clip norm, finite and at least 1e-12.
    strategy: "bookkeeping" (one backward pass, gradients kept in factors where
      that is less), "ghost" (two backward passes, keeps what ordinary training
      keeps), "vmap" (one backward pass, takes the memory of all per-example
      gradients) or "auto", which counts work and memory and chooses for the
      backend; it logs what it chose (`optim.auto.choose` returns it).
    microbatch_size: examples processed at once; it must divide the batch and
      changes memory and speed only. None: all; of "auto": as it chooses.
    has_aux: whether the loss returns (losses [batch], aux), where aux is a tree
      of arrays [batch, ...]; it comes back as `Aux.aux`, at the cost of one
      more forward pass.
    argnums: the argument of the loss that is differentiated, or several, whose
      gradients are clipped together and come as a tuple.
    batch_argnum: the argument that has the examples as rows.
    rescale_to_unit_norm: whether to divide the sum by the clip norm, so that its
      sensitivity is 1 and the clip norm may change from call to call.

  Returns:
    A function `(params, batch, *, key=None, is_padding_example=None,
    l2_clip_norm=None)` to `(sum, Aux)`, with a method `sensitivity(relation)`.

  Raises:
    TypeError: if `loss_fn` cannot be called so, as the losses of
      `losses.contrastive`, which take a matrix of similarities.
    ValueError: if an argument is out of its range.

  References:
    Abadi et al. (2016), arXiv:1607.00133, algorithm 1.
  """
  at = (argnums,) if isinstance(argnums, int) else tuple(argnums)
  if (
    not at or len({*at, batch_argnum}) <= len(at) or min(*at, batch_argnum) < 0
  ):
    raise ValueError(
      "expected argnums and batch_argnum to be different places from 0, got"
      f" {argnums=} and {batch_argnum=}"
    )
  loss_calls.check_signature(loss_fn, 1 + max(*at, batch_argnum))
  if callable(l2_clip_norm) or isinstance(l2_clip_norm, jax.core.Tracer):
    raise TypeError(
      "expected a number for l2_clip_norm, got a schedule or a traced value:"
      " declare a first one with rescale_to_unit_norm=True, and give each call"
      " its own"
    )
  checks.clip_norm(l2_clip_norm)
  if strategy != "auto" and strategy not in strategies.STRATEGIES:
    known = ", ".join(["auto", *sorted(strategies.STRATEGIES)])
    raise ValueError(f"expected a strategy among {known}, got {strategy=}")
  if microbatch_size is not None:
    checks.at_least(1, microbatch_size=microbatch_size)
  return ClippedGrad(
    loss_fn=loss_fn,
    l2_clip_norm=float(l2_clip_norm),
    strategy=strategy,
    microbatch_size=microbatch_size,
    has_aux=has_aux,
    argnums=argnums if isinstance(argnums, int) else at,
    batch_argnum=batch_argnum,
    rescale_to_unit_norm=rescale_to_unit_norm,
  )


def _check_params(params: typing.Params) -> None:
  """Refuses parameters with leaves that have no gradient."""
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


def _first_row(path: Any, leaf: Any) -> jax.Array:
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
  """Takes the mask out of a batch that a sampler has made.

  Args:
    batch: arrays with a leading axis [batch].
    is_padding_example: bool [batch], or None.

  Returns:
    The batch without its mask, and which rows either of the two calls padding;
    None where neither says anything.

  Raises:
    ValueError: if the two have different shapes, the batch has a mask in
      another place than beside its fields, or fields of `sampler.take` come
      without their mask. The last is seen outside of compiled functions alone.
  """
  if not isinstance(batch, Mapping) or sampling.IS_PADDING not in batch:
    _refuse_inner_mask(batch)
    if is_padding_example is None:
      _refuse_lost_mask(batch)
      return batch, None
    return batch, jnp.asarray(is_padding_example, bool)  # 2 is no other flag
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
        f" mapping, got batch{jax.tree_util.keystr(path)}, which no one would"
        f" find there: give the call {sampling.IS_PADDING}=, and leave it out of"
        " the batch"
      )


def _refuse_lost_mask(batch: typing.Batch) -> None:
  """Refuses rows of padding that nothing marks, where they can be seen."""
  for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
    if batches.is_padded_field(leaf):
      raise ValueError(
        f"expected {sampling.IS_PADDING} with rows of sampler.take, got batch"
        f"{jax.tree_util.keystr(path)} without: pass the whole mapping, or"
        f" {sampling.IS_PADDING}=taken['{sampling.IS_PADDING}']"
      )


def split_rows(
  batch: typing.Batch, is_padding_example: jax.Array | None
) -> tuple[typing.Batch, jax.Array | None, int]:
  """Takes the mask out of a batch, as `split_padding`, and counts its rows.

  Args:
    batch: arrays with a leading axis [batch].
    is_padding_example: bool [batch], or None.

  Returns:
    What `split_padding` returns, and the number of rows.

  Raises:
    TypeError: if a leaf of the batch is no array.
    ValueError: if they and the mask have no common leading axis; see also
      `split_padding`.
  """
  batch, is_padding_example = split_padding(batch, is_padding_example)
  size = _batch_size(batch)
  if is_padding_example is not None and is_padding_example.shape != (size,):
    raise ValueError(
      f"expected is_padding_example of shape ({size},), got shape="
      f"{is_padding_example.shape}: one flag for each example"
    )
  return batch, is_padding_example, size


def _batch_size(batch: typing.Batch) -> int:
  """Returns the length of the common leading axis."""
  for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
    if isinstance(leaf, (batches.Batch, batches.Indices)):
      raise TypeError(
        f"expected records in batch{jax.tree_util.keystr(path)}, got a drawn"
        f" {type(leaf).__name__}: pass sampler.take(records, drawn)"
      )
    if not isinstance(leaf, (int, float)) and not hasattr(leaf, "dtype"):
      raise TypeError(
        "expected a batch of arrays, got batch"
        f"{jax.tree_util.keystr(path)} of {type(leaf).__name__}: leave it out,"
        " or make it an array with a row for each example"
      )
  sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
  if len(sizes) != 1 or () in sizes:
    raise ValueError(
      "expected arrays with one common leading axis [batch], got sizes "
      f"{sorted(sizes)}: give every field one row for each example"
    )
  return sizes.pop()[0]
