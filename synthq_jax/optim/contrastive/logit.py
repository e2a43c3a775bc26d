"""Implements Logit-DP, which clips the gradient of each similarity."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from synthq_jax import checks, typing
from synthq_jax.optim.bookkeeping import jaxprs, rules, sums
from synthq_jax.optim.contrastive import batches, encoders, pair_norms

__all__ = ["Logit"]

_NORMS = ("exact", "bound")
_OWN_TRANSPOSES = (
  "custom_vjp_call",
  "custom_vjp_call_jaxpr",
  "custom_transpose_call",
  "custom_linear_solve",
  "linear_call",
)
"""Primitives with a backward pass that the user wrote."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logit:
  """Clips the gradient of each similarity to norm B, then weights and sums.

  The sum is sum_ij w_ij c_ij grad S_ij, where w is the derivative of the loss
  with respect to the similarities and `c_ij = min(1, B / |grad S_ij|)`. Norms
  come first. The sum is then one backward pass through the encoders, from sums
  of vectors weighted by w_ij c_ij. So no array has an axis for pairs and one
  for parameters.

  Formal guarantee:
    Unit: "pair" (a query, its document and hard negatives) or "query" (the text
    of the query while its document stays). Relation and value: those of the
    loss's sensitivity (`privacy.sensitivity`), for batches of at most
    `max_batch_size` pairs. For softmax, the value depends on the temperature as
    exp(2 / tau) for unit "pair", and for unit "query" with `directions=2`. Each clipped gradient depends on pairs i and j
    alone: encoders are called with one example at a time.

    A gradient that is not finite counts as zero. A query whose vector is not
    finite loses its row. A pair counts as padding if the vector of its document
    or of one of its hard negatives is not finite. A duplicate of a row's
    document keeps the constant column that the loss gives it. The sums of
    several blocks of a batch may be added only if each record's block depends
    on its own key. Otherwise use `microbatch_size`, which changes memory alone.

    The value holds up to float32 rounding; norms include an allowance for the
    rounding of the backward passes (`pair_norms.estimate_allowance`). Encoders
    that compute in half precision, or have derivatives of their own
    (`jax.custom_vjp`), are refused.

  Cost beside an ordinary step: "exact" takes n backward passes to the trained
  products, with norms from factors as in book-keeping. It takes dim passes if
  dim < n and the Jacobians fit into `memory_bytes`. "bound" takes min(n, dim)
  passes, and so does "exact" for encoders that share no parameter. Four more
  passes measure rounding. Passes go no deeper than the lowest trained
  parameter. Practical are a projection head, LoRA, a small dim or a small
  batch.

  Attributes:
    norms: "exact", or "bound", which clips by `|J_q^T d| + |J_d^T q|`: at least
      the norm, so that the summed vectors are shorter.
    memory_bytes: largest size of Jacobians, and of gradients that are formed
      for each example.

  References:
    Kong, Munoz Medina and Ribero (2023), arXiv:2310.03104, algorithm 1.
  """

  norms: str = "exact"
  memory_bytes: int = 2**30

  def __post_init__(self):
    if self.norms not in _NORMS:
      raise ValueError(f"expected norms among {_NORMS}, got {self.norms!r}")
    checks.at_least(0, memory_bytes=self.memory_bytes)

  def check(self, fn: Any) -> None:
    """Refuses nothing: the method clips every loss."""

  def sensitivity(self, fn: Any, relation: Any, unit: str) -> float:
    """Returns the loss's own sensitivity for the declared largest batch."""
    return fn.loss.sensitivity(
      max_batch_size=fn.max_batch_size,
      l2_clip_norm=fn.l2_clip_norm,
      relation=relation,
      unit=unit,
    )

  def clipped_sum(
    self, fn: Any, params: typing.Params, batch: Any, pairs: batches.Pairs
  ) -> typing.Clipped:
    """Returns the sum, losses [batch] and each row's largest norm [batch]."""
    _refuse_encoders(fn, params, pairs)
    scored = _score(fn, params, pairs)
    norms = self._compute_norms(fn, params, pairs, scored)
    factors = scored.weights * _clip_factors(norms, fn.l2_clip_norm)
    total = _compute_weighted_gradient(
      fn, params, pairs, scored, factors, self.memory_bytes
    )
    seen = jnp.where(scored.weights != 0, norms, 0.0)
    return total, scored.losses, jnp.max(seen, axis=1)

  def _compute_norms(
    self, fn: Any, params: typing.Params, pairs: batches.Pairs, scored: Any
  ) -> jax.Array:
    """Returns the norms to clip by, with an allowance, [batch, columns]."""
    towers = encoders.trace_towers(
      fn.encode_query,
      fn.encode_document,
      params,
      pairs.queries,
      pairs.columns,
    )
    sides, dim = (pairs.queries, pairs.columns), scored.queries.shape[1]
    memory, size = self.memory_bytes, fn.microbatch_size
    options = {"memory_bytes": memory, "share": fn.share}
    if self.norms == "bound":
      norms = pair_norms.bound(towers, *sides, **options)
    else:
      norms = pair_norms.compute_exact(
        towers, *sides, microbatch_size=size, **options
      )
    query_allowance, column_allowance = (
      fn.share.map(
        lambda own, tower=tower: pair_norms.estimate_allowance(
          tower, own, dim, memory_bytes=memory, microbatch_size=size
        ),
        examples,
      )
      for tower, examples in zip(towers, sides, strict=True)
    )
    squares = (
      norms * norms + query_allowance[:, None] + column_allowance[None, :]
    )
    return jnp.sqrt(squares)


