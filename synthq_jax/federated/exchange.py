"""Negatives from beyond a client's own collection, and what they cost.

One interface for all: `negatives(parties, round_number=, key=)` returns the
extra negatives of each client, the bytes it sent and received, and what is
promised about what left it.

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
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Array, Float, Key

from synthq_jax.federated import (
  _exchange_rows,
  _seeds,
  _wire,
  query_messages,
  shared,
)
from synthq_jax.federated import partners as partners_lib
from synthq_jax.federated._exchange_types import (
  COLLECTION_UNIT,
  QUESTION_UNIT,
  Exchange,
  Exchanged,
  Negatives,
  Party,
  Promise,
  Traffic,
)
from synthq_jax.privacy import statement
from synthq_jax.retrieval import index

__all__ = [
  "COLLECTION_UNIT",
  "QUESTION_UNIT",
  "SAME_AS",
  "Exchange",
  "Exchanged",
  "FedNegative",
  "Negatives",
  "Party",
  "Promise",
  "PublicCorpus",
  "SharedOnce",
  "Traffic",
  "over_rounds",
]

SAME_AS = 0.95
"""Cosine to a known answer from which on a sentence counts as that answer.

With the public T5 and two sites of MedQuAD without a common sentence, the ten
nearest sentences of the other site come up to 0.84 close to an answer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedNegative:
  """Asks partners for their sentences that are nearest to the questions.

  Formal guarantee: for a client's questions that of `queries`, a release for
  each round; for the collections of those who answer NONE, unless they are
  declared public: then that of the encoder of their vectors.
  """

  queries: query_messages.QueryMessage = query_messages.Raw()
  """What is asked with."""
  top: int = 10
  """Sentences that each partner returns for each row of the message."""
  partners: partners_lib.Partners = partners_lib.Everyone()
  """Who is asked."""
  dtype: str = "float32"
  """How vectors travel, both ways: "float32", "float16" or "int8"."""
  same_as: float = SAME_AS
  """See `SAME_AS`."""
  collections_are_public: bool = False
  """Whether whoever runs this declares that sentences need no protection."""

  def negatives(
    self,
    parties: Sequence[Party],
    *,
    round_number: int,
    key: Key[Array, ""],
  ) -> Exchanged:
    """Runs one round; see `Exchange`."""
    by_name = _exchange_rows.by_name(parties)
    messages = {
      name: self.queries.write(
        party, round_number, _own_key(key, round_number, name)
      )
      for name, party in by_name.items()
    }
    requests = {
      name: _wire.pack(_wire.vectors(message.vectors, self.dtype))
      for name, message in messages.items()
    }
    asked = {
      name: self.partners.choose(name, tuple(by_name), round_number)
      for name in by_name
    }
    replies: dict[tuple[str, str], bytes] = {}
    for answering, party in by_name.items():
      asking = [name for name in by_name if answering in asked[name]]
      found = self._replies(party, [requests[name] for name in asking])
      replies |= {
        (name, answering): one for name, one in zip(asking, found, strict=True)
      }
    received = {
      name: [replies[name, other] for other in asked[name]] for name in by_name
    }
    return Exchanged(
      negatives={
        name: self._read(party, messages[name].places, received[name])
        for name, party in by_name.items()
      },
      traffic=_exchange_rows.traffic(by_name, _sizes(asked, requests, replies)),
      promises={
        name: self._promise(party, messages[name].promise, asked)
        for name, party in by_name.items()
      },
    )

  def _replies(self, party: Party, requests: Sequence[bytes]) -> list[bytes]:
    """Answers several clients with one search."""
    asked = [_wire.unpack_vectors(_wire.unpack(one)[0]) for one in requests]
    if not asked:
      return []
    _, at = index.exact(party.sentences).search(np.concatenate(asked), self.top)
    replies = []
    for found in np.split(at, np.cumsum([len(one) for one in asked])[:-1]):
      # A sentence that many questions find travels once.
      used, rows = np.unique(found, return_inverse=True)
      vectors = _wire.vectors(party.sentences[used], self.dtype)
      rows = rows.reshape(found.shape).astype(np.int32)
      replies.append(_wire.pack(vectors, rows))
    return replies

  def _read(
    self, party: Party, places: np.ndarray, replies: Sequence[bytes]
  ) -> Negatives:
    """Joins what the partners have sent, row by row of the message."""
    vectors = [np.zeros((0, party.sentences.shape[1]), np.float32)]
    rows = [np.zeros((len(places), 0), np.int32)]
    count = 0
    for reply in replies:
      sent, at = _wire.unpack(reply)
      vectors.append(_wire.unpack_vectors(sent))
      rows.append(at[places] + count)
      count += len(sent)
    found = Negatives(
      vectors=np.concatenate(vectors),
      rows=np.concatenate(rows, axis=1).astype(np.int32),
    )
    return _exchange_rows.without_answers(found, party, self.same_as)

  def _promise(
    self,
    party: Party,
    questions: statement.PrivacyStatement,
    asked: Mapping[str, Sequence[str]],
  ) -> Promise:
    """States what left: nothing of who asked nobody, or was not asked."""
    collection = statement.none(unit=COLLECTION_UNIT)
    if any(party.name in others for others in asked.values()):
      if self.collections_are_public:
        collection = statement.inherit(
          party.sentence_encoder,
          "Vectors of public sentences were sent as this encoder makes them.",
        )
      else:
        collection = statement.non_private(
          "Vectors of the collection's sentences were sent as they are.",
          unit=COLLECTION_UNIT,
        )
    if not asked[party.name]:
      questions = statement.none(unit=QUESTION_UNIT)
    return Promise(questions=questions, collection=collection)


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

  def negatives(
    self,
    parties: Sequence[Party],
    *,
    round_number: int,
    key: Key[Array, ""],
  ) -> Exchanged:
    """Searches for every client; see `Exchange`."""
    del round_number, key
    by_name = _exchange_rows.by_name(parties)
    return Exchanged(
      negatives={
        name: _exchange_rows.searched(
          party, self.vectors, self.top, self.same_as
        )
        for name, party in by_name.items()
      },
      traffic=_exchange_rows.traffic(by_name, ()),
      promises={name: shared.nothing() for name in by_name},
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SharedOnce:
  """Searches at home what partners have shared once, for all rounds.

  Formal guarantee: that of each `Shared`, however many rounds follow: searching
  what was received is post-processing. Traffic counts in round 0.
  """

  shared: Mapping[str, shared.Shared]
  """By client, from `shared.sentences` or `shared.summary`; a client may be
  missing."""
  top: int = 100
  """Sentences for each question, over all partners."""
  partners: partners_lib.Partners = partners_lib.Everyone()
  """Whose, as they are in round 0."""
  same_as: float = SAME_AS
  """See `SAME_AS`."""

  def negatives(
    self,
    parties: Sequence[Party],
    *,
    round_number: int,
    key: Key[Array, ""],
  ) -> Exchanged:
    """Searches for every client; see `Exchange`."""
    del key
    by_name = _exchange_rows.by_name(parties)
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
        name: _exchange_rows.searched(
          party, self._pool(party, read[name]), self.top, self.same_as
        )
        for name, party in by_name.items()
      },
      traffic=_exchange_rows.traffic(by_name, sent),
      promises={
        name: self.shared[name].promise if name in used else shared.nothing()
        for name in by_name
      },
    )

  def _pool(self, party: Party, others: Sequence[str]) -> np.ndarray:
    """Returns what a client has received, in the order of its partners."""
    nothing = np.zeros((0, party.queries.shape[1]), np.float32)
    return np.concatenate(
      [nothing, *(self.shared[other].vectors for other in others)]
    )


def over_rounds(promises: Sequence[Promise]) -> Promise:
  """Adds up what is promised about one client in several rounds.

  Formal guarantee: that of `statement.compose` for questions and for the
  collection: whoever saw all messages of all rounds. A round that promised
  nothing leaves nothing.

  Args:
    promises: of one client, at least one.

  Returns:
    One promise.
  """
  return Promise(
    questions=statement.compose([one.questions for one in promises]),
    collection=statement.compose([one.collection for one in promises]),
  )


def _sizes(
  asked: Mapping[str, Sequence[str]],
  requests: Mapping[str, bytes],
  replies: Mapping[tuple[str, str], bytes],
) -> Iterator[tuple[str, str, int]]:
  """Yields sender, receiver and bytes of every message of a round."""
  for name, others in asked.items():
    for other in others:
      yield name, other, len(requests[name])
      yield other, name, len(replies[name, other])


def _own_key(
  key: Key[Array, ""], round_number: int, name: str
) -> Key[Array, ""]:
  """Returns a client's key of a round, whoever else takes part."""
  key = jax.random.fold_in(key, round_number)
  for word in _seeds.words(name)[:2]:
    key = jax.random.fold_in(key, word)
  return key
