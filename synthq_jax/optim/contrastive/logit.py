"""Logit-DP: the gradient of each similarity is clipped."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from synthq_jax import typing
from synthq_jax.optim.bookkeeping import jaxprs, rules
from synthq_jax.optim.contrastive import batches, encoders, pair_norms

__all__ = ["Logit"]

_NORMS = ("exact", "bound")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logit:
  """Clips the gradient of each similarity to norm B, then weights and sums.

  The sum is sum_ij w_ij c_ij grad S_ij, where w is the derivative of the loss
  with respect to the similarities and `c_ij = min(1, B / |grad S_ij|)`. Norms come
  first; the sum is then one backward pass of sum_ij w_ij c_ij S_ij with the
  factors held fixed, so no array has an axis for pairs and one for parameters.

  Formal guarantee:
    Unit "pair" (a query, its document and hard negatives) or "query" (the
    text of the query while its document stays), relation and value: those of
    the loss's sensitivity (`privacy.sensitivity`), for batches of at most
    `max_batch_size`. The value depends on the temperature as exp(2 / tau) for
    softmax and unit "pair". Each clipped gradient depends on pairs i and j
    alone: encoders are called with one example at a time. A gradient that is
    not finite counts as zero, a query whose vector is not finite loses its row,
    a pair whose document is not finite counts as padding. A duplicate of a
    row's document keeps the constant column that the loss gives it. The sums
    of several blocks of a batch may be added only where each record's block
    depends on its own key: otherwise use `microbatch_size`, which changes
    memory alone. Up to float32 rounding; encoders that compute in half
    precision are refused: the sum is one pass back through them, whose rounding
    in half precision is no clipped pair's.

  Cost beside an ordinary step: `exact` takes n passes back to the trained
  products, with norms from factors as in book-keeping; or dim passes where dim
  < n and the Jacobians fit into `memory_bytes`. `bound` takes min(n, dim).
  Passes go no deeper than the lowest trained parameter, so what is practical is
  a projection head, LoRA, a small dim or a small batch. Encoders that share no
  parameter cost min(n, dim) passes with exact norms too.

  Attributes:
    norms: "exact"; "bound" clips by `|J_q^T d| + |J_d^T q|`, which is at least
      the norm, so the sum is of shorter vectors.
    memory_bytes: what Jacobians may take.

  References:
    Kong, Munoz Medina and Ribero (2023), arXiv:2310.03104, algorithm 1.
  """

  norms: str = "exact"
  memory_bytes: int = 2**30

  def __post_init__(self):
    if self.norms not in _NORMS:
      raise ValueError(f"expected norms among {_NORMS}, got {self.norms!r}")
    if self.memory_bytes < 0:
      raise ValueError(f"expected memory_bytes >= 0, got {self.memory_bytes}")

  def check(self, fn: Any) -> None:
    """Refuses what this method cannot do; every loss will do."""

  def sensitivity(self, fn: Any, relation: Any, unit: str) -> float:
    """Returns the loss's own sensitivity for the declared batch."""
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
    losses, weights = _weights(fn, params, pairs)
    _refuse_half(fn, params, pairs)
    norms = self._norms(fn, params, pairs)
    factors = weights * _clip_factors(norms, fn.l2_clip_norm)
    total = _weighted_gradient(fn, params, pairs, factors)
    seen = jnp.where(weights != 0, norms, 0.0)
    return total, losses, jnp.max(seen, axis=1)

  def _norms(
    self, fn: Any, params: typing.Params, pairs: batches.Pairs
  ) -> jax.Array:
    """Returns the norms to clip by, [batch, columns]."""
    towers = encoders.towers(
      fn.encode_query,
      fn.encode_document,
      params,
      pairs.queries,
      pairs.columns,
    )
    if self.norms == "bound":
      return pair_norms.bound(
        towers, pairs.queries, pairs.columns, memory_bytes=self.memory_bytes
      )
    return pair_norms.exact(
      towers,
      pairs.queries,
      pairs.columns,
      memory_bytes=self.memory_bytes,
      microbatch_size=fn.microbatch_size,
    )


def _refuse_half(fn: Any, params: typing.Params, pairs: batches.Pairs) -> None:
  """Refuses encoders whose passes back round to half precision.

  A pass back of many pairs at once rounds with all of them: one record that
  comes or goes would move it by more than its own pairs.
  """
  for encoder, examples in (
    (fn.encode_query, pairs.queries),
    (fn.encode_document, pairs.columns),
  ):
    one = jax.tree.map(lambda x: x[:1], examples)
    found = jaxprs.half_precision(jax.make_jaxpr(encoder)(params, one).jaxpr)
    if found is not None:
      raise ValueError(
        f"expected encoders that compute in float32 for Logit, got {found}: set"
        " the model's dtype to float32, or take another method"
      )


def _clip_factors(norms: jax.Array, l2_clip_norm: float) -> jax.Array:
  """Returns what gradients are multiplied with; zero if they are not finite."""
  factors = jnp.minimum(1.0, l2_clip_norm / norms)
  return jnp.where(jnp.isfinite(norms), factors, 0.0)


def _weights(
  fn: Any, params: typing.Params, pairs: batches.Pairs
) -> tuple[jax.Array, jax.Array]:
  """Returns losses [batch] and derivatives of their sum [batch, columns]."""
  q = fn.encode("query", params, pairs.queries)
  d = fn.encode("document", params, pairs.columns)
  has_query = pairs.has_query & batches.finite_rows(q)
  has_column = batches.finite_rows(d)
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
  return losses, jnp.where(has_query[:, None], weights, 0.0)


def _weighted_gradient(
  fn: Any,
  params: typing.Params,
  pairs: batches.Pairs,
  factors: jax.Array,
) -> typing.Params:
  """Returns the gradient of sum_ij factors_ij S_ij, float32."""
  row_counts, column_counts = (factors != 0).any(1), (factors != 0).any(0)
  queries = batches.sound(pairs.queries, row_counts)
  columns = batches.sound(pairs.columns, column_counts)
  # Differentiated in float32, so that the sum over pairs is float32.
  wide, narrow = rules.widened(params)

  def total(wide: typing.Params) -> jax.Array:
    params = narrow(wide)
    q = fn.encode("query", params, queries)
    d = fn.encode("document", params, columns)
    exact = jax.lax.Precision.HIGHEST
    return jnp.sum(factors * jnp.matmul(q, d.T, precision=exact))

  # Passes back of half precision, accelerators' default, would round with all.
  with jax.default_matmul_precision("highest"):
    gradient = jax.grad(total)(wide)
  return jax.tree.map(lambda x: jnp.where(row_counts.any(), x, 0.0), gradient)