def _refuse_encoders(
  fn: Any, params: typing.Params, pairs: batches.Pairs
) -> None:
  """Refuses encoders whose backward pass is not the sum of those of single pairs.

  The pass starts from a weighted sum of vectors. In half precision its rounding
  depends on all of them, and a user's own derivative may not be linear in it.
  """
  for encoder, examples in (
    (fn.encode_query, pairs.queries),
    (fn.encode_document, pairs.columns),
  ):
    first = jax.tree.map(lambda x: x[:1], examples)
    jaxpr = jax.make_jaxpr(encoder)(params, first).jaxpr
    if not jaxprs.get_primitives(jaxpr).isdisjoint(_OWN_TRANSPOSES):
      raise ValueError(
        "expected encoders without jax.custom_vjp for Logit, whose norms and sum"
        " are of different cotangents, got one, which may not be linear in them:"
        " write it as jax.custom_jvp, or take another method"
      )
    dtype = jaxprs.get_half_precision(jaxpr)
    if dtype is not None:
      raise ValueError(
        f"expected encoders that compute in float32 for Logit, got {dtype}: set"
        " the model's dtype to float32, or take another method"
      )


def _clip_factors(norms: jax.Array, l2_clip_norm: float) -> jax.Array:
  """Returns the clip factors of gradients; zero if a norm is not finite."""
  factors = jnp.minimum(1.0, l2_clip_norm / norms)
  return jnp.where(jnp.isfinite(norms), factors, 0.0)


class _Scored(NamedTuple):
  """Vectors of a batch, 0 where they do not count, with losses and weights."""

  queries: jax.Array  # [batch, dim]
  columns: jax.Array  # [columns, dim]
  losses: jax.Array  # [batch]
  weights: jax.Array  # derivatives of their sum, [batch, columns]


def _score(fn: Any, params: typing.Params, pairs: batches.Pairs) -> _Scored:
  """Encodes a batch and computes its losses and weights."""
  q = fn.encode_all("query", params, pairs.queries)
  d = fn.encode_all("document", params, pairs.columns)
  has_query = pairs.has_query & batches.mask_finite_rows(q)
  has_column = batches.mask_finite_rows(d)
  size = len(q)
  own = jnp.concatenate(  # [batch, 1 + hard]
    [has_column[:size, None], has_column[size:].reshape(size, -1)], axis=1
  )
  masks = {
    "is_padding_example": pairs.is_padding | ~own.all(axis=1),
    "is_duplicate": pairs.is_duplicate,
  }
  q = jnp.where(has_query[:, None], q, 0.0)
  d = jnp.where(has_column[:, None], d, 0.0)
  similarity = jnp.matmul(q, d.T, precision=jax.lax.Precision.HIGHEST)
  losses = fn.loss.losses(similarity, **masks)
  weights = fn.loss.weights(similarity, **masks)
  losses = jnp.where(has_query, losses, 0.0)
  return _Scored(q, d, losses, jnp.where(has_query[:, None], weights, 0.0))


def _compute_weighted_gradient(
  fn: Any,
  params: typing.Params,
  pairs: batches.Pairs,
  scored: _Scored,
  factors: jax.Array,
  memory_bytes: int,
) -> typing.Params:
  """Returns the gradient of sum_ij factors_ij S_ij, float32.

  Each example's gradient is that of <its vector, the weighted sum of the
  vectors that it meets>. They are added as in book-keeping, since the rounding
  of a running sum over examples, or over all their tokens, may depend on one of
  them.
  """
  # In float32, also where parameters are narrower.
  wide, narrow = rules.widen(params)
  towers = encoders.trace_towers(
    lambda wide, examples: fn.encode_query(narrow(wide), examples),
    lambda wide, examples: fn.encode_document(narrow(wide), examples),
    wide,
    pairs.queries,
    pairs.columns,
  )
  exact = jax.lax.Precision.HIGHEST
  toward_rows = jnp.matmul(factors, scored.columns, precision=exact)
  toward_columns = jnp.matmul(factors.T, scored.queries, precision=exact)
  counts = factors != 0
  share = fn.share
  # In accelerators' default precision, rounding would depend on all examples.
  with jax.default_matmul_precision("highest"):
    parts = [
      _sum_pullbacks(
        tower,
        share.take(examples),
        share.take(toward),
        share.take(is_counted) & share.is_own(len(is_counted)),
        pair_norms.choose_block_size(
          tower, share.count(len(toward)), fn.microbatch_size, memory_bytes
        ),
      )
      for tower, examples, toward, is_counted in (
        (towers.query, pairs.queries, toward_rows, counts.any(1)),
        (towers.document, pairs.columns, toward_columns, counts.any(0)),
      )
    ]
  total = jax.tree.map(jnp.add, *parts)
  return jax.tree.unflatten(jax.tree.structure(wide), total)


def _sum_pullbacks(
  tower: encoders.Tower,
  examples: Any,
  cotangents: jax.Array,
  is_counted: jax.Array,
  block: int,
) -> list[jax.Array]:
  """Sums the gradients of <vector, cotangent> over the examples that count."""
  missing = -len(cotangents) % block
  is_counted = jnp.pad(is_counted, (0, missing))

  def sum_block(rows: Any) -> tuple[list[jax.Array], tuple[()]]:
    examples, cotangents, weights = rows
    _, records, pull = encoders.linearize(tower, examples)
    part = tower, records, pull(cotangents)
    return encoders.compute_weighted_sums([part], weights), ()

  rows = (
    batches.replace_uncounted(examples, is_counted),
    jnp.pad(cotangents, ((0, missing), (0, 0))),
    is_counted.astype(jnp.float32),
  )
  total, _ = sums.add_up(
    sum_block,
    rows,
    list(tower.leaves),
    block,
    is_empty=lambda rows: ~jnp.any(rows[-1] > 0),
    is_dealt_out=True,
  )
  return total
