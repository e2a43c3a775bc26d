"""What a client sends to ask others for negatives: raw or noised vectors."""

import dataclasses
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Array, Float, Int, Key

from synthq_jax.federated import noised_vectors
from synthq_jax.federated._exchange_types import Party
from synthq_jax.privacy import statement

__all__ = ["Message", "NoisedCells", "NoisedRows", "QueryMessage", "Raw"]


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
class NoisedRows:
  """Every question's vector with noise of its own, in a secret order.

  Formal guarantee: that of `noised_vectors.rows` and `noised_vectors.promise`,
  for one question of the client that asks; every round is one more release, of
  which `statement.compose` makes one claim. Only directions are sent:
  post-processing. What the partners answer is THEIR text, and not covered.

  Nothing is added up, so a small epsilon leaves nothing of a vector: see
  `noise_table`. A round whose encoder has not changed teaches nothing new, and
  costs as much as the first one: ask once.
  """

  run: str
  """Names the run: releases of two runs must differ."""
  noise_multiplier: float
  """Standard deviation in every coordinate, for vectors of length 1."""
  capacity: int
  """Rows that are sent, a public bound of a client's number of questions."""
  delta: float | None = None
  """Of the claim about one round; None: 1 / (2 capacity)."""
  relation: str = "ADD_OR_REMOVE_ONE"
  """The neighbouring relation, or "REPLACE_ONE"."""

  def write(self, party, round_number, key):
    noised = noised_vectors.rows(
      party.queries,
      capacity=self.capacity,
      noise_multiplier=self.noise_multiplier,
      key=key,
    )
    promise = _promise(
      self,
      party,
      round_number,
      "the vector of each question, clipped, with Gaussian noise, in a row of"
      " its own among rows of noise alone",
    )
    return Message(noised_vectors.unit(noised.vectors), noised.places, promise)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NoisedCells:
  """Noised sums of the questions' vectors in cells around public centres.

  The questions of a cell share what the partners find for their sum.

  Formal guarantee: that of `noised_vectors.cells` and `noised_vectors.promise`,
  for one question of the client that asks; otherwise as `NoisedRows`.
  """

  run: str
  """Names the run: releases of two runs must differ."""
  centres: Float[np.ndarray, "cell dim"]
  """From `noised_vectors.centres`, of public texts."""
  noise_multiplier: float
  """Standard deviation in every coordinate of a sum of unit vectors."""
  capacity: int
  """A public bound of a client's number of questions."""
  delta: float | None = None
  """Of the claim about one round; None: 1 / (2 capacity)."""
  relation: str = "ADD_OR_REMOVE_ONE"
  """The neighbouring relation, or "REPLACE_ONE"."""

  def write(self, party, round_number, key):
    _check_capacity(self.capacity, len(party.queries))
    sums = noised_vectors.cells(
      party.queries,
      np.arange(len(party.queries)),
      self.centres,
      noise_multiplier=self.noise_multiplier,
      key=key,
    )
    promise = _promise(
      self,
      party,
      round_number,
      "sums of clipped question vectors in cells around public centres, with"
      " Gaussian noise",
    )
    places = noised_vectors.nearest(party.queries, self.centres)
    return Message(noised_vectors.unit(sums), places, promise)


def _promise(
  message: NoisedRows | NoisedCells,
  party: Party,
  round_number: int,
  mechanism: str,
) -> statement.PrivacyStatement:
  return noised_vectors.promise(
    identifier=f"{message.run}/{party.name}/questions/round {round_number}",
    unit=party.query_encoder.unit,
    mechanism=mechanism,
    capacity=message.capacity,
    noise_multiplier=message.noise_multiplier,
    delta=message.delta,
    relation=message.relation,
    encoder=party.query_encoder,
  )


def _check_capacity(capacity: int, units: int) -> None:
  if units > capacity:
    raise ValueError(
      f"expected at most capacity={capacity} units, got more: raise the public"
      " bound before anything is sent"
    )
