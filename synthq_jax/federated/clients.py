"""Divides judged passages among clients, each with its sentences and questions.

`build` assigns passages and questions to the clients that they name:

- A passage belongs to the client it names, and to no other. A passage that names
  no client ("": shared text) goes to each client with a question it answers.
- A question belongs to the client it names. If it names none, it belongs to the
  client of the first passage that answers it.
- A judgement of another client's passage is left out: clients share no text. A
  question without any remaining answer is dropped. `build` counts both.

A client searches only those shared passages that answer one of its questions,
test questions included. So values are higher than if it searched all of them.

So every judged answer of a question is among its client's sentences. Clients may
lack train questions, or all questions; a client without a passage does not
exist. Equal sentences of different passages, and equal questions, all stay:
rankings break ties by position, and losses mask equal sentences. Questions keep
their split.
"""

import collections
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Int

from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.data import wordpiece
from synthq_jax.federated import passages as passages_lib

__all__ = [
  "TRAIN",
  "Client",
  "Questions",
  "Tokens",
  "build",
  "check_positions",
  "find_first_equal",
  "make_seed_words",
  "tokenize",
]

TRAIN = "train"
"""The split of training questions."""

Answers = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Questions:
  """Questions of one client and split, private as queries are.

  Attributes:
    ids: distinct ids of the queries.
    texts: texts of the questions.
    answers: positions of the client's sentences that answer, one or more for
      each question; training uses the first.
  """

  ids: tuple[str, ...] = dataclasses.field(default=(), repr=False)
  texts: tuple[str, ...] = dataclasses.field(default=(), repr=False)
  answers: Answers = dataclasses.field(default=(), repr=False)

  def __len__(self) -> int:
    """Returns the number of questions."""
    return len(self.ids)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Client:
  """One client's texts.

  Attributes:
    name: name of the client.
    sentences: sentences of all its passages, in their order.
    passages: passage number of each sentence [sentence], from 0, ascending
      without gaps.
    passage_ids: ids of the passages, by number.
    splits: split -> questions. Each client of a federation has all splits; a
      split may have no questions.
  """

  name: str
  sentences: tuple[str, ...] = dataclasses.field(repr=False)
  passages: Int[np.ndarray, " sentence"] = dataclasses.field(repr=False)
  passage_ids: tuple[str, ...] = dataclasses.field(repr=False)
  splits: Mapping[str, Questions] = dataclasses.field(repr=False)

  def __post_init__(self):
    """Refuses passage numbers and answers that `check_positions` refuses."""
    answers = [part.answers for part in self.splits.values()]
    check_positions(self.name, len(self.sentences), answers, self.passages)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
  """One client's texts as tokens; 0 is padding.

  Attributes:
    name: name of the client.
    sentences: int32 [sentence, sentence_length].
    passages: int32 [sentence], as in `Client`.
    questions: split -> int32 [question, query_length].
    answers: split -> positions in `sentences`, as in `Questions`.
  """

  name: str
  sentences: Int[np.ndarray, "sentence length"] = dataclasses.field(repr=False)
  passages: Int[np.ndarray, " sentence"] = dataclasses.field(repr=False)
  questions: Mapping[str, Int[np.ndarray, "question length"]] = (
    dataclasses.field(repr=False)
  )
  answers: Mapping[str, Answers] = dataclasses.field(repr=False)

  def __post_init__(self):
    """Refuses passage numbers and answers that `check_positions` refuses."""
    answers = self.answers.values()
    check_positions(self.name, len(self.sentences), answers, self.passages)


