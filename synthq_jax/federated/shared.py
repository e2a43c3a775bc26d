"""What a client shares once, for others to take negatives from."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Array, Float, Key

from synthq_jax.federated import _wire, noised_vectors
from synthq_jax.federated._exchange_types import (
  COLLECTION_UNIT,
  QUESTION_UNIT,
  Party,
  Promise,
)
from synthq_jax.privacy import statement

__all__ = ["Shared", "nothing", "sentences", "summary"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Shared:
  """Vectors that others may search, and the message that brings them."""

  vectors: Float[np.ndarray, "vector dim"]
  """Unit vectors, as who receives the message has them."""
  message: bytes
  """What is sent to each partner, once."""
  promise: Promise
  """About the message."""


def nothing() -> Promise:
  """Returns the promise of a client that sends nothing."""
  return Promise(
    questions=statement.none(unit=QUESTION_UNIT),
    collection=statement.none(unit=COLLECTION_UNIT),
  )


def sentences(
  texts: Sequence[str],
  vectors: Float[np.ndarray, "sentence dim"],
  *,
  generator: Promise,
) -> Shared:
  """Shares sentences that a generator of the client has written.

  Formal guarantee: that of the generator, unchanged (post-processing), for the
  units and the relation of its statements, if prompts, number of sentences and
  filters were chosen without a look at the client's texts. The encoder works at
  whoever receives the texts, and is no part of the message.

  Args:
    texts: what was written.
    vectors: unit vectors of the texts, by the encoder that all clients have.
    generator: what is promised about it: for questions as well, if it was
      trained on pairs of question and sentence.

  Returns:
    The texts, ready to be sent.

  Raises:
    ValueError: if texts and vectors differ in number.
  """
  if len(texts) != len(vectors):
    raise ValueError(
      f"expected a vector for each text, got {len(texts)} and {len(vectors)}"
    )
  note = "Sentences that a generator wrote were shared: post-processing."
  return Shared(
    vectors=np.asarray(vectors, np.float32),
    message=_wire.pack_texts(texts),
    promise=Promise(
      questions=statement.inherit(generator.questions, note),
      collection=statement.inherit(generator.collection, note),
    ),
  )


def summary(
  party: Party,
  centres: Float[np.ndarray, "cell dim"],
  *,
  run: str,
  noise_multiplier: float,
  capacity: int,
  key: Key[Array, ""],
  delta: float | None = None,
  relation: str = "ADD_OR_REMOVE_ONE",
  dtype: str = "float32",
) -> Shared:
  """Shares noised sums of a collection's vectors in cells around centres.

  The directions of the sums stand for what the collection is about. Sums of
  cells without sentences are noise, and as negatives do neither good nor harm.

  Formal guarantee: that of `noised_vectors.cells` and `noised_vectors.promise`
  for one passage of the collection, with all its sentences together. No
  question is read, if none has brought a passage to the client
  (`federation.Federation.num_copies` is 0). One call is one release.

  Args:
    party: the client.
    centres: from `noised_vectors.centres`, of public texts.
    run: names the run: releases of two runs must differ.
    noise_multiplier: standard deviation in every coordinate of a sum, to which
      a passage adds at most norm 1.
    capacity: a public bound of the client's number of passages.
    key: secret of the client, for this release alone.
    delta: of the claim; None: 1 / (2 capacity).
    relation: the neighbouring relation, or "REPLACE_ONE".
    dtype: how vectors travel: "float32", "float16" or "int8".

  Returns:
    The directions of the sums, ready to be sent.

  Raises:
    ValueError: if there are more passages than `capacity`.
  """
  if len(np.unique(party.passages)) > capacity:
    raise ValueError(
      f"expected at most capacity={capacity} passages, got more: raise the"
      " public bound before anything is sent"
    )
  sums = noised_vectors.cells(
    party.sentences,
    party.passages,
    centres,
    noise_multiplier=noise_multiplier,
    key=key,
  )
  sent = _wire.vectors(noised_vectors.unit(sums), dtype)
  promise = noised_vectors.promise(
    identifier=f"{run}/{party.name}/collection",
    unit=COLLECTION_UNIT,
    mechanism="sums of sentence vectors in cells around public centres, clipped"
    " per passage, with Gaussian noise",
    capacity=capacity,
    noise_multiplier=noise_multiplier,
    delta=delta,
    relation=relation,
    encoder=party.sentence_encoder,
  )
  return Shared(
    vectors=_wire.unpack_vectors(sent),
    message=_wire.pack(sent),
    promise=Promise(
      questions=statement.none(unit=QUESTION_UNIT), collection=promise
    ),
  )
