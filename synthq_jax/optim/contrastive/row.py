"""Implements row clipping, which clips the gradient of each query's loss."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from synthq_jax import typing
from synthq_jax.losses import contrastive as losses_lib
from synthq_jax.losses import pairs as padding_lib
from synthq_jax.optim import clipping
from synthq_jax.optim.bookkeeping import rules, sums
from synthq_jax.optim.contrastive import batches, encoders, shares
from synthq_jax.privacy import batches as privacy_batches
from synthq_jax.privacy import sensitivity

__all__ = ["Row"]

_NEGATIVES = ("batch", "public")
_GRADIENTS = ("all", "pair", "query")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """Clips the gradient of each row, one query against its columns, to norm C.

  Formal guarantee:
    `negatives="batch"` protects THE PAIR, with noise that grows with the batch.
    A document is a column of all rows, so that a pair that comes or goes may
    turn all n - 1 other rows around. The value is (2n - 1) C, with n the
    largest padded batch, and 2n C when the pair is replaced. It also protects
    the TEXT OF A QUERY while its document stays, unit "query". At any
    temperature and batch size the value is C when the query is zeroed out
    (`has_query` is False and the document stays a column). It is 2C when the
    query is replaced. The set of documents that have queries is NOT protected
    there. Poisson sampling amplifies nothing, so account for batches in a fixed
    order (docs/sensitivities.md). A pair whose document has a vector that is
    not finite counts as padding.

    `negatives="public"` protects THE PAIR, unit "pair" or "query": C when it
    comes or goes, 2C when it is replaced. The negatives have to be drawn from
    public documents, independently of the private pairs, and anew in one draw
    for all rows. A row then depends on its own pair alone.

    A row whose gradient is not finite counts as zero. `gradients` changes what
    is learnt and what it costs, and not the guarantee. The values hold up to
    float32 rounding.

  Cost of n rows beside an ordinary step: `gradients="all"` takes n backward
  passes through the document tower, one gradient in memory at a time. "pair"
  and "query" take one forward and one backward pass for norms and sum together;
  in microbatches `clipped_grad` takes one more forward pass.

  Attributes:
    negatives: "batch": the documents of the other rows, and all hard negatives
      the loss declares. "public": the batch's field "public_negatives"
      [negative, ...], the same for all rows.
    gradients: "all": all of the loss; "pair": none through negatives; "query":
      none through any document, as with a frozen document tower.
  """

  negatives: str = "batch"
  gradients: str = "all"

  def __post_init__(self):
    for name, names in (("negatives", _NEGATIVES), ("gradients", _GRADIENTS)):
      if getattr(self, name) not in names:
        raise ValueError(
          f"expected {name} among {names}, got {getattr(self, name)!r}"
        )

  @property
  def fields(self) -> tuple[str, ...]:
    """Fields of a batch that only this method reads."""
    if self.negatives == "batch":
      return ()
    return ("public_negatives", "public_negative_ids")

  def check(self, fn: Any) -> None:
    """Refuses losses in which a row depends on other queries."""
    if getattr(fn.loss, "directions", 1) != 1:
      raise ValueError(
        "expected a loss with directions=1 for rows, got directions="
        f"{fn.loss.directions}: the other direction has all queries in it"
      )
    classes = (losses_lib.Softmax, losses_lib.Sigmoid, losses_lib.Spreadout)
    if not isinstance(fn.loss, classes):
      raise ValueError(
        "expected a loss whose rows are known to depend on no other query, as"
        f" losses.contrastive.Softmax, got {type(fn.loss).__name__}: clip pairs"
        " with Logit, or give rows of public negatives to clipped_grad"
      )
    fits = (
      isinstance(fn.loss, losses_lib.Softmax) and not fn.loss.hard_negatives
    )
    if self.negatives == "public" and not fits:
      raise ValueError(
        "expected losses.contrastive.Softmax without hard_negatives for public "
        f"negatives, got {fn.loss}: with hard ones it is a loss for clipped_grad"
        " (docs/examples/contrastive_rows.py)"
      )

  def sensitivity(self, fn: Any, relation: Any, unit: str) -> float:
    """Returns C or 2C; for pairs with negatives of the batch, up to 2n C."""
    return sensitivity.row(
      l2_clip_norm=fn.l2_clip_norm,
      relation=relation,
      unit=unit,
      negatives=self.negatives,
      max_batch_size=fn.max_batch_size,
    )

  def clipped_sum(
    self, fn: Any, params: typing.Params, batch: Any, pairs: batches.Pairs
  ) -> typing.Clipped:
    """Returns the sum, losses [batch] and the rows' norms [batch]."""
    block = fn.microbatch_size
    size = fn.share.count(pairs.size)
    through_document = self.gradients == "pair"
    if self.gradients != "all" and (block is None or block >= size):
      return _clip_at_once(self, fn, params, batch, pairs, through_document)
    q = fn.encode_all("query", params, pairs.queries)
    d = fn.encode_all("document", params, pairs.columns)
    rows = _weigh_rows(self, fn, params, batch, pairs, q, d)
    losses, rows = rows.losses, _take_share(rows, fn.share, block)
    if self.gradients == "all":
      total, norms = _clip_one_by_one(fn, params, rows)
    else:
      total, norms = _clip_pairs(fn, params, rows, through_document)
    return total, losses, fn.share.gather(norms, pairs.size)