def check_positions(
  name: str,
  num_sentences: int,
  answers: Iterable[Sequence[Sequence[int]]],
  passages: Int[np.ndarray, " sentence"] | None = None,
) -> None:
  """Refuses answers that are no sentences, and passages out of order.

  NumPy would take a negative position from the end, and passage numbers with gaps
  or out of order would rank the passages of others.

  Args:
    name: name of the client, for the message.
    num_sentences: number of its sentences.
    answers: positions of sentences for each question, of several splits.
    passages: passage number of each sentence, or None.

  Raises:
    ValueError: if a question has no answer or one outside of the sentences, or
      passage numbers are not 0, 1 and so on, each once or several times in a row.
  """
  every = [*itertools.chain.from_iterable(answers)]
  positions = [*itertools.chain.from_iterable(every)]
  if not all(map(len, every)) or not all(
    0 <= position < num_sentences for position in positions
  ):
    raise ValueError(
      f"client {name!r}: expected for each question one answer or more, as"
      f" positions from 0 to {num_sentences - 1} of its sentences, got others:"
      " correct the answers"
    )
  if passages is None:
    return
  steps = np.diff(np.asarray(passages), prepend=-1)
  if (
    len(steps) != num_sentences
    or not np.isin(steps, (0, 1)).all()
    or (num_sentences and steps[0] != 1)
  ):
    raise ValueError(
      f"client {name!r}: expected a passage number for each of"
      f" {num_sentences} sentences, from 0, ascending without gaps, got others:"
      " sort the sentences by passage and number these anew"
    )


def tokenize(
  client: Client,
  vocabulary: vocabulary_lib.SentencePiece | wordpiece.WordPiece,
  *,
  query_length: int = 32,
  sentence_length: int = 128,
) -> Tokens:
  """Tokenizes a client's texts.

  Args:
    client: client with texts.
    vocabulary: vocabulary from `data.vocabulary.load`, or of a BERT from
      `data.wordpiece.load`.
    query_length: columns of questions; longer ones are cut, and keep their EOS.
    sentence_length: columns of sentences, which are cut alike.

  Returns:
    The tokens. Sentences keep their order, so positions stay valid.
  """
  rows = functools.partial(vocabulary_lib.tokenize, vocabulary)
  if isinstance(vocabulary, wordpiece.WordPiece):
    rows = vocabulary.rows
  return Tokens(
    name=client.name,
    sentences=rows(client.sentences, length=sentence_length),
    passages=client.passages,
    questions={
      split: rows(questions.texts, length=query_length)
      for split, questions in client.splits.items()
    },
    answers={
      split: questions.answers for split, questions in client.splits.items()
    },
  )


def build(
  judged: passages_lib.JudgedPassages,
) -> tuple[tuple[Client, ...], dict[str, int]]:
  """Assigns passages and questions to clients, as described at this module's top.

  >>> Passage, Question = passages_lib.Passage, passages_lib.Question
  >>> judged = passages_lib.JudgedPassages(
  ...     passages=(
  ...         Passage(id="p", sentences=("Red.", "Round."), client="one"),
  ...         Passage(id="r", sentences=("Green.",), client="two"),
  ...     ),
  ...     questions=(
  ...         Question(id="q", text="?", split="test", answers={"p": (1, 0)}),
  ...         Question(id="s", text="?", split="test", answers={"r": (0,)}),
  ...     ),
  ... )
  >>> members, _ = build(judged)
  >>> [(c.name, c.splits["test"].answers) for c in members]
  [('one', ((1, 0),)), ('two', ((0,),))]

  Args:
    judged: passages and questions with their clients, for example from a
      function of `partitions`.

  Returns:
    The clients, sorted by name, and four counts: "num_foreign_judgements" of
    passages that another client holds, and "num_lost_questions" without any
    remaining answer, which are left out; of the passages that name no client,
    "num_shared_passages" that some client holds, and "num_unheld_passages" that
    none holds, which are left out.

  Raises:
    ValueError: if no passage has a client.
  """
  owner = {passage.id: passage.client for passage in judged.passages}
  held: dict[str, set[str]] = collections.defaultdict(set)
  for name, client in owner.items():
    if client:
      held[client].add(name)
  questions_by_client: dict[str, list[passages_lib.Question]] = (
    collections.defaultdict(list)
  )
  foreign = 0
  for question in judged.questions:
    client = _find_client(question, owner)
    elsewhere = {p for p in question.answers if owner[p] not in ("", client)}
    foreign += len(elsewhere)
    own_answers = {
      p: q for p, q in question.answers.items() if p not in elsewhere
    }
    if client and own_answers:
      held[client] |= own_answers.keys()
      questions_by_client[client].append(
        dataclasses.replace(question, answers=own_answers)
      )
  if not held:
    raise ValueError(
      'expected passages with clients, got none: name them ("client" in the lines'
      " of corpus.jsonl), or divide the passages (partition='dirichlet', or a"
      " function of federated.partitions)"
    )
  shared = {name for name, client in owner.items() if not client}
  in_use = set[str]().union(*held.values())
  splits = judged.splits()
  positions = {passage.id: i for i, passage in enumerate(judged.passages)}
  members = tuple(
    _make_client(
      name,
      [
        judged.passages[i] for i in sorted(positions[id_] for id_ in held[name])
      ],
      questions_by_client[name],
      splits,
    )
    for name in sorted(held)
  )
  return members, {
    "num_foreign_judgements": foreign,
    "num_lost_questions": len(judged.questions)
    - sum(map(len, questions_by_client.values())),
    "num_shared_passages": len(shared & in_use),
    "num_unheld_passages": len(shared - in_use),
  }


