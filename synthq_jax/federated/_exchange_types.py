"""What an exchange reads and returns."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Array, Float, Int, Key

from synthq_jax.privacy import statement

__all__ = [
  "COLLECTION_UNIT",
  "QUESTION_UNIT",
  "Exchange",
  "Exchanged",
  "Negatives",
  "Party",
  "Promise",
  "Traffic",
]

QUESTION_UNIT = "question"
"""The unit of promises about who asks, unless that of its encoder is another:
statements of one unit alone add up."""

COLLECTION_UNIT = "passage"
"""The unit of promises about who answers: all sentences of one passage."""


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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Negatives:
  """Vectors that answer none of a client's questions, as far as is known."""

  vectors: Float[np.ndarray, "vector dim"]
  """Unit vectors, float32."""
  rows: Int[np.ndarray, "question extra"]
  """For each question positions in `vectors`, int32; -1: none."""


class Traffic(NamedTuple):
  """Bytes of one client in one round, over all its partners."""

  sent: int
  received: int


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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Exchanged:
  """One round, by names of clients."""

  negatives: Mapping[str, Negatives]
  traffic: Mapping[str, Traffic]
  promises: Mapping[str, Promise]


class Exchange(Protocol):
  """A way to get negatives from beyond a client's own collection."""

  def negatives(
    self,
    parties: Sequence[Party],
    *,
    round_number: int,
    key: Key[Array, ""],
  ) -> Exchanged:
    """Runs one round.

    Args:
      parties: all clients, with different names.
      round_number: from 0; with the key it chooses all randomness, so a number
        is used for one round only, and a round that is made again is another.
      key: secret; what an exchange draws for a client is that client's secret.
    """