@dataclasses.dataclass(frozen=True)
class _Rows:
  """Rows, and the derivatives of each row's loss with respect to its columns.

  The loss of row i depends on the parameters through <q_i, d_i> with the weight
  `own[i]`, and through <q_i, s_j> of the shared columns with `shared[i, j]`.
  """

  queries: Any  # [batch, ...], of rows that count (`batches.replace_uncounted`)
  documents: Any  # [batch, ...], of rows that count
  columns: Any  # [column, ...]
  vectors: jax.Array  # of the columns, [column, dim]
  own_vectors: jax.Array  # of the documents, [batch, dim]
  own: jax.Array  # [batch]
  shared: jax.Array  # [batch, column]
  losses: jax.Array  # [batch]
  counts: jax.Array  # bool [batch]


def _take_share(
  rows: _Rows, share: shares.Share, block: int | None = None
) -> _Rows:
  """Returns the rows of one device, with the columns of all devices."""
  size = len(rows.counts)
  names = (
    "queries", "documents", "own_vectors", "own", "shared", "losses", "counts"
  )  # fmt: skip
  taken = {name: share.take(getattr(rows, name), block) for name in names}
  taken["counts"] &= share.is_own(size, block)
  return dataclasses.replace(rows, **taken)


def _weigh_rows(
  method: Row,
  fn: Any,
  params: typing.Params,
  batch: typing.Batch,
  pairs: batches.Pairs,
  q: jax.Array,
  d: jax.Array,
) -> _Rows:
  """Weighs the similarities of encoded queries and columns."""
  if method.negatives == "public":
    return _weigh_public_rows(fn, params, batch, pairs, q, d)
  size = len(q)
  has_column = batches.mask_finite_rows(d)
  counts = pairs.has_query & batches.mask_finite_rows(q)
  # False: a hard negative that is not finite.
  columns = has_column | (jnp.arange(len(d)) < size)
  masks = {
    "is_padding_example": pairs.is_padding | ~has_column[:size],
    "is_duplicate": pairs.is_duplicate | ~columns[None, :],
  }
  d = jnp.where(has_column[:, None], d, 0.0)
  similarity = _multiply(jnp.where(counts[:, None], q, 0.0), d)
  weights = fn.loss.weights(similarity, **masks)
  counts &= ~masks["is_padding_example"]
  weights = jnp.where(counts[:, None], weights, 0.0)
  diagonal = jnp.eye(*weights.shape, dtype=bool)
  losses = fn.loss.losses(similarity, **masks)
  padding = padding_lib.repeat_padding(pairs.is_padding, pairs.hard)
  return _Rows(
    queries=batches.replace_uncounted(pairs.queries, counts),
    documents=batches.replace_uncounted(pairs.documents, counts),
    columns=batches.replace_uncounted(pairs.columns, has_column & ~padding),
    vectors=d,
    own_vectors=d[:size],
    own=jnp.diagonal(weights),
    shared=jnp.where(diagonal, 0.0, weights),
    losses=jnp.where(counts, losses, 0.0),
    counts=counts,
  )


