"""Clips and sums gradients of contrastive losses, whose examples are coupled."""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from synthq_jax import checks, typing
from synthq_jax.optim import clipping, independence
from synthq_jax.optim import noise as noise_lib
from synthq_jax.optim.bookkeeping import devices
from synthq_jax.optim.contrastive import batches, encoders, shares

# By name: the package's attribute `privatize` is a function.
from synthq_jax.optim.privatize import privatize

__all__ = [
  "ContrastiveGrad",
  "Loss",
  "Method",
  "contrastive_clipped_grad",
  "logit_dp",
]


class Loss(Protocol):
  """Interface of a loss of similarities, such as `losses.contrastive.Softmax`.

  `Logit` trusts the sensitivity that a loss returns: derive it for your own
  loss (docs/sensitivities.md). Masks are "is_padding_example", bool [batch],
  and "is_duplicate", bool [batch, columns]; columns are the documents and then
  all hard negatives. A loss has no trained parameters and no keys. Rows that do
  not use each other's documents may have both
  (docs/examples/contrastive_rows.py).
  """

  def losses(self, similarity: jax.Array, **masks: Any) -> jax.Array:
    """Returns losses [batch] of similarities [batch, columns]; 0 for padding."""

  def weights(self, similarity: jax.Array, **masks: Any) -> jax.Array:
    """Returns the derivative of the sum of losses, [batch, columns].

    Similarities may have any value. The loss has to clip them to the range for
    which its sensitivity is derived.
    """

  def sensitivity(self, **declared: Any) -> float:
    """Returns the L2 norm by which one record moves a sum of clipped pairs.

    Args:
      **declared: max_batch_size, l2_clip_norm, relation, unit.
    """


