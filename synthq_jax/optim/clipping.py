"""Sums of clipped per-example gradients behind one interface."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp

from synthq_jax import typing
from synthq_jax.optim import auto, independence, strategies
from synthq_jax.optim.bookkeeping import devices, plans, rules
from synthq_jax.privacy import _checks, sampling

__all__ = [
  "Aux",
  "ClippedGrad",
  "clipped_grad",
  "split_padding",
  "sum_sensitivity",
]

_Relation = dp_accounting.NeighboringRelation


class Aux(NamedTuple):
  """Per-example values beside a clipped sum. They are as private as the data.

  Attributes:
    losses: float32 [batch]; 0 for a padding example.
    norms: float32 [batch], gradient norms before clipping; 0 for a padding
      example, nan for one whose loss or gradient is not finite.
  """

  losses: jax.Array
  norms: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClippedGrad:
  """A function that sums clipped per-example gradients; see `clipped_grad`.

  Attributes:
    loss_fn: `(params, batch)` or `(params, batch, key)` to losses [batch].
    l2_clip_norm: the largest norm that one example contributes.
    strategy: "auto", "vmap", "bookkeeping" or "ghost".
    microbatch_size: examples processed at once, or None for all.
  """

  loss_fn: Callable[..., jax.Array]
  l2_clip_norm: float
  strategy: str
  microbatch_size: int | None = None

  def __call__(
    self,
    params: typing.Params,
    batch: typing.Batch,
    *,
    key: jax.Array | None = None,
    is_padding_example: jax.Array | None = None,
  ) -> tuple[typing.Params, Aux]:
    """Returns the sum of clipped gradients and per-example losses and norms.

    Args:
      params: pytree of floating-point arrays.
      batch: arrays with a common leading axis [batch]. If it has a field
        "example_id" (integers [batch]), keys are made from it.
      key: key of this step; given, the loss gets a key for each example,
        fold_in(key, example id), or by position where there are no ids.
      is_padding_example: bool [batch]; such examples contribute zero, and so do
        those that the batch's own field of that name says are padding
        (`sampler.take`), which the loss does not see.

    Returns:
      The sum, float32 in the structure of `params`, and an `Aux`.

    Raises:
      ValueError: if the batch's axes disagree, microbatch_size does not divide
        the batch, the loss of an example depends on another beside it, or what
        it calls may see several examples at once.
    """
    batch, is_padding_example = split_padding(batch, is_padding_example)
    size = _batch_size(batch)
    keys = None if key is None else _example_keys(key, batch, size)
    if size > 1:
      first = None if keys is None else keys[0]
      independence.refuse_contrastive(self.loss_fn, params, batch, first)
    if is_padding_example is None:
      is_padding_example = jnp.zeros(size, bool)
    if is_padding_example.shape != (size,):
      raise ValueError(
        f"expected is_padding_example of shape ({size},), got shape="
        f"{is_padding_example.shape}: one flag for each example"
      )
    params = devices.vary(
      jax.tree.map(jnp.asarray, params), devices.axes_of(batch, keys)
    )
    arguments = (batch,) if keys is None else (batch, keys)
    independence.refuse_batch_rules(
      plans.loss_of_one(self.loss_fn), params, arguments
    )
    if self.microbatch_size in (None, size):
      return self._microbatch(params, arguments, is_padding_example)
    return self._scan(params, (arguments, is_padding_example), size)

  def sensitivity(self, relation: _Relation) -> float:
    """Returns the L2 sensitivity of the sum, as `sum_sensitivity` says.

    Args:
      relation: a dp_accounting.NeighboringRelation.
    """
    return sum_sensitivity(self.l2_clip_norm, relation)

  def _microbatch(
    self,
    params: typing.Params,
    arguments: tuple[Any, ...],
    is_padding: jax.Array,
  ) -> tuple[typing.Params, Aux]:
    """Sums the clipped gradients of examples that are processed together."""
    strategy = self.strategy
    if strategy == "auto":
      strategy = auto.choose(self.loss_fn, params, *arguments).strategy
    total, losses, norms = strategies.STRATEGIES[strategy](
      self.loss_fn, params, arguments, is_padding, self.l2_clip_norm
    )
    norms = jnp.where(
      jnp.isfinite(losses) & jnp.isfinite(norms), norms, jnp.nan
    )
    norms = jnp.where(is_padding, 0.0, norms)
    return total, Aux(jnp.where(is_padding, 0.0, losses), norms)

  def _scan(
    self, params: typing.Params, examples: Any, size: int
  ) -> tuple[typing.Params, Aux]:
    """Processes one microbatch after the other."""
    if size % self.microbatch_size:
      raise ValueError(
        "expected microbatch_size to divide the batch, got microbatch_size="
        f"{self.microbatch_size} for a batch of {size}: choose a divisor"
      )
    split = jax.tree.map(
      lambda x: x.reshape(-1, self.microbatch_size, *x.shape[1:]), examples
    )

    def body(carry: Any, part: Any) -> tuple[Any, Aux]:
      partial, aux = self._microbatch(params, *part)
      return rules.add_exactly(*carry, partial), aux

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
    zeros = devices.vary(zeros, devices.axes_of(params))
    (total, lost), aux = jax.lax.scan(body, (zeros, zeros), split)
    total = jax.tree.map(jnp.add, total, lost)
    return total, jax.tree.map(lambda x: x.reshape(size), aux)


def clipped_grad(
  loss_fn: Callable[..., jax.Array],
  *,
  l2_clip_norm: float,
  strategy: str = "auto",
  microbatch_size: int | None = None,
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
    example's place: the key has to be secret. Losses and norms in `Aux` are not
    protected. Public: the shapes, so also the padded batch size.

  >>> import jax.numpy as jnp
  >>> def loss_fn(params, batch):
  ...   return 0.5 * (params - batch["x"]) ** 2
  >>> grad_fn = clipped_grad(loss_fn, l2_clip_norm=1.0)
  >>> total, aux = grad_fn(jnp.array(0.0), {"x": jnp.array([0.5, -3.0])})
  >>> print(total, aux.norms)
  0.5 [0.5 3. ]

  Args:
    loss_fn: `(params, batch)` to losses [batch]; `(params, batch, key)` if a
      key is given in the call. It is always called with a batch of one
      example (and that example's own key).
    l2_clip_norm: the clip norm, finite and at least 1e-12.
    strategy: "bookkeeping" (one backward pass, gradients kept in factors),
      "ghost" (two backward passes, keeps what ordinary training keeps),
      "vmap" (jax_privacy's; slow on CPUs, takes the memory of all per-example
      gradients) or "auto", which counts FLOPs and memory and chooses for the
      backend; it logs what it chose (`optim.auto.choose` returns it).
    microbatch_size: examples processed at once; it must divide the batch and
      changes memory and speed only. None: all.

  Returns:
    A function `(params, batch, *, key=None, is_padding_example=None)` to
    `(sum, Aux)`, with a method `sensitivity(relation)`.

  Raises:
    TypeError: if `loss_fn` cannot be called so, as the losses of
      `losses.contrastive`, which take a matrix of similarities.
    ValueError: if an argument is out of its range.

  References:
    Abadi et al. (2016), arXiv:1607.00133, algorithm 1.
  """
  _check_signature(loss_fn)
  _checks.check_clip_norm(l2_clip_norm)
  if strategy != "auto" and strategy not in strategies.STRATEGIES:
    known = ", ".join(["auto", *sorted(strategies.STRATEGIES)])
    raise ValueError(f"expected a strategy among {known}, got {strategy=}")
  if microbatch_size is not None and microbatch_size < 1:
    raise ValueError(f"expected microbatch_size >= 1, got {microbatch_size=}")
  return ClippedGrad(
    loss_fn=loss_fn,
    l2_clip_norm=float(l2_clip_norm),
    strategy=strategy,
    microbatch_size=microbatch_size,
  )


