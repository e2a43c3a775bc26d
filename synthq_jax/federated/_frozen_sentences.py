"""Losses against vectors that stay as they are: sentences of a frozen tower."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from synthq_jax.federated import clients
from synthq_jax.federated import negatives as negatives_lib

__all__ = ["Collection", "collect", "losses", "padded", "search"]


class Collection(NamedTuple):
  """A client's distinct sentences, padded to one of few shapes."""

  vectors: Float[Array, "sentence dim"]
  count: Int[Array, ""]  # of those that are no padding


def collect(
  tokens: clients.Tokens, vectors: Float[np.ndarray, "sentence dim"]
) -> tuple[Collection, Int[np.ndarray, "question answer"]]:
  """Lays out the distinct sentences, and which of them answer.

  Args:
    tokens: of the client.
    vectors: of all its sentences; of equal ones the first counts.

  Returns:
    The sentences, and for each train question the positions among them that
    answer: first the one to train on, then the others in any order, then -1.
  """
  same = negatives_lib.first_equal(tokens.sentences)
  firsts, place = np.unique(same, return_inverse=True)
  known = tokens.answers["train"]
  width = _power_of_two(max(map(len, known)))
  answers = np.full((len(known), width), -1, np.int32)
  for row, positions in zip(answers, known, strict=True):
    # The one that is trained on comes first.
    distinct = list(dict.fromkeys(place[list(positions)].tolist()))
    row[: len(distinct)] = distinct
  return Collection(padded(vectors[firsts]), jnp.int32(len(firsts))), answers


def padded(vectors: np.ndarray) -> Float[Array, "row dim"]:
  """Appends zeros, so that many clients share few compiled steps."""
  rows = _power_of_two(len(vectors))
  return jnp.pad(
    jnp.asarray(vectors, jnp.float32), ((0, rows - len(vectors)), (0, 0))
  )


def _power_of_two(count: int) -> int:
  return 1 << max(count - 1, 0).bit_length()


def search(
  scores: Float[Array, "question sentence"],
  answers: Int[Array, "question answer"],
  collection: Collection,
  num_negatives: int,
) -> Int[Array, "question found"]:
  """Returns the best sentences that do not answer; -1 where there are no more."""
  scores = jnp.where(_is_negative(answers, collection), scores, -jnp.inf)
  best, found = jax.lax.top_k(scores, min(num_negatives, scores.shape[1]))
  return jnp.where(jnp.isneginf(best), -1, found)


def _is_negative(
  answers: Int[Array, "question answer"], collection: Collection
) -> Bool[Array, "question sentence"]:
  """Marks sentences that are there and do not answer."""
  total = collection.vectors.shape[0]
  there = jnp.arange(total) < collection.count
  there = jnp.broadcast_to(there[None], (answers.shape[0], total))
  outside = jnp.where(answers < 0, total, answers)
  rows = jnp.arange(answers.shape[0])[:, None]
  return there.at[rows, outside].set(False, mode="drop")


def losses(
  queries: Float[Array, "question dim"],
  batch: Mapping[str, Array],
  collection: Collection,
  extra_vectors: Float[Array, "extra dim"],
  *,
  num_negatives: int | None,
  temperature: float,
) -> Float[Array, " question"]:
  """Returns the softmax loss of each question's answer, in nats.

  Args:
    queries: of the step; gradients flow through them alone.
    batch: "answers" and "extra" with a row for each question, and "found" where
      the own negatives were searched for before.
    collection: the client's sentences.
    extra_vectors: that "extra" points into.
    num_negatives: of the collection, the hardest; None: all.
    temperature: divides the cosines.
  """
  # [question, dim]
  positive = collection.vectors[batch["answers"][:, 0]]
  right = jnp.sum(queries * positive, axis=1, keepdims=True)
  if num_negatives is None:
    # [question, sentence]
    own = queries @ collection.vectors.T
    counts = _is_negative(batch["answers"], collection)
    own = jnp.where(counts, own, -jnp.inf)
  else:
    found = batch.get("found")
    if found is None:
      scores = jax.lax.stop_gradient(queries) @ collection.vectors.T
      found = search(scores, batch["answers"], collection, num_negatives)
    own = _cosines(queries, collection.vectors, found)
  extra = _cosines(queries, extra_vectors, batch["extra"])
  # [question, 1 + own + extra]
  logits = jnp.concatenate([right, own, extra], axis=1) / temperature
  return jax.nn.logsumexp(logits, axis=1) - logits[:, 0]


def _cosines(
  queries: Float[Array, "question dim"],
  vectors: Float[Array, "row dim"],
  rows: Int[Array, "question some"],
) -> Float[Array, "question some"]:
  """Returns products with some rows for each question; -inf where -1."""
  products = jnp.einsum("qd,qnd->qn", queries, vectors[rows])
  return jnp.where(rows < 0, -jnp.inf, products)