class Method(Protocol):
  """Interface of a clipping method: `Logit`, `Row`, `Group` or `Batch`."""

  def check(self, fn: Any) -> None:
    """Raises ValueError if the method cannot clip this function's loss."""

  def sensitivity(self, fn: Any, relation: Any, unit: str) -> float:
    """Returns the L2 sensitivity of the sum."""

  def clipped_sum(
    self, fn: Any, params: typing.Params, batch: Any, pairs: batches.Pairs
  ) -> typing.Clipped:
    """Returns the sum, losses and norms.

    Args:
      fn: the `ContrastiveGrad` that calls.
      params: pytree of arrays.
      batch: the caller's batch, without its padding mask.
      pairs: the pairs that `fn.read` made of the batch.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContrastiveGrad:
  """Sums clipped gradients when it is called; see `contrastive_clipped_grad`.

  Attributes: the arguments of `contrastive_clipped_grad`, with their meaning
  there; `unit`, the default unit of `sensitivity`; and `axes`, the mesh axes of
  `divide_among`.
  """

  encode_query: typing.EncodeFn
  encode_document: typing.EncodeFn
  loss: Loss
  l2_clip_norm: float
  method: Method
  max_batch_size: int
  microbatch_size: int | None = None
  unit: str | None = None
  axes: tuple[str, ...] = ()

  def divide_among(self, axes: tuple[str, ...]) -> "ContrastiveGrad":
    """Returns the same gradient, computed by all devices of a mesh together.

    Formal guarantee:
      Inside of a `jax.shard_map` where every device gets the WHOLE batch, the
      devices' sums add up to the sum of one device. The sensitivity is
      therefore the same. Vectors are gathered before the loss is computed:
      every device weighs the whole batch, and clips rows, pairs or groups of
      its own. `training.sharded_grad.ShardedGrad` passes the batch like this. A
      batch whose rows are divided is not accounted for.

    Args:
      axes: all mesh axes along which work is divided.
    """
    return dataclasses.replace(self, axes=tuple(axes))

  @property
  def share(self) -> shares.Share:
    """Share of the batch's rows that the device works on."""
    return shares.Share(self.axes)

  def __call__(
    self,
    params: typing.Params,
    batch: typing.Batch,
    *,
    key: jax.Array | None = None,
    is_padding_example: jax.Array | None = None,
  ) -> tuple[typing.Params, clipping.Aux]:
    """Returns the sum of clipped gradients, and losses and norms.

    Args:
      params: pytree of floating-point arrays.
      batch: "queries" and "documents" [batch, ...], as an encoder takes them:
        arrays, or trees such as {"ids", "mask"}. Optional fields:
        "negatives" [batch, hard, ...], as many as the loss declares;
        "has_query", bool [batch], False leaves a row out and keeps its
        document; "document_ids" [batch] (and "negative_ids" [batch, hard], -1
        if missing), which identify duplicates; "public_negatives" [negative,
        ...] for `Row` (and "public_negative_ids"); "example_id" [batch] for
        `Group`. Other fields are refused: nothing would read them.
      key: must be None: encoders have no randomness.
      is_padding_example: bool [batch]; a pair with True counts neither as a row
        nor as a column.

    Returns:
      The sum, float32 in the structure of `params`, and a `clipping.Aux` of the
      rows [batch] or groups [groups], [1] for `Batch`. For `Logit` a norm is
      the largest of the row's similarities.

    Raises:
      TypeError: if a parameter is no floating-point array.
      ValueError: if the batch does not match its declaration, or the first
        example's vector is longer than 1 (under `jax.jit` it is shortened
        instead); or inside of `jax.shard_map`, if devices see rows of their
        own.
    """
    clipping.check_arrays(batch)
    devices.refuse_explicit((batch, is_padding_example))
    devices.refuse_batches(type(self).__name__, among=self.axes)
    if devices.get_axes(batch, is_padding_example):
      raise ValueError(
        "expected the whole batch on every device, got one that differs along"
        f" {sorted(devices.get_axes(batch, is_padding_example))}: rows meet in the"
        " loss; give it to jax.shard_map with in_specs=PartitionSpec()"
      )
    if key is not None:
      raise ValueError(
        "expected key=None, got a key: encoders are called without one; a loss"
        " with dropout and public negatives is one for clipped_grad"
        " (docs/examples/contrastive_rows.py)"
      )
    batch, is_padding_example = clipping.split_padding(
      batch, is_padding_example
    )
    clipping.check_params(params)
    pairs = self.read(batch, is_padding_example)
    unmoved = []
    for name, examples in (
      ("query", pairs.queries),
      ("document", pairs.columns),
    ):
      encoder = self._encoder(name)
      encoders.check_cosines(encoder, params, examples, f"encode_{name}")
      unmoved += [encoders.refuse_batch_rules(encoder, params, examples)]
    independence.log_unmoved(params, frozenset.intersection(*unmoved))
    params = jax.tree.map(jnp.asarray, params)
    total, losses, norms = self.method.clipped_sum(self, params, batch, pairs)
    return total, clipping.Aux(losses, norms)

  def sensitivity(self, relation: Any, unit: str | None = None) -> float:
    """Returns the L2 sensitivity of the sum.

    Args:
      relation: a `dp_accounting.NeighboringRelation` or its name.
      unit: "pair" (query, document and hard negatives) or "query" (the query's
        text, while its document stays; where documents are negatives Poisson
        sampling does not amplify it, see docs/sensitivities.md); None: the
        attribute `unit`.

    Raises:
      ValueError: if the method does not protect the unit, or unit or relation
        is unknown, or there is no unit.
    """
    unit = self.unit if unit is None else unit
    if unit not in ("pair", "query"):
      raise ValueError(f"expected unit 'pair' or 'query', got {unit=}")
    return self.method.sensitivity(self, relation, unit)

  def read(
    self, batch: typing.Batch, is_padding_example: jax.Array | None
  ) -> batches.Pairs:
    """Checks a batch and puts it into columns."""
    two_directions = getattr(self.loss, "directions", 1) == 2
    if two_directions and "has_query" in batch:
      raise ValueError(
        "expected no has_query with directions=2, got one: documents would "
        "choose among missing queries"
      )
    return batches.read(
      batch,
      is_padding_example,
      max_batch_size=self.max_batch_size,
      hard_negatives=getattr(self.loss, "hard_negatives", 0),
      more_fields=getattr(self.method, "fields", ()),
    )

  def encode(
    self,
    name: str,
    params: typing.Params,
    examples: Any,
    *,
    together: bool = False,
  ) -> jax.Array:
    """Returns the vectors of queries or documents; see `encoders.encode`."""
    return encoders.encode(
      self._encoder(name),
      params,
      examples,
      self.microbatch_size,
      together=together,
    )

  def encode_all(
    self,
    name: str,
    params: typing.Params,
    examples: Any,
    *,
    together: bool = False,
  ) -> jax.Array:
    """Returns the vectors of a whole batch; each device encodes its share."""
    return self.share.map(
      lambda own: self.encode(name, params, own, together=together), examples
    )

  def total_loss(
    self, params: typing.Params, batch: typing.Batch, is_real: jax.Array
  ) -> jax.Array:
    """Returns the sum of a batch's losses, without clipping.

    If work is divided among devices, the sum is over the device's own rows.
    """
    pairs = self.read(batch, ~is_real)
    # Padding may hold anything, so real pairs' examples replace it.
    has_column = jnp.concatenate([is_real, jnp.repeat(is_real, pairs.hard)])
    queries = batches.replace_uncounted(pairs.queries, is_real)
    columns = batches.replace_uncounted(pairs.columns, has_column)
    q = self.encode_all("query", params, queries, together=True)
    d = self.encode_all("document", params, columns, together=True)
    similarity = jnp.matmul(q, d.T, precision=jax.lax.Precision.HIGHEST)
    losses = self.loss.losses(
      similarity,
      is_padding_example=~is_real,
      is_duplicate=pairs.is_duplicate,
    )
    own, counts = self.share.take((losses, pairs.has_query))
    counts &= self.share.is_own(len(losses))
    return jnp.sum(jnp.where(counts, own, 0.0))

  def _encoder(self, name: str) -> typing.EncodeFn:
    return self.encode_query if name == "query" else self.encode_document