def _weigh_public_rows(
  fn: Any,
  params: typing.Params,
  batch: typing.Batch,
  pairs: batches.Pairs,
  q: jax.Array,
  d: jax.Array,
) -> _Rows:
  """Weighs the similarities of queries to their documents and public negatives."""
  if "public_negatives" not in batch:
    raise ValueError(
      f"expected a batch with public_negatives, got {sorted(batch)}: draw them "
      "from public documents, independently of the pairs"
    )
  _refuse_own_rows(batch)
  negatives = jax.tree.map(jnp.asarray, batch["public_negatives"])
  s = fn.encode_all("document", params, negatives)
  has_column = batches.mask_finite_rows(s)
  s = jnp.where(has_column[:, None], s, 0.0)
  finite = batches.mask_finite_rows(q) & batches.mask_finite_rows(d)
  counts = finite & pairs.has_query & ~pairs.is_padding
  q, d = (jnp.where(counts[:, None], x, 0.0) for x in (q, d))
  similarity = jnp.concatenate(
    [jnp.sum(q * d, axis=1, keepdims=True), _multiply(q, s)], axis=1
  )
  masked = jnp.broadcast_to(~has_column[None, :], (len(q), len(s)))
  if "document_ids" in batch and "public_negative_ids" in batch:
    own, others = (
      batches.read_ids(batch, name)
      for name in ("document_ids", "public_negative_ids")
    )
    masked |= own[:, None] == others[None, :]
  masked = jnp.pad(masked, ((0, 0), (1, 0)))
  # Each row is a batch of one pair whose hard negatives are the public ones.
  loss = dataclasses.replace(fn.loss, hard_negatives=len(s))

  def weigh_row(row: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    row, mask = row[None], mask[None]
    losses = loss.losses(row, is_duplicate=mask)
    return losses[0], loss.weights(row, is_duplicate=mask)[0]

  losses, weights = jax.vmap(weigh_row)(similarity, masked)
  weights = jnp.where(counts[:, None], weights, 0.0)
  return _Rows(
    queries=batches.replace_uncounted(pairs.queries, counts),
    documents=batches.replace_uncounted(pairs.columns, counts),
    columns=batches.replace_uncounted(negatives, has_column),
    vectors=s,
    own_vectors=d,
    own=weights[:, 0],
    shared=weights[:, 1:],
    losses=jnp.where(counts, losses, 0.0),
    counts=counts,
  )


def _refuse_own_rows(batch: typing.Batch) -> None:
  """Refuses a batch's own texts as its public negatives.

  It sees the very arrays of other fields, or rows of `sampler.take` outside of
  compiled functions, not what was computed from them.
  """
  others = {k: v for k, v in batch.items() if k != "public_negatives"}
  own = {id(leaf) for leaf in jax.tree.leaves(others)}
  size = len(jax.tree.leaves(batch["queries"])[0])
  for leaf in jax.tree.leaves(batch["public_negatives"]):
    is_drawn = len(leaf) == size and privacy_batches.is_padded_field(leaf)
    if id(leaf) in own or is_drawn:
      raise ValueError(
        "expected public_negatives that no record decides, got fields of the drawn"
        " pairs: a pair would move all rows, and the noise is for one; draw them"
        " from public documents, or take Row(negatives='batch')"
      )


def _multiply(a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.matmul(a, b.T, precision=jax.lax.Precision.HIGHEST)


def _sum_columns(rows: _Rows) -> jax.Array:
  """Returns each row's weighted sum of its columns, [batch, dim]."""
  shared = _multiply(rows.shared, rows.vectors.T)
  return shared + rows.own[:, None] * rows.own_vectors


def _clip_at_once(
  method: Row,
  fn: Any,
  params: typing.Params,
  batch: typing.Batch,
  pairs: batches.Pairs,
  through_document: bool,
) -> typing.Clipped:
  """Returns sum, losses and norms as `_clip_pairs` does, from one forward pass.

  The vectors that give the weights also start the backward pass, by
  book-keeping: norm and sum come from the same factors.
  """
  encode_document = fn.encode_document
  if not through_document:  # hides the parameters from the tracer
    encode_document = lambda _, x: fn.encode_document(params, x)  # noqa: E731
  towers = encoders.trace_towers(
    fn.encode_query, encode_document, params, pairs.queries, pairs.columns
  )
  size, share = pairs.size, fn.share
  q, q_records, pull_q = encoders.linearize(
    towers.query, share.take(pairs.queries)
  )
  own = None
  if through_document:
    documents = share.take(pairs.documents)
    own = encoders.linearize(towers.document, documents)
    d = share.gather(own[0], size)
    if pairs.hard:
      hard = fn.encode_all("document", params, pairs.negatives)
      d = jnp.concatenate([d, hard])
  else:
    d = fn.encode_all("document", params, pairs.columns)
  rows = _weigh_rows(method, fn, params, batch, pairs, share.gather(q, size), d)
  losses, rows = rows.losses, _take_share(rows, share)
  parts = [(towers.query, q_records, pull_q(_sum_columns(rows)))]
  if own is not None:
    _, d_records, pull_d = own
    cotangents = rows.own[:, None] * jnp.where(rows.counts[:, None], q, 0.0)
    parts.append((towers.document, d_records, pull_d(cotangents)))
  parts = encoders.fix_rounding(parts)
  squares = encoders.compute_squared_norms(parts, len(q))
  norms = rules.compute_norms([squares], rows.losses)
  weights = rules.compute_clip_weights(
    rows.losses, norms, ~rows.counts, fn.l2_clip_norm
  )
  total = jax.tree.unflatten(
    jax.tree.structure(params), encoders.compute_weighted_sums(parts, weights)
  )
  norms = share.gather(jnp.where(rows.counts, norms, 0.0), size)
  return total, losses, norms


def _clip_pairs(
  fn: Any, params: typing.Params, rows: _Rows, through_document: bool
) -> tuple[typing.Params, jax.Array]:
  """Returns sum and norms if a row's gradient is that of its own pair.

  The parameters move <q_i, a_i>, with the weighted sum a_i of its columns held
  fixed, and own_i <q_i, d_i> through the document. This is a function of the
  pair, which `clipped_grad` clips.
  """

  def similarity(params: typing.Params, batch: typing.Batch) -> jax.Array:
    q = fn.encode("query", params, batch["query"])
    value = jnp.sum(q * batch["toward"], axis=1)
    if not through_document:
      return value
    d = fn.encode("document", params, batch["document"])
    held = jax.lax.stop_gradient(q)
    return value + batch["own"] * jnp.sum(held * d, axis=1)

  examples = {"query": rows.queries, "toward": _sum_columns(rows)}
  if through_document:
    examples["document"] = rows.documents
    examples["own"] = rows.own
  size = fn.microbatch_size
  # Norm and sum from the same factors: weights of 1 / temperature cancel each
  # other, and two backward passes would round that differently.
  clipped = clipping.clipped_grad(
    similarity,
    l2_clip_norm=fn.l2_clip_norm,
    strategy="bookkeeping",
    microbatch_size=size,
  )
  total, aux = clipped(params, examples, is_padding_example=~rows.counts)
  return total, aux.norms


def _clip_one_by_one(
  fn: Any, params: typing.Params, rows: _Rows
) -> tuple[typing.Params, jax.Array]:
  """Returns sum and norms of whole rows, with one gradient in memory at a time."""
  wide, narrow = rules.widen(params)

  def encode_pair(
    wide: typing.Params, query: Any, document: Any
  ) -> tuple[jax.Array, jax.Array]:
    params = narrow(wide)
    query, document = jax.tree.map(lambda x: x[None], (query, document))
    q = fn.encode("query", params, query)[0]
    return q, fn.encode("document", params, document)[0]

  # The shared columns are encoded once, and every row takes a backward pass.
  _, pull_columns = jax.vjp(
    lambda wide: fn.encode("document", narrow(wide), rows.columns), wide
  )

  def clip_row(row: Any) -> tuple[typing.Params, jax.Array]:
    query, document, own, shared, counts = jax.tree.map(lambda x: x[0], row)
    (q, d), pull_pair = jax.vjp(
      lambda wide: encode_pair(wide, query, document), wide
    )
    toward = own * d + jnp.matmul(
      shared, rows.vectors, precision=jax.lax.Precision.HIGHEST
    )
    (column_gradient,) = pull_columns(shared[:, None] * q[None, :])
    (pair_gradient,) = pull_pair((toward, own * q))
    gradient = jax.tree.map(jnp.add, column_gradient, pair_gradient)
    norm = optax.tree.norm(gradient)
    counted = counts & jnp.isfinite(norm)
    scale = jnp.minimum(1.0, fn.l2_clip_norm / norm)
    clipped = jax.tree.map(
      lambda g: jnp.where(counted, scale * g, 0.0), gradient
    )
    return clipped, jnp.where(counts, norm, 0.0)[None]

  each = (rows.queries, rows.documents, rows.own, rows.shared, rows.counts)
  return sums.add_up(
    clip_row,
    each,
    wide,
    1,
    is_empty=lambda row: ~row[-1][0],
    is_dealt_out=True,
  )
