"""From judged passages to clients.

`build` hands passages and questions to the clients that they name:

- A passage belongs to the client it names, and to no other. One that names
  nobody ("": shared text) is given to each client one of whose questions it
  answers.
- A question belongs to the client it names, or, where it names none, to the
  client of the first passage that answers it.
- A judgement of another client's passage is left out: clients share no text.
  With `copy_passages` the passage is copied to the asking client instead,
  which suits documents that are public. A question that is left without any
  answer is dropped. `Federation` counts all of these.

So what is judged to answer a question is always among its client's sentences.
Clients may lack train questions, or questions at all; a client without a
passage does not exist. Equal sentences of different passages, and equal
questions, all stay. Which questions stand in which split is left as it is.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from synthq_jax.federated import clients as clients_lib
from synthq_jax.federated import passages as passages_lib

__all__ = ["Federation", "build"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Federation:
  """All clients, and what no client got.

  Attributes:
    clients: sorted by name.
    num_foreign_judgements: judgements of passages that another client holds;
      left out, or met by a copy.
    num_copies: passages that a client got for a question: without it, its
      collection would be another, so that what is promised for questions while
      something of the collection leaves the client would not hold.
    num_lost_questions: questions left without any answer.
    num_lost_passages: passages that name no client and answer nobody.
  """

  clients: tuple[clients_lib.Client, ...] = dataclasses.field(repr=False)
  num_foreign_judgements: int
  num_copies: int
  num_lost_questions: int
  num_lost_passages: int


def build(
  judged: passages_lib.JudgedPassages, *, copy_passages: bool = False
) -> Federation:
  """Hands passages and questions to their clients.

  The head of this module says who gets what.

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
  >>> federation = build(judged)
  >>> [(c.name, c.splits["test"].answers) for c in federation.clients]
  [('one', ((1, 0),)), ('two', ((0,),))]

  Args:
    judged: passages and questions with their clients, as a function of
      `partitions` returns them.
    copy_passages: whether a client gets copies of other clients' passages that
      answer its questions.

  Returns:
    The clients, and counts of what no client got.

  Raises:
    ValueError: if no passage has a client.
  """
  owner = {passage.id: passage.client for passage in judged.passages}
  held: dict[str, set[str]] = collections.defaultdict(set)
  for name, client in owner.items():
    if client:
      held[client].add(name)
  asked: dict[str, list[passages_lib.Question]] = collections.defaultdict(list)
  foreign = copies = 0
  for question in judged.questions:
    client = _asker(question, owner)
    elsewhere = {p for p in question.answers if owner[p] not in ("", client)}
    foreign += len(elsewhere)
    left_out = set() if copy_passages else elsewhere
    kept = {p: q for p, q in question.answers.items() if p not in left_out}
    if client and kept:
      copies += len(kept.keys() - held[client])
      held[client] |= kept.keys()
      asked[client].append(dataclasses.replace(question, answers=kept))
  if not held:
    raise ValueError(
      "expected passages with clients, got none; set them, or use a function "
      "of federated.partitions"
    )
  return Federation(
    clients=_clients(judged, sorted(held), held, asked),
    num_foreign_judgements=foreign,
    num_copies=copies,
    num_lost_questions=len(judged.questions) - sum(map(len, asked.values())),
    num_lost_passages=len(owner.keys() - set().union(*held.values())),
  )


def _asker(question: passages_lib.Question, owner: Mapping[str, str]) -> str:
  """Returns whose question it is, or ""."""
  owners = (owner[passage] for passage in question.answers)
  return question.client or next(filter(None, owners), "")


def _clients(
  judged: passages_lib.JudgedPassages,
  names: Sequence[str],
  held: Mapping[str, set[str]],
  asked: Mapping[str, list[passages_lib.Question]],
) -> tuple[clients_lib.Client, ...]:
  """Makes the clients, passages in the order of the collection."""
  order = {passage.id: i for i, passage in enumerate(judged.passages)}
  return tuple(
    _client(
      name,
      [judged.passages[i] for i in sorted(order[id_] for id_ in held[name])],
      asked.get(name, []),
      judged.splits(),
    )
    for name in names
  )


def _client(
  name: str,
  passages: Sequence[passages_lib.Passage],
  questions: Iterable[passages_lib.Question],
  splits: Sequence[str],
) -> clients_lib.Client:
  """Lays one client's passages behind each other."""
  sizes = [len(passage.sentences) for passage in passages]
  starts = np.cumsum([0, *sizes])
  start = {p.id: int(s) for p, s in zip(passages, starts[:-1], strict=True)}
  parts: dict[str, list[passages_lib.Question]] = {s: [] for s in splits}
  for question in questions:
    parts[question.split].append(question)
  return clients_lib.Client(
    name=name,
    sentences=tuple(text for p in passages for text in p.sentences),
    passages=np.repeat(np.arange(len(sizes), dtype=np.int32), sizes),
    passage_ids=tuple(start),
    splits={
      split: clients_lib.Questions(
        ids=tuple(question.id for question in part),
        texts=tuple(question.text for question in part),
        answers=tuple(
          tuple(start[p] + i for p, places in q.answers.items() for i in places)
          for q in part
        ),
      )
      for split, part in parts.items()
    },
  )