def _check_signature(loss_fn: Callable[..., jax.Array]) -> None:
  """Refuses a function that takes anything but (params, batch[, key])."""
  try:
    signature = inspect.signature(loss_fn)
  except ValueError:  # some compiled functions have none
    return
  for arguments in ((None, None), (None, None, None)):
    try:
      signature.bind(*arguments)
      return
    except TypeError:
      pass
  name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
  raise TypeError(
    "expected a loss_fn(params, batch) or (params, batch, key) to losses "
    f"[batch], got {name} of {', '.join(signature.parameters) or 'nothing'}: "
    "wrap it; a loss of similarities couples its examples and is for "
    "batch_clipped_grad"
  )


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
    ValueError: if the two have different shapes.
  """
  if not isinstance(batch, Mapping) or sampling.IS_PADDING not in batch:
    return batch, is_padding_example
  own = jnp.asarray(batch[sampling.IS_PADDING], bool)
  rest = {name: x for name, x in batch.items() if name != sampling.IS_PADDING}
  if is_padding_example is None:
    return rest, own
  if jnp.shape(is_padding_example) != own.shape:
    raise ValueError(
      f"expected is_padding_example of shape {own.shape}, got shape="
      f"{jnp.shape(is_padding_example)}: one flag for each example"
    )
  return rest, own | jnp.asarray(is_padding_example, bool)


def _batch_size(batch: typing.Batch) -> int:
  """Returns the length of the common leading axis."""
  sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
  if len(sizes) != 1 or () in sizes:
    raise ValueError(
      "expected arrays with one common leading axis [batch], got sizes "
      f"{sorted(sizes)}: give every field one row for each example"
    )
  return sizes.pop()[0]


def _example_keys(key: jax.Array, batch: typing.Batch, size: int) -> jax.Array:
  """Returns a key for each example, from its id if it has one."""
  ids = jnp.arange(size)
  if isinstance(batch, Mapping) and "example_id" in batch:
    ids = batch["example_id"]
  return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, ids)


def sum_sensitivity(l2_clip_norm: float, relation: _Relation) -> float:
  """Returns how far one record moves a sum of vectors that are each clipped.

  Formal guarantee: for records whose vectors depend on no other record and have
  at most this norm; attained by one of that norm, and by two in opposite
  directions.

  >>> sum_sensitivity(0.5, _Relation.REPLACE_ONE)
  1.0

  Args:
    l2_clip_norm: the largest norm of a record's vector.
    relation: a dp_accounting.NeighboringRelation.

  Returns:
    The clip norm for ADD_OR_REMOVE_ONE and REPLACE_SPECIAL, twice the clip
    norm for REPLACE_ONE.

  Raises:
    ValueError: for any other relation.
  """
  if relation in (_Relation.ADD_OR_REMOVE_ONE, _Relation.REPLACE_SPECIAL):
    return l2_clip_norm
  if relation == _Relation.REPLACE_ONE:
    return 2.0 * l2_clip_norm
  raise ValueError(
    f"expected a known dp_accounting.NeighboringRelation, got {relation=}"
  )
