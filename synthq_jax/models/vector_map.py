"""Adapts the vectors of a frozen encoder by a linear map of the queries.

The score of a document is (query + query @ map) . document. The map starts as
zero, so that training starts from the given vectors. Documents keep their
vectors, and an index stays valid.

If a log adds nothing, the map stays zero: `optim.denoising` removes the noise of
known size from it, without looking at the log.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from synthq_jax import checks, typing
from synthq_jax.losses import listwise

__all__ = [
  "Candidates",
  "choose_candidates",
  "get_losses",
  "get_matrix",
  "init",
  "map_queries",
]

_NAME = "map"


class Candidates(NamedTuple):
  """The documents that the loss of each query compares."""

  rows: Int[np.ndarray, "query candidate"]
  """Rows of the documents' vectors; 0 for padding."""
  relevant: Bool[np.ndarray, "query candidate"]
  """True for a relevant document."""
  candidate: Bool[np.ndarray, "query candidate"]
  """False for padding."""
  left_out: Int[np.ndarray, "query candidate"]
  """Rows of relevant documents that are no candidates, nearest first; -1 for
  padding. They are no negatives in a pool either."""


def init(dim: int) -> dict[str, Float[Array, "dim dim"]]:
  """Makes a zero map, which changes no vector.

  >>> {name: leaf.shape for name, leaf in init(384).items()}
  {'map': (384, 384)}

  Args:
    dim: length of the encoder's vectors.
  """
  checks.at_least(1, dim=dim)
  return {_NAME: jnp.zeros((dim, dim), jnp.float32)}


def map_queries(
  params: typing.Params, queries: Float[Array, "query dim"]
) -> Float[Array, "query dim"]:
  """Maps query vectors: query + query @ map.

  Args:
    params: "map", [dim, dim].
    queries: vectors of the encoder.

  Returns:
    Vectors whose dot product with a document's vector is the score. They are not
    of unit length, which changes no ranking of documents.
  """
  return queries + queries @ params[_NAME]


def get_matrix(params: typing.Params) -> Float[np.ndarray, "dim dim"]:
  """Returns identity + map in float32; the mapped query is query @ (identity +
  map).

  >>> print(get_matrix({"map": jnp.full((2, 2), 0.5)}))
  [[1.5 0.5]
   [0.5 1.5]]

  Args:
    params: "map", [dim, dim].
  """
  change = np.asarray(params[_NAME], np.float32)
  return change + np.eye(len(change), dtype=np.float32)


def choose_candidates(
  nearest: Int[np.ndarray, "query near"],
  relevant: Sequence[Sequence[int]],
  *,
  size: int,
  most_relevant: int = 4,
) -> Candidates:
  """Chooses each query's documents: some relevant ones, then the nearest others.

  The choice for a query depends only on that query, its judgements and public
  documents. Relevant documents beyond `most_relevant` are left out: they are neither
  relevant nor negative. Up to `size` of them are named, for the pool.

  >>> near = np.array([[5, 6, 7]])
  >>> chosen = choose_candidates(near, [[7, 9]], size=3, most_relevant=2)
  >>> chosen.rows.tolist(), chosen.relevant.tolist()
  ([[7, 9, 5]], [[True, True, False]])
  >>> choose_candidates(np.array([[-1, 6, 5]]), [[6]], size=2, most_relevant=1).rows
  array([[6, 5]], dtype=int32)

  Args:
    nearest: rows of documents, nearest first, or -1 for none; `size` or more for each
      query leave no padding.
    relevant: rows of the relevant documents of each query; the nearest of them
      are taken first, then the others in order.
    size: largest number of documents of a query.
    most_relevant: largest number of relevant documents of a query; below `size`.

  Raises:
    ValueError: if sizes or the number of queries disagree.
  """
  checks.at_least(1, most_relevant=most_relevant)
  checks.at_least(most_relevant + 1, size=size)
  if len(nearest) != len(relevant):
    raise ValueError(
      "expected nearest documents and judgements of the same queries, got"
      f" {len(nearest)} and {len(relevant)}"
    )
  shape = (len(nearest), size)
  rows = np.zeros(shape, np.int32)
  left_out = np.full(shape, -1, np.int32)
  flags = np.zeros((2, *shape), bool)
  for query, (near, judged) in enumerate(zip(nearest, relevant, strict=True)):
    relevant_rows = dict.fromkeys(int(row) for row in judged)
    own = [row for row in near.tolist() if row in relevant_rows]
    own = [*dict.fromkeys([*own, *relevant_rows])]
    own, others = own[:most_relevant], own[most_relevant:][:size]
    left_out[query, : len(others)] = others
    others = [
      row for row in near.tolist() if row >= 0 and row not in relevant_rows
    ]
    chosen = [*own, *others][:size]
    rows[query, : len(chosen)] = chosen
    flags[0, query, : len(own)] = True
    flags[1, query, : len(chosen)] = True
  return Candidates(rows, flags[0], flags[1], left_out)


def get_losses(
  params: typing.Params,
  batch: typing.Batch,
  *,
  vectors: Float[Array, "document dim"],
  pool: Int[Array, " pool"] | None = None,
  temperature: float = 0.05,
) -> Float[Array, " batch"]:
  """Computes each query's cross-entropy over its candidates and a public pool.

  The pool keeps the map from raising the scores of documents that are no query's
  candidates. The loss estimates the softmax over all documents: each document of
  the pool is weighted by the size of the collection over the size of the pool.

  Formal guarantee: the loss of a query depends on its own row of `batch`, on
  `params`, and on `vectors` and `pool`, which have to be public. Draw the pool
  from public documents by public randomness. The gradient of a query's loss with
  respect to the map has rank one, query times a mean of documents:
  `optim.clipped_grad` computes its norm without forming it.

  Args:
    params: "map", [dim, dim].
    batch: "queries" [batch, dim], and the fields of `Candidates`, [batch, candidate].
    vectors: public vectors of all documents, of unit length.
    pool: distinct rows of documents with which all queries are compared; None: no
      pool.
    temperature: divisor of the scores, above 0.

  Returns:
    Losses in nats, float32; 0 for a query without relevant candidates.
  """
  vectors = jnp.asarray(vectors)
  queries, rows = batch["queries"], batch["rows"]
  relevant, is_candidate = batch["relevant"], batch["candidate"]
  moved = map_queries(params, queries)
  scores = jnp.einsum("bcd,bd->bc", vectors[rows], moved) / temperature
  if pool is None:
    return listwise.cross_entropy(scores, relevant, is_candidate)
  more = math.log(len(vectors) / len(pool))
  shared = moved @ vectors[pool].T / temperature + more  # [batch, pool]
  compared = jnp.where(is_candidate, rows, -1)  # no pool holds -1
  compared = jnp.concatenate([compared, batch["left_out"]], axis=1)
  same = jnp.asarray(pool)[None, None] == compared[:, :, None]
  return listwise.cross_entropy(
    jnp.concatenate([scores, shared], axis=1),
    jnp.concatenate([relevant, jnp.zeros_like(shared, bool)], axis=1),
    jnp.concatenate([is_candidate, ~same.any(axis=1)], axis=1),
  )
