"""Adapts the vectors of a frozen encoder by a linear map of the queries.

The score of a document is (query + query @ map) . document. The map starts as
zero, so that the encoder is the start. Documents keep their vectors: an index
need not be built anew.

Where a log adds nothing the map stays zero: `optim.denoising` takes the noise that
is known to be there out of it, and nobody had to look.
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
  """The documents that a query's loss compares."""

  rows: Int[np.ndarray, "query candidate"]
  """Rows of the documents' vectors; 0 for padding."""
  relevant: Bool[np.ndarray, "query candidate"]
  """Whether a document is relevant."""
  candidate: Bool[np.ndarray, "query candidate"]
  """False for padding."""


def init(dim: int) -> dict[str, Float[Array, "dim dim"]]:
  """Makes the map that changes nothing.

  >>> {name: leaf.shape for name, leaf in init(384).items()}
  {'map': (384, 384)}

  Args:
    dim: length of a vector.
  """
  checks.at_least(1, dim=dim)
  return {_NAME: jnp.zeros((dim, dim), jnp.float32)}


def map_queries(
  params: typing.Params, queries: Float[Array, "query dim"]
) -> Float[Array, "query dim"]:
  """Returns query + query @ map; documents keep their vectors.

  Args:
    params: "map", [dim, dim].
    queries: vectors of the encoder.

  Returns:
    Vectors whose dot product with a document's vector is the score. They are not
    of unit length, which no ranking of documents depends on.
  """
  return queries + queries @ params[_NAME]


def get_matrix(params: typing.Params) -> Float[np.ndarray, "dim dim"]:
  """Returns identity + map, float32, by which a query is multiplied from the left.

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

  The choice for a query depends on that query, its judgements and public
  documents alone. Relevant documents beyond `most_relevant` are left out: they
  are neither relevant nor negative.

  >>> near = np.array([[5, 6, 7]])
  >>> chosen = choose_candidates(near, [[7, 9]], size=3, most_relevant=2)
  >>> chosen.rows.tolist(), chosen.relevant.tolist()
  ([[7, 9, 5]], [[True, True, False]])

  Args:
    nearest: rows of documents, nearest first; at least `size` of each query fill
      all places.
    relevant: rows of the relevant documents of each query; the nearest of them
      are taken first, then the others in order.
    size: documents of each query, at most.
    most_relevant: relevant documents of each query, at most; below `size`.

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
  flags = np.zeros((2, *shape), bool)
  for query, (near, judged) in enumerate(zip(nearest, relevant, strict=True)):
    wanted = dict.fromkeys(int(row) for row in judged)
    own = [row for row in near.tolist() if row in wanted]
    own = [*dict.fromkeys([*own, *wanted])][:most_relevant]
    others = [row for row in near.tolist() if row not in wanted]
    chosen = [*own, *others][:size]
    rows[query, : len(chosen)] = chosen
    flags[0, query, : len(own)] = True
    flags[1, query, : len(chosen)] = True
  return Candidates(rows, flags[0], flags[1])


def get_losses(
  params: typing.Params,
  batch: typing.Batch,
  *,
  vectors: Float[Array, "document dim"],
  pool: Int[Array, " pool"] | None = None,
  temperature: float = 0.05,
) -> Float[Array, " batch"]:
  """Returns each query's cross-entropy over its candidates and a public pool.

  A pool keeps the map from pulling up documents that no query had among its
  candidates. Each of its documents stands for as many as the collection holds
  for one of the pool: the softmax over all documents, estimated.

  Formal guarantee: the loss of a query depends on its own row of `batch`, on
  `params`, and on `vectors` and `pool`, which have to be public. Draw the pool
  from public documents by public randomness. The gradient of a query by the map
  has rank one, query times a mean of documents: `optim.clipped_grad` finds its
  norm without forming it.

  Args:
    params: "map", [dim, dim].
    batch: "queries" [batch, dim], and the fields of `Candidates`, [batch, candidate].
    vectors: of all documents, of unit length, public.
    pool: distinct rows of documents that all queries are compared with; None: none.
    temperature: divides cosines and what the map adds, above 0.

  Returns:
    Nats, float32; 0 for a query without relevant candidates.
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
  same = (jnp.asarray(pool)[None, None] == rows[:, :, None]) & is_candidate[
    :, :, None
  ]
  return listwise.cross_entropy(
    jnp.concatenate([scores, shared], axis=1),
    jnp.concatenate([relevant, jnp.zeros_like(shared, bool)], axis=1),
    jnp.concatenate([is_candidate, ~same.any(axis=1)], axis=1),
  )
