"""Clients: each with its own sentences, passages and questions.

`federation.build` makes them. A client may lack questions of a split; its
sentences may stand twice, in several passages: rankings break their ties by
position, and losses mask what is equal.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from synthq_jax.data import vocabulary as vocabulary_lib

if TYPE_CHECKING:
  import seqio

__all__ = [
  "Client",
  "Questions",
  "Tokens",
  "tokenize",
  "with_questions",
]

Answers = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Questions:
  """Questions of one client and split, private as queries are.

  Attributes:
    ids: of the queries, distinct.
    texts: what was asked.
    answers: positions in the client's sentences that answer, one or more for
      each question; the first is the one to train on.
  """

  ids: tuple[str, ...] = dataclasses.field(default=(), repr=False)
  texts: tuple[str, ...] = dataclasses.field(default=(), repr=False)
  answers: Answers = dataclasses.field(default=(), repr=False)

  def __post_init__(self):
    """Checks the lengths."""
    if not len(self.ids) == len(self.texts) == len(self.answers):
      raise ValueError(
        f"expected an id, a text and answers for each question, got "
        f"{len(self.ids)}, {len(self.texts)} and {len(self.answers)}"
      )

  def __len__(self) -> int:
    """Returns how many there are."""
    return len(self.ids)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Client:
  """One client's texts.

  Attributes:
    name: of the client.
    sentences: of all its passages, in their order.
    passages: [sentence] number of each sentence's passage: 0, and then as it
      was or one more.
    passage_ids: ids of the passages, by number.
    splits: split -> questions; each client of a federation has all splits,
      though there may be no questions in one.

  Raises:
    ValueError: if numbers and sentences do not fit together.
  """

  name: str
  sentences: tuple[str, ...] = dataclasses.field(repr=False)
  passages: Int[np.ndarray, " sentence"] = dataclasses.field(repr=False)
  passage_ids: tuple[str, ...] = dataclasses.field(repr=False)
  splits: Mapping[str, Questions] = dataclasses.field(repr=False)

  def __post_init__(self):
    """Checks numbers and answers."""
    _check_passages(self.name, self.passages, len(self.sentences))
    if len(self.passage_ids) != self.passages[-1] + 1:
      raise ValueError(
        f"client {self.name!r}: expected an id for each of "
        f"{self.passages[-1] + 1} passages, got {len(self.passage_ids)}"
      )
    for split, questions in self.splits.items():
      _check_answers(self.name, split, questions.answers, len(self.sentences))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
  """One client's texts as tokens; 0 is padding.

  Attributes:
    name: of the client.
    sentences: int32 [sentence, sentence_length].
    passages: int32 [sentence], as in `Client`.
    questions: split -> int32 [question, query_length].
    answers: split -> positions in `sentences`, as in `Questions`.

  Raises:
    ValueError: if numbers and rows do not fit together.
  """

  name: str
  sentences: Int[np.ndarray, "sentence length"] = dataclasses.field(repr=False)
  passages: Int[np.ndarray, " sentence"] = dataclasses.field(repr=False)
  questions: Mapping[str, Int[np.ndarray, "question length"]] = (
    dataclasses.field(repr=False)
  )
  answers: Mapping[str, Answers] = dataclasses.field(repr=False)

  def __post_init__(self):
    """Checks numbers and answers."""
    _check_passages(self.name, self.passages, len(self.sentences))
    for split, answers in self.answers.items():
      _check_answers(self.name, split, answers, len(self.sentences))
      if len(self.questions[split]) != len(answers):
        raise ValueError(
          f"client {self.name!r}: expected answers to each of "
          f"{len(self.questions[split])} {split} questions, got {len(answers)}"
        )


def tokenize(
  client: Client,
  vocabulary: "seqio.SentencePieceVocabulary",
  *,
  query_length: int = 32,
  sentence_length: int = 128,
) -> Tokens:
  """Turns a client's texts into tokens.

  Args:
    client: whose texts.
    vocabulary: from `synthq_jax.data.vocabulary.load`.
    query_length: columns of questions; longer ones are cut, and keep their EOS.
    sentence_length: columns of sentences.

  Returns:
    The tokens. Sentences keep their order, so that positions stay valid.
  """
  return Tokens(
    name=client.name,
    sentences=vocabulary_lib.tokenize(
      vocabulary, client.sentences, length=sentence_length
    ),
    passages=client.passages,
    questions={
      split: vocabulary_lib.tokenize(
        vocabulary, questions.texts, length=query_length
      )
      for split, questions in client.splits.items()
    },
    answers={
      split: questions.answers for split, questions in client.splits.items()
    },
  )


def with_questions(
  clients: Iterable[Client], split: str, minimum: int = 1
) -> tuple[Client, ...]:
  """Returns the clients that have so many questions of a split.

  Clients without train questions have nothing to train on, and those without
  test questions nothing to be measured on.

  Args:
    clients: to choose from.
    split: a split of theirs.
    minimum: the number of questions that one has at least.

  Returns:
    Those clients, in order.
  """
  return tuple(
    client for client in clients if len(client.splits[split]) >= minimum
  )


def _check_passages(name: str, passages: np.ndarray, sentences: int) -> None:
  """Refuses numbers of passages that do not count up from 0."""
  sound = len(passages) == sentences > 0 and passages[0] == 0
  if not sound or not np.isin(np.diff(passages), (0, 1)).all():
    raise ValueError(
      f"client {name!r}: expected a passage for each of {sentences} sentences,"
      f" numbered 0, 0, 1, ... in order, got {passages[:8]} (of "
      f"{len(passages)})"
    )


def _check_answers(
  name: str, split: str, answers: Answers, sentences: int
) -> None:
  """Refuses answers that are no sentences."""
  for positions in answers:
    if not positions or min(positions) < 0 or max(positions) >= sentences:
      raise ValueError(
        f"client {name!r}: expected answers among {sentences} sentences, got "
        f"{positions} in split {split!r}; correct them"
      )