def contrastive_clipped_grad(
  encode_query: typing.EncodeFn,
  encode_document: typing.EncodeFn,
  *,
  loss: Loss,
  l2_clip_norm: float,
  method: Method,
  max_batch_size: int,
  microbatch_size: int | None = None,
) -> ContrastiveGrad:
  """Builds a function that clips and sums gradients of a contrastive loss.

  The loss of one row depends on the documents of the others, so that clipping
  each example's gradient bounds the sum no better than by the batch's size. The
  methods clip different gradients. `Logit` clips that of each similarity. `Row`
  clips that of each query's loss, against public documents or, like per-example
  clipping, against its batch. `Group` clips that of each of several small
  batches, and `Batch` that of the whole batch.

  Formal guarantee:
    That of the method, for the value that `sensitivity(relation, unit)` returns
    and batches of at most `max_batch_size` pairs with padding. Public: the
    shapes and everything declared here. Losses and norms are not protected.

  Do not add up the sums of several microbatches before the noise: each record
  would have to stay in its microbatch whatever else is drawn. To save memory
  use `microbatch_size`, which changes no number: all negatives of the batch
  stay.

  >>> import jax, jax.numpy as jnp
  >>> from synthq_jax.losses import contrastive
  >>> def encode(params, x):
  ...   x = x * params[None]
  ...   return x / jnp.linalg.norm(x, axis=1, keepdims=True)
  >>> from synthq_jax import optim
  >>> fn = contrastive_clipped_grad(
  ...     encode, encode, loss=contrastive.Softmax(temperature=1.0),
  ...     l2_clip_norm=0.5, method=optim.Row(), max_batch_size=4)
  >>> batch = {"queries": jnp.eye(2), "documents": jnp.eye(2)}
  >>> total, aux = jax.jit(fn)(jnp.ones(2), batch)
  >>> fn.sensitivity("ADD_OR_REMOVE_ONE", "query")
  0.5

  Args:
    encode_query: `(params, queries)` to vectors of length 1, [batch, dim]. It
      is called with one example at a time, under `jax.vmap`; `Batch` and
      `Group` call it with all examples that they clip as one.
    encode_document: the same for documents and negatives. Parameters may be
      shared. Frozen parameters are closed over, not in params.
    loss: `losses.contrastive.Softmax`, `Sigmoid`, `Spreadout`, or any `Loss`.
    l2_clip_norm: largest norm of each clipped gradient, finite and at least
      1e-12.
    method: `Logit(...)`, `Row(...)`, `Group(...)` or `Batch()`.
    max_batch_size: largest number of pairs in a batch with padding, at least 1:
      the sampler's, never the realised one.
    microbatch_size: examples encoded at once, to save memory; `Row` without
      gradients of negatives needs a divisor of the batch. None: all.

  Returns:
    A function `(params, batch, *, key=None, is_padding_example=None)` to
    `(sum, Aux)`, with a method `sensitivity(relation, unit)`.

  Raises:
    ValueError: if an argument is out of range, or the method cannot clip the
      loss.
  """
  checks.clip_norm(l2_clip_norm)
  for name, count in (
    ("max_batch_size", max_batch_size),
    ("microbatch_size", 1 if microbatch_size is None else microbatch_size),
  ):
    if count < 1 or count != int(count):
      raise ValueError(f"expected an integer {name} >= 1, got {name}={count}")
  if not hasattr(loss, "weights"):
    raise ValueError(
      f"expected a loss such as losses.contrastive.Softmax(...), got {loss}"
    )
  if isinstance(method, type) or not hasattr(method, "clipped_sum"):
    raise ValueError(
      "expected a method such as optim.Logit(), Row(), Group(size=16) or"
      f" Batch(), got {method!r}"
    )
  fn = ContrastiveGrad(
    encode_query=encode_query,
    encode_document=encode_document,
    loss=loss,
    l2_clip_norm=float(l2_clip_norm),
    method=method,
    max_batch_size=int(max_batch_size),
    microbatch_size=microbatch_size,
  )
  method.check(fn)
  return fn