def _find_client(
  question: passages_lib.Question, owner: Mapping[str, str]
) -> str:
  """Returns the name of the client that a question belongs to, or ""."""
  owners = (owner[passage] for passage in question.answers)
  return question.client or next(filter(None, owners), "")


def _make_client(
  name: str,
  passages: Sequence[passages_lib.Passage],
  questions: Sequence[passages_lib.Question],
  splits: Sequence[str],
) -> Client:
  """Makes a client: its passages' sentences in one sequence, with its questions."""
  sizes = [len(passage.sentences) for passage in passages]
  starts = np.cumsum([0, *sizes])
  start = {p.id: int(s) for p, s in zip(passages, starts[:-1], strict=True)}
  parts = {s: [q for q in questions if q.split == s] for s in splits}
  return Client(
    name=name,
    sentences=tuple(text for p in passages for text in p.sentences),
    passages=np.repeat(np.arange(len(sizes), dtype=np.int32), sizes),
    passage_ids=tuple(start),
    splits={
      split: Questions(
        ids=tuple(question.id for question in part),
        texts=tuple(question.text for question in part),
        answers=tuple(
          tuple(
            start[p] + i for p, indices in q.answers.items() for i in indices
          )
          for q in part
        ),
      )
      for split, part in parts.items()
    },
  )


def find_first_equal(
  sentences: Int[np.ndarray, "sentence length"],
) -> Int[np.ndarray, " sentence"]:
  """Returns the position of the first equal sentence for each sentence.

  >>> find_first_equal(np.array([[5, 1], [7, 1], [5, 1]], np.int32)).tolist()
  [0, 1, 0]

  Args:
    sentences: tokens, 0 = padding at the end of a row.

  Returns:
    Positions in int32.
  """
  firsts: dict[bytes, int] = {}
  rows = np.ascontiguousarray(sentences)
  return np.array(
    [
      firsts.setdefault(row.tobytes(), position)
      for position, row in enumerate(rows)
    ],
    np.int32,
  )


def make_seed_words(text: str | bytes) -> list[int]:
  """Returns a digest of a text as four 32-bit numbers, for use in a seed.

  Unlike `hash`, the digest is the same in every process.

  >>> words = make_seed_words("NINDS")
  >>> len(words), words == make_seed_words(b"NINDS")
  (4, True)

  Args:
    text: text to digest, such as the name of a client.
  """
  text = text.encode() if isinstance(text, str) else text
  digest = hashlib.sha256(text).digest()[:16]
  return np.frombuffer(digest, "<u4").tolist()
