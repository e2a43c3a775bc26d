"""What a federated study finds: frozen, JSON, without texts."""

import dataclasses

import numpy as np

from synthq_jax.federated import ranking

__all__ = [
  "ClientFacts",
  "Facts",
  "Outcome",
  "Ranks",
  "Study",
  "ranks",
  "scores",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientFacts:
  """Counts of one client; as private as its texts."""

  name: str
  num_passages: int
  num_sentences: int
  num_train: int
  """Questions that are trained on."""
  num_test: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
  """Counts of the data."""

  source: str
  partition: str
  num_left_out: int
  """Clients with too few questions."""
  num_foreign_judgements: int
  """Judgements of another client's passage, left out."""
  num_lost_questions: int
  """Questions that nothing of their client answers."""
  clients: tuple[ClientFacts, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranks:
  """Where a client's test questions find their first right answer."""

  client: str
  sentence: list[int]
  """By question, from 1; 0 where none was found."""
  passage: list[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
  """One method with one seed."""

  method: str
  """Its name in tables."""
  seed: int
  variant: str
  """"" or the one setting that differs, as "top=300"."""
  ranks: tuple[Ranks, ...]
  """Of each client."""
  sent: list[int]
  """Bytes that each client sent in an exchange, all rounds together."""
  received: list[int]
  exchanges: int
  """Rounds of the exchange."""
  epsilon_questions: float
  """The largest that a client's exchanges come to, per question; inf where
  nothing is promised, nan where nothing was exchanged."""
  epsilon_collection: float
  """The same per passage."""
  hubness: float
  """Skewness of how often a sentence is drawn as a hard negative of the train
  questions by the final towers, mean over clients; nan for BM25."""
  seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """The whole study."""

  facts: Facts
  notes: tuple[str, ...]
  """What a reader must know of the settings."""
  outcomes: tuple[Outcome, ...]
  seconds: float
  """Of all trainings, those of earlier runs included."""


def ranks(found: ranking.Scores) -> Ranks:
  """Turns ranks into JSON's numbers."""
  return Ranks(
    client=found.client,
    sentence=_numbers(found.sentence_ranks),
    passage=_numbers(found.passage_ranks),
  )


def scores(found: Ranks, split: str = "test") -> ranking.Scores:
  """Turns ranks back, for their measures."""
  return ranking.Scores(
    client=found.client,
    split=split,
    sentence_ranks=_ranks(found.sentence),
    passage_ranks=_ranks(found.passage),
  )


def _numbers(ranks: np.ndarray) -> list[int]:
  return np.where(np.isfinite(ranks), ranks, 0).astype(int).tolist()


def _ranks(numbers: list[int]) -> np.ndarray:
  return np.array([rank or np.inf for rank in numbers], float)