def logit_dp(
  fn: ContrastiveGrad,
  *,
  relation: Any,
  unit: str,
  noise_multiplier: float,
  denominator: float,
  key: jax.Array,
  noise: noise_lib.Noise | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Builds the transform from `fn`'s sum to a private mean.

  Formal guarantee:
    That of `privatize` for the unit and the relation, with the sensitivity that
    `fn` has for them. `noise_multiplier` has to be calibrated for this
    relation. Under REPLACE_ONE the accountant doubles the sensitivity by
    itself. The noise is then made for ADD_OR_REMOVE_ONE, whose value no method
    more than doubles under REPLACE_ONE; if a loss of your own does, half of its
    value is taken.

    The transform takes the sum of ONE call of `fn` a step. Sums of several
    batches must not be added before it, as `optax.MultiSteps` around it would:
    a record that comes or goes moves records from one batch to the next.
    Accumulate inside, with `microbatch_size` of `contrastive_clipped_grad`.

  >>> import jax, jax.numpy as jnp
  >>> from synthq_jax import optim
  >>> from synthq_jax.losses import contrastive as losses
  >>> fn = contrastive_clipped_grad(
  ...     lambda params, x: x * params, lambda params, x: x * params,
  ...     loss=losses.Softmax(temperature=1.0), l2_clip_norm=0.5,
  ...     method=optim.Batch(), max_batch_size=4)
  >>> tx = logit_dp(fn, relation="ADD_OR_REMOVE_ONE", unit="pair",
  ...               noise_multiplier=0.0, denominator=1.0,
  ...               key=jax.random.key(0))
  >>> mean, _ = tx.update(jnp.array([0.5]), tx.init(jnp.array([0.5])))
  >>> print(mean)
  [0.5]

  Args:
    fn: from `contrastive_clipped_grad`.
    relation: a `dp_accounting.NeighboringRelation` or its name.
    unit: "pair" or "query".
    noise_multiplier: standard deviation of the noise over the sensitivity.
    denominator: public divisor: 1 for `Batch`, the expected number of groups
      for `Group`, the expected batch size otherwise.
    key: secret key, for the noise of all steps and nothing else.
    noise: as in `privatize`.

  Returns:
    An optax transform, to be chained before an optimizer.

  Raises:
    TypeError: if `fn` is no `ContrastiveGrad`, for example a `clipped_grad`.
    ValueError: if `fn` does not protect the unit, or a number is out of range.
  """
  if not isinstance(fn, ContrastiveGrad):
    raise TypeError(
      "expected fn from contrastive_clipped_grad, got"
      f" {type(fn).__name__}: for a clipped_grad take privatize(l2_sensitivity="
      "grad_fn.sensitivity(relation), ...)"
    )
  moved = fn.sensitivity(relation, unit)
  if checks.relation(relation) == "REPLACE_ONE":
    single = fn.sensitivity("ADD_OR_REMOVE_ONE", unit)
    moved = max(single, moved / 2)
  return privatize(
    l2_sensitivity=moved,
    noise_multiplier=noise_multiplier,
    denominator=denominator,
    key=key,
    noise=noise,
  )
