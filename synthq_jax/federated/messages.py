"""Writes what leaves a client, as bytes, with what is promised about it.

A client asks others for negatives with a `QueryMessage`: raw or noised vectors
of its questions. What stands for its collection is `Shared` once.

Nothing is estimated: a message is serialised, its length is the traffic, and
the receiver works with what it reads back, rounding included.
"""

import dataclasses
import io
import json
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Array, Float, Int, Key

from synthq_jax.federated import noised_vectors
from synthq_jax.privacy import statement

__all__ = [
  "COLLECTION_UNIT",
  "DTYPES",
  "QUESTION_UNIT",
  "Message",
  "NoisedCells",
  "NoisedRows",
  "Party",
  "Promise",
  "QueryMessage",
  "Raw",
  "Shared",
  "nothing",
  "pack",
  "pack_vectors",
  "sentences",
  "summary",
  "unpack",
  "unpack_vectors",
]

QUESTION_UNIT = "question"
"""The unit of promises about who asks, unless that of its encoder is another:
statements of one unit alone add up."""

COLLECTION_UNIT = "passage"
"""The unit of promises about who answers: all sentences of one passage."""

DTYPES = ("float32", "float16", "int8")
"""Types in which unit vectors travel, 4, 2 or 1 bytes a number."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Party:
  """What one client brings to a round; nothing of it leaves by itself.

  Each encoder is stated for one unit. What that of questions has read of the
  collection, and that of sentences of the questions, is no part of any promise:
  let it be nothing, or count it where the encoder was trained.
  """

  name: str
  """Public."""
  queries: Float[np.ndarray, "question dim"]
  """Unit vectors of its train questions."""
  sentences: Float[np.ndarray, "sentence dim"]
  """Unit vectors of its collection."""
  answers: Sequence[Sequence[int]]
  """For each question the positions of the sentences that answer it."""
  passages: Int[np.ndarray, " sentence"]
  """For each sentence the number of its passage."""
  query_encoder: statement.PrivacyStatement
  """What is promised, per question of THIS client, about the encoder that made
  `queries`: `statement.none(unit=QUESTION_UNIT)` for a public one,
  `statement.non_private(...)` for one trained on its questions without noise."""
  sentence_encoder: statement.PrivacyStatement
  """The same for `sentences`, per passage of this client."""

  def __post_init__(self):
    """Refuses parts of different sizes."""
    sizes = (len(self.queries), len(self.sentences))
    if sizes != (len(self.answers), len(self.passages)):
      raise ValueError(
        "expected answers for every question and a passage for every sentence,"
        f" got {len(self.answers)} and {len(self.passages)} for {sizes}"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Promise:
  """What is promised about everything that left a client in a round.

  Two statements, as their units differ and do not add up to one claim: a
  private question does not make a private answer.
  """

  questions: statement.PrivacyStatement
  """Per question of the client."""
  collection: statement.PrivacyStatement
  """Per passage of the client."""

  @property
  def is_private(self) -> bool:
    """Whether something is claimed for the questions AND for the collection."""
    return np.isfinite(self.questions.epsilon + self.collection.epsilon).item()


def nothing() -> Promise:
  """Returns the promise of a client that sends nothing."""
  return Promise(
    questions=statement.none(unit=QUESTION_UNIT),
    collection=statement.none(unit=COLLECTION_UNIT),
  )


class Message(NamedTuple):
  """Vectors to search with, and what stays at home."""

  vectors: Float[np.ndarray, "row dim"]
  """Unit vectors, which leave."""
  places: Int[np.ndarray, " question"]
  """For each question the row whose answers are meant for it; stays."""
  promise: statement.PrivacyStatement
  """About the vectors, per question."""


class QueryMessage(Protocol):
  """Writes the message of one client."""

  def write(
    self, party: Party, round_number: int, key: Key[Array, ""]
  ) -> Message:
    """Returns one message, which ALL partners get: two with different noise
    would tell more than one. The key is for this client and round alone."""


@dataclasses.dataclass(frozen=True)
class Raw:
  """The vectors of all questions as they are, as in Fed-Negative.

  Formal guarantee: none. A vector can be turned back into much of its text.
  """

  def write(self, party, round_number, key):
    del round_number, key
    return Message(
      party.queries,
      np.arange(len(party.queries)),
      statement.non_private(
        "Vectors of the client's questions were sent as they are.",
        unit=party.query_encoder.unit,
      ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Noised:
  """Settings of a noised message about questions."""

  run: str
  """Names the run: releases of two runs must differ."""
  noise_multiplier: float
  """Standard deviation in every coordinate, for vectors of length 1."""
  capacity: int
  """A public bound of a client's number of questions."""
  delta: float | None = None
  """Of the claim about one round; None: 1 / (2 capacity)."""
  relation: str = "ADD_OR_REMOVE_ONE"
  """The neighbouring relation, or "REPLACE_ONE"."""

  def _promise(
    self, party: Party, round_number: int, mechanism: str
  ) -> statement.PrivacyStatement:
    return noised_vectors.promise(
      identifier=f"{self.run}/{party.name}/questions/round {round_number}",
      unit=party.query_encoder.unit,
      mechanism=mechanism,
      capacity=self.capacity,
      noise_multiplier=self.noise_multiplier,
      delta=self.delta,
      relation=self.relation,
      encoder=party.query_encoder,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoisedRows(_Noised):
  """Every question's vector with noise of its own, in a secret order.

  `capacity` rows are sent, whoever asks.

  Formal guarantee: that of `noised_vectors.rows` and `noised_vectors.promise`,
  for one question of the client that asks; every round is one more release, of
  which `statement.compose` makes one claim. Only directions are sent:
  post-processing. What the partners answer is THEIR text, and not covered.

  Nothing is added up, so a small epsilon leaves nothing of a vector. A round
  whose encoder has not changed teaches nothing new, and costs as much as the
  first one: ask once.
  """

  def write(self, party, round_number, key):
    noised = noised_vectors.rows(
      party.queries,
      capacity=self.capacity,
      noise_multiplier=self.noise_multiplier,
      key=key,
    )
    promise = self._promise(
      party,
      round_number,
      "the vector of each question, clipped, with Gaussian noise, in a row of"
      " its own among rows of noise alone",
    )
    return Message(noised_vectors.unit(noised.vectors), noised.places, promise)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NoisedCells(_Noised):
  """Noised sums of the questions' vectors in cells around public centres.

  The questions of a cell share what the partners find for their sum.

  Formal guarantee: that of `noised_vectors.cells` and `noised_vectors.promise`,
  for one question of the client that asks; otherwise as `NoisedRows`.
  """

  centres: Float[np.ndarray, "cell dim"]
  """From `noised_vectors.centres`, of public texts."""

  def write(self, party, round_number, key):
    noised_vectors.check_capacity(self.capacity, len(party.queries), "units")
    sums = noised_vectors.cells(
      party.queries,
      np.arange(len(party.queries)),
      self.centres,
      noise_multiplier=self.noise_multiplier,
      key=key,
    )
    promise = self._promise(
      party,
      round_number,
      "sums of clipped question vectors in cells around public centres, with"
      " Gaussian noise",
    )
    places = noised_vectors.nearest(party.queries, self.centres)
    return Message(noised_vectors.unit(sums), places, promise)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Shared:
  """Vectors that others may search, and the message that brings them."""

  vectors: Float[np.ndarray, "vector dim"]
  """Unit vectors, as who receives the message has them."""
  message: bytes
  """What is sent to each partner, once."""
  promise: Promise
  """About the message."""


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
    The texts as lines of JSON in UTF-8, ready to be sent.

  Raises:
    ValueError: if texts and vectors differ in number.
  """
  if len(texts) != len(vectors):
    raise ValueError(
      f"expected a vector for each text, got {len(texts)} and {len(vectors)}"
    )
  lines = (json.dumps(text, ensure_ascii=False) + "\n" for text in texts)
  note = "Sentences that a generator wrote were shared: post-processing."
  return Shared(
    vectors=np.asarray(vectors, np.float32),
    message="".join(lines).encode(),
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
  (`clients.Federation.num_copies` is 0). One call is one release.

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
  noised_vectors.check_capacity(
    capacity, len(np.unique(party.passages)), "passages"
  )
  sums = noised_vectors.cells(
    party.sentences,
    party.passages,
    centres,
    noise_multiplier=noise_multiplier,
    key=key,
  )
  sent = pack_vectors(noised_vectors.unit(sums), dtype)
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
    vectors=unpack_vectors(sent),
    message=pack(sent),
    promise=Promise(
      questions=statement.none(unit=QUESTION_UNIT), collection=promise
    ),
  )


def pack_vectors(rows: Float[np.ndarray, "row dim"], dtype: str) -> np.ndarray:
  """Returns unit vectors in the type in which they travel.

  int8 is the row over its largest entry, in 127 steps: the length of a unit
  vector need not travel.

  >>> pack_vectors(np.array([[0.6, -0.8]]), "int8").tolist()
  [[95, -127]]

  Args:
    rows: unit vectors; zeros stay.
    dtype: one of `DTYPES`.

  Raises:
    ValueError: if the type is unknown.
  """
  if dtype not in DTYPES:
    raise ValueError(f"expected dtype among {DTYPES}, got {dtype=}")
  if dtype != "int8":
    return rows.astype(dtype)
  largest = np.max(np.abs(rows), axis=1, keepdims=True, initial=0)
  scaled = 127 * rows / np.where(largest > 0, largest, 1)
  return np.rint(scaled).astype(np.int8)


def unpack_vectors(array: np.ndarray) -> Float[np.ndarray, "row dim"]:
  """Returns float32; of length 1 again where rounding has changed that."""
  if array.dtype == np.float32:
    return array
  return noised_vectors.unit(array.astype(np.float32))


def pack(*arrays: np.ndarray) -> bytes:
  """Serialises arrays, each with its type and shape, in NumPy's format."""
  stream = io.BytesIO()
  for array in arrays:
    np.save(stream, array, allow_pickle=False)
  return stream.getvalue()


def unpack(message: bytes) -> list[np.ndarray]:
  """Returns the arrays of a message."""
  stream, arrays = io.BytesIO(message), []
  while stream.tell() < len(message):
    arrays.append(np.load(stream, allow_pickle=False))
  return arrays
