"""Exchanges negatives between clients, and counts what that costs.

One interface for all: `negatives(parties, round_number=, key=)` returns the
extra negatives of each client, the bytes it sent and received, and what is
promised about what left it.

::

  | exchange | what leaves a client | promised for |
  |---|---|---|
  | `FedNegative`, `Raw` | question and sentence vectors | nothing |
  | `FedNegative`, `NoisedRows` | noised question vectors, sentence vectors | questions |
  | `FedNegative`, `NoisedCells` | noised sums of them, sentence vectors | questions |
  | `SharedOnce`, `summary` | noised sums of sentence vectors | both |
  | `SharedOnce`, `sentences` | what a private generator wrote | as the generator |
  | `PublicCorpus` | nothing | both |

Fed-Negative is our reading of "cross-client negatives (Fed-Negative)": a client
sends the vectors of its questions to others, each of which searches its own
collection and sends the vectors of the best sentences back. They answer none of
the client's questions unless collections overlap, which nobody can see without
texts: what is closer than `same_as` to a known answer is dropped.

Noise on the questions does not make it private: the answers are sentences of
other clients. Where collections are private, too, only the last three rows are;
where they are public, as documents are elsewhere in this project, say so with
`collections_are_public`. A partner that answers from public or generated
sentences alone would be safe and pointless: such sentences can be fetched, and
searched at home with the exact vectors.

Who is asked is a choice of names, public settings and the number of the round
(`Partners`): it says nothing about the texts of who asks.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np
from jaxtyping import Array, Float, Int, Key

from synthq_jax import checks
from synthq_jax.federated import clients, messages
from synthq_jax.privacy import statement
from synthq_jax.retrieval import index

__all__ = [
  "SAME_AS",
  "Everyone",
  "Exchange",
  "Exchanged",
  "FedNegative",
  "Negatives",
  "Partners",
  "PublicCorpus",
  "RandomPartners",
  "SharedOnce",
  "Traffic",
  "over_rounds",
]

SAME_AS = 0.95
"""Cosine to a known answer from which on a sentence counts as that answer.

