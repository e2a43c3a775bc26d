"""Adapts the vectors of a frozen encoder by a linear map of the queries.

The score of a document is (query + query @ map) . document. The map starts as
zero, so that the encoder is the start. Documents keep their vectors: an index
need not be built anew. `split_sides` moves half of the map to the documents,
for those who can re-index.

A map of 384 x 384 numbers gets 147,456 numbers of noise, and a few directions of
signal. `denoise` shrinks each singular value by what the known noise explains, and
to zero where noise explains all of it: a log that adds nothing leaves the encoder
as it is, and nobody had to look.

References:
  Gavish and Donoho, "Optimal Shrinkage of Singular Values", IEEE Transactions on
  Information Theory 2017, equation 7 (`denoise`).
  Xiao, "Dual Averaging Methods for Regularized Stochastic Learning and Online
  Optimization", JMLR 2010, algorithm 1 (`dual_averaging`).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from synthq_jax import checks, typing
from synthq_jax.losses import listwise

__all__ = [
  "Candidates",
  "DualAveragingState",
  "choose_candidates",
  "denoise",
  "dual_averaging",
  "get_losses",
  "init",
  "map_queries",
  "split_sides",
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


def split_sides(
  params: typing.Params,
) -> tuple[Float[np.ndarray, "dim dim"], Float[np.ndarray, "dim dim"]]:
  """Splits identity + map into a matrix of queries and one of documents.

  With identity + map = U S V^T these are U sqrt(S) and V sqrt(S): their scores
  are those of `map_queries`. Documents of unit length after their matrix rank
  better, because no document is near to every query.

  >>> matrices = split_sides({"map": jnp.diag(jnp.array([3.0, 0.0]))})
  >>> [np.round(np.abs(m), 3).tolist() for m in matrices]
  [[[2.0, 0.0], [0.0, 1.0]], [[2.0, 0.0], [0.0, 1.0]]]

  Args:
    params: "map", [dim, dim].

  Returns:
    The matrices, float32: multiply queries by the first, documents by the second.
  """
  whole = np.asarray(params[_NAME], np.float64)
  left, values, right = np.linalg.svd(whole + np.eye(len(whole)))
  root = np.sqrt(values)
  return (
    (left * root).astype(np.float32),
    (right.T * root).astype(np.float32),
  )


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
    batch: "queries" [batch, dim]; the fields of `Candidates`, [batch, candidate];
      and maybe "scores" [batch, candidate], to which query @ map @ document is
      added in place of the cosine.
    vectors: of all documents, of unit length, public.
    pool: distinct rows of documents that all queries are compared with; None: none.
    temperature: divides cosines and what the map adds, above 0.

  Returns:
    Nats, float32; 0 for a query without relevant candidates.

  Raises:
    ValueError: if there is a pool and "scores", which a pool's documents lack.
  """
  vectors = jnp.asarray(vectors)
  queries, rows = batch["queries"], batch["rows"]
  relevant, is_candidate = batch["relevant"], batch["candidate"]
  moved = queries @ params[_NAME]
  if "scores" in batch:
    if pool is not None:
      raise ValueError("expected a pool or scores of candidates, got both")
    base = batch["scores"]
  else:
    moved, base = queries + moved, 0.0
  scores = jnp.einsum("bcd,bd->bc", vectors[rows], moved) / temperature + base
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


def denoise(
  matrix: Float[Array, "row column"], noise_std: jax.typing.ArrayLike
) -> Float[Array, "row column"]:
  """Shrinks singular values by the noise that a matrix is known to hold.

  The best estimate in mean square, for large matrices of few directions. Noise
  alone has singular values up to noise_std (sqrt(rows) + sqrt(columns)), and those
  become 0.

  Formal guarantee: post-processing of a noisy matrix; `noise_std` is public.

  >>> print(denoise(jnp.diag(jnp.array([5.0, 1.0])), 0.0))
  [[5. 0.]
   [0. 1.]]

  Args:
    matrix: a signal of low rank plus independent Gaussian noise.
    noise_std: standard deviation of the noise in each number, at least 0.

  Returns:
    float32; the matrix itself without noise.
  """
  matrix = jnp.asarray(matrix, jnp.float32)
  long, ratio = max(matrix.shape), min(matrix.shape) / max(matrix.shape)
  left, values, right = jnp.linalg.svd(matrix, full_matrices=False)
  unit = noise_std * math.sqrt(long)
  # In units of the noise: sqrt((y^2 - ratio - 1)^2 - 4 ratio) / y.
  inside = (values**2 - (ratio + 1) * unit**2) ** 2 - 4 * ratio * unit**4
  shrunk = jnp.sqrt(jnp.maximum(inside, 0.0)) / jnp.maximum(values, 1e-30)
  is_seen = values > (1 + math.sqrt(ratio)) * unit
  shrunk = jnp.where(is_seen, shrunk, 0.0)
  return jnp.where(noise_std > 0, (left * shrunk[None]) @ right, matrix)


class DualAveragingState(NamedTuple):
  """State of `dual_averaging`."""

  step: jax.Array  # [] int32
  total: typing.Params  # sum of the noisy means so far, float32


def dual_averaging(
  learning_rate: float, *, noise_std: float
) -> optax.GradientTransformation:
  """Builds the optimizer whose parameters are a denoised sum of all gradients.

  After step t every matrix is -learning_rate x denoise(sum of t noisy means,
  noise_std sqrt(t)). The noise is taken out of the sum, never out of a step, in
  which the signal would drown; so a direction of signal rises above the noise
  with t. What is no matrix is not denoised. It stands behind `optim.privatize` with independent noise, and starts
  from zero.

  Formal guarantee: post-processing of the noisy means; the arguments are public.

  >>> transform = dual_averaging(2.0, noise_std=0.0)
  >>> params = {"map": jnp.zeros((2, 2))}
  >>> state = transform.init(params)
  >>> updates, state = transform.update({"map": jnp.eye(2)}, state, params)
  >>> print(jnp.diag(updates["map"]))
  [-2. -2.]

  Args:
    learning_rate: a number above 0.
    noise_std: standard deviation of the noise in each number of a mean:
      `claim.noise_std` over the denominator.

  Returns:
    An optax transform whose `update` needs the parameters.
  """
  checks.within("(0, inf)", learning_rate=learning_rate)
  checks.within("[0, inf)", noise_std=noise_std)

  def init_fn(params: optax.Params) -> DualAveragingState:
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
    return DualAveragingState(jnp.zeros([], jnp.int32), zeros)

  def update_fn(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, DualAveragingState]:
    if params is None:
      raise ValueError("expected params in update(updates, state, params)")
    step = jnp.asarray(optax.safe_increment(state.step))
    total = jax.tree.map(jnp.add, state.total, updates)
    std = noise_std * jnp.sqrt(step.astype(jnp.float32))
    changes = jax.tree.map(
      lambda x, p: -learning_rate * (denoise(x, std) if x.ndim == 2 else x) - p,
      total,
      params,
    )
    return changes, DualAveragingState(step, total)

  return optax.GradientTransformation(init_fn, update_fn)