With the public T5 and two sites of MedQuAD without a common sentence, the ten
nearest sentences of the other site come up to 0.84 close to an answer."""


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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Exchanged:
  """One round, by names of clients."""

  negatives: Mapping[str, Negatives]
  traffic: Mapping[str, Traffic]
  promises: Mapping[str, messages.Promise]


class Exchange(Protocol):
  """A way to get negatives from beyond a client's own collection."""

  def negatives(
    self,
    parties: Sequence[messages.Party],
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


class Partners(Protocol):
  """Chooses the partners of one client."""

  def choose(
    self, asking: str, names: Sequence[str], round_number: int
  ) -> tuple[str, ...]:
    """Returns names, without the client's own, in the order of `names`."""


@dataclasses.dataclass(frozen=True)
class Everyone:
  """All other clients."""

  def choose(self, asking, names, round_number):
    del round_number
    return tuple(name for name in names if name != asking)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomPartners:
  """Some of the others, drawn anew in each round.

  >>> RandomPartners(count=1, seed=0).choose("a", ["a", "b"], 0)
  ('b',)
  """

  count: int
  """How many; all where there are fewer."""
  seed: int
  """Public."""

  def __post_init__(self):
    checks.at_least(0, count=self.count)

  def choose(self, asking, names, round_number):
    others = [name for name in names if name != asking]
    place = list(names).index(asking)
    rng = np.random.default_rng([self.seed, round_number, place])
    drawn = rng.permutation(len(others))[: self.count]
    return tuple(others[i] for i in np.sort(drawn))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedNegative:
  """Asks partners for their sentences that are nearest to the questions.

  Formal guarantee: for a client's questions that of `queries`, a release for
  each round; for the collections of those who answer NONE, unless they are
  declared public: then that of the encoder of their vectors.
  """

  queries: messages.QueryMessage = messages.Raw()
  """What is asked with."""
  top: int = 10
  """Sentences that each partner returns for each row of the message."""
  partners: Partners = Everyone()
  """Who is asked."""
  dtype: str = "float32"
  """How vectors travel, both ways: "float32", "float16" or "int8"."""
  same_as: float = SAME_AS
  """See `SAME_AS`."""
  collections_are_public: bool = False
  """Whether whoever runs this declares that sentences need no protection."""

  def negatives(self, parties, *, round_number, key):
    by_name = _by_name(parties)
    written = {
      name: self.queries.write(
        party, round_number, _own_key(key, round_number, name)
      )
      for name, party in by_name.items()
    }
    requests = {
      name: messages.pack(messages.pack_vectors(message.vectors, self.dtype))
      for name, message in written.items()
    }
    asked = {
      name: self.partners.choose(name, tuple(by_name), round_number)
      for name in by_name
    }
    replies: dict[tuple[str, str], bytes] = {}
    for answering, party in by_name.items():
      searched = index.exact(party.sentences)
      for name in by_name:
        if answering in asked[name]:
          replies[name, answering] = self._reply(searched, requests[name])
    crossed = [(one, other, len(requests[one])) for one, other in replies]
    crossed += [(who, to, len(reply)) for (to, who), reply in replies.items()]
    return Exchanged(
      negatives={
        name: self._read(
          party,
          written[name].places,
          [replies[name, other] for other in asked[name]],
        )
        for name, party in by_name.items()
      },
      traffic=_traffic(by_name, crossed),
      promises={
        name: self._promise(party, written[name].promise, asked)
        for name, party in by_name.items()
      },
    )

  def _reply(self, searched: index.Index, request: bytes) -> bytes:
    """Returns the best sentences for a request, each of them once."""
    asked = messages.unpack_vectors(messages.unpack(request)[0])
    _, at = searched.search(asked, self.top)
    used, rows = np.unique(at, return_inverse=True)
    vectors = messages.pack_vectors(searched.vectors[used], self.dtype)
    return messages.pack(vectors, rows.reshape(at.shape).astype(np.int32))

  def _read(
    self, party: messages.Party, places: np.ndarray, replies: Sequence[bytes]
  ) -> Negatives:
    """Joins what the partners have sent, row by row of the message."""
    vectors = [np.zeros((0, party.sentences.shape[1]), np.float32)]
    rows = [np.zeros((len(places), 0), np.int32)]
    count = 0
    for reply in replies:
      sent, at = messages.unpack(reply)
      vectors.append(messages.unpack_vectors(sent))
      rows.append(at[places] + count)
      count += len(sent)
    found = Negatives(
      vectors=np.concatenate(vectors),
      rows=np.concatenate(rows, axis=1).astype(np.int32),
    )
    return _without_answers(found, party, self.same_as)

  def _promise(
    self,
    party: messages.Party,
    questions: statement.PrivacyStatement,
    asked: Mapping[str, Sequence[str]],
  ) -> messages.Promise:
    """States what left: nothing of who asked nobody, or was not asked."""
    collection = statement.none(unit=messages.COLLECTION_UNIT)
    if any(party.name in others for others in asked.values()):
      if self.collections_are_public:
        collection = statement.inherit(
          party.sentence_encoder,
          "Vectors of public sentences were sent as this encoder makes them.",
        )
      else:
        collection = statement.non_private(
          "Vectors of the collection's sentences were sent as they are.",
          unit=messages.COLLECTION_UNIT,
        )
    if not asked[party.name]:
      questions = statement.none(unit=messages.QUESTION_UNIT)
    return messages.Promise(questions=questions, collection=collection)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PublicCorpus:
  """Searches public sentences at home.

  Formal guarantee: nothing leaves a client, so nothing is learned about its
  questions and its collection. Fetching the corpus is not counted as traffic
  between clients.
  """

  vectors: Float[np.ndarray, "sentence dim"]
  """Unit vectors of the public sentences, by the encoder of the collections."""
  top: int = 100
  """Sentences for each question."""
  same_as: float = SAME_AS
  """See `SAME_AS`."""

  def negatives(self, parties, *, round_number, key):
    del round_number, key
    by_name = _by_name(parties)
    return Exchanged(
      negatives={
        name: _searched(party, self.vectors, self.top, self.same_as)
        for name, party in by_name.items()
      },
      traffic=_traffic(by_name, ()),
      promises=dict.fromkeys(by_name, messages.nothing()),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SharedOnce:
  """Searches at home what partners have shared once, for all rounds.

  Formal guarantee: that of each `Shared`, however many rounds follow: searching
  what was received is post-processing. Traffic counts in round 0.
  """

  shared: Mapping[str, messages.Shared]
  """By client, from `messages.sentences` or `messages.summary`; a client may be
  missing."""
  top: int = 100
  """Sentences for each question, over all partners."""
  partners: Partners = Everyone()
  """Whose, as they are in round 0."""
  same_as: float = SAME_AS
  """See `SAME_AS`."""

  def negatives(self, parties, *, round_number, key):
    del key
    by_name = _by_name(parties)
    read = {
      name: [
        other
        for other in self.partners.choose(name, tuple(by_name), 0)
        if other in self.shared
      ]
      for name in by_name
    }
    used = {other for others in read.values() for other in others}
    sent = [
      (other, name, len(self.shared[other].message))
      for name, others in read.items()
      for other in others
      if round_number == 0
    ]
    return Exchanged(
      negatives={
        name: _searched(
          party, self._pool(party, read[name]), self.top, self.same_as
        )
        for name, party in by_name.items()
      },
      traffic=_traffic(by_name, sent),
      promises={
        name: self.shared[name].promise if name in used else messages.nothing()
        for name in by_name
      },
    )

  def _pool(self, party: messages.Party, others: Sequence[str]) -> np.ndarray:
    """Returns what a client has received, in the order of its partners."""
    nothing = np.zeros((0, party.queries.shape[1]), np.float32)
    return np.concatenate(
      [nothing, *(self.shared[other].vectors for other in others)]
    )


def over_rounds(promises: Sequence[messages.Promise]) -> messages.Promise:
  """Adds up what is promised about one client in several rounds.

  Formal guarantee: that of `statement.compose` for questions and for the
  collection: whoever saw all messages of all rounds. A round that promised
  nothing leaves nothing.

  Args:
    promises: of one client, at least one.

  Returns:
    One promise.
  """
  return messages.Promise(
    questions=statement.compose([one.questions for one in promises]),
    collection=statement.compose([one.collection for one in promises]),
  )


def _own_key(
  key: Key[Array, ""], round_number: int, name: str
) -> Key[Array, ""]:
  """Returns a client's key of a round, whoever else takes part."""
  key = jax.random.fold_in(key, round_number)
  for word in clients.seed_words(name)[:2]:
    key = jax.random.fold_in(key, word)
  return key


def _by_name(parties: Sequence[messages.Party]) -> dict[str, messages.Party]:
  """Returns the clients by name, in order; refuses two of one name."""
  found = {party.name: party for party in parties}
  if len(found) < len(parties):
    raise ValueError(
      f"expected clients with different names, got {len(parties)} with"
      f" {len(found)} names: rename some"
    )
  return found


def _searched(
  party: messages.Party,
  vectors: Float[np.ndarray, "vector dim"],
  top: int,
  same_as: float,
) -> Negatives:
  """Finds the nearest of some vectors for each question, at home."""
  rows = np.zeros((len(party.queries), 0), np.int32)
  if len(vectors) and len(party.queries):
    _, rows = index.exact(vectors).search(party.queries, top)
  used, rows = np.unique(rows, return_inverse=True)
  found = Negatives(
    vectors=np.asarray(vectors[used], np.float32),
    rows=rows.reshape(len(party.queries), -1).astype(np.int32),
  )
  return _without_answers(found, party, same_as)


def _without_answers(
  found: Negatives, party: messages.Party, same_as: float
) -> Negatives:
  """Drops, for each question, what is too similar to one of its answers."""
  rows = found.rows.copy()
  for row, answers in zip(rows, party.answers, strict=True):
    known = party.sentences[np.asarray(answers, np.int64)]
    cosines = found.vectors[row] @ known.T
    row[np.max(cosines, axis=1, initial=-np.inf) >= same_as] = -1
  return Negatives(vectors=found.vectors, rows=rows)


def _traffic(
  names: Iterable[str], crossed: Iterable[tuple[str, str, int]]
) -> dict[str, Traffic]:
  """Adds up messages (sender, receiver, bytes) for each client."""
  sent = dict.fromkeys(names, 0)
  received = dict.fromkeys(sent, 0)
  for sender, receiver, size in crossed:
    sent[sender] += size
    received[receiver] += size
  return {name: Traffic(sent[name], received[name]) for name in sent}
