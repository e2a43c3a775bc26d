"""Exchanges negatives between clients, and counts what that costs.

Fed-Negative: a client sends the vectors of its questions to others, each of which
searches its own collection and sends the vectors of the best sentences back; of
all that come back, the best of each question are kept (equation 4.2 of the thesis:
the best over the partners' collections together). They answer none of
the client's questions unless collections overlap, which nobody can see without
texts: what is closer than `SAME_AS` to a known answer is dropped.

Formal guarantee: NONE. Question and sentence vectors leave as they are, and a
vector can be turned back into much of its text (`studies.vectors`).

All other clients are asked, so who is asked says nothing about texts. The thesis
asks a selection (equation 4.1), and leaves open how it is made.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from synthq_jax import checks
from synthq_jax.retrieval import index

__all__ = [
  "SAME_AS",
  "Exchanged",
  "FedNegative",
  "Negatives",
  "Party",
  "Traffic",
]

SAME_AS = 0.95
"""Cosine to a known answer from which on a sentence counts as that answer.

With the public T5 and two sites of MedQuAD without a common sentence, the ten
nearest sentences of the other site come up to 0.84 close to an answer."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Party:
  """What one client brings to a round."""

  name: str
  """Public."""
  queries: Float[np.ndarray, "question dim"]
  """Unit vectors of its train questions."""
  sentences: Float[np.ndarray, "sentence dim"]
  """Unit vectors of its collection."""
  answers: Sequence[Sequence[int]]
  """For each question the positions of the sentences that answer it; stays."""

  def __post_init__(self):
    """Refuses parts of different sizes."""
    if len(self.queries) != len(self.answers):
      raise ValueError(
        f"client {self.name!r}: expected answers for every question, got"
        f" {len(self.answers)} for {len(self.queries)}"
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


class Exchanged(NamedTuple):
  """One round, by names of clients."""

  negatives: Mapping[str, Negatives]
  traffic: Mapping[str, Traffic]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedNegative:
  """Asks partners for the sentences of all of them nearest to the questions.

  Formal guarantee: NONE, neither for who asks nor for who answers.
  """

  top: int = 10
  """Sentences of all partners together that a question gets; each partner
  returns as many, since they may all be its own."""

  def __post_init__(self):
    """Refuses numbers that are out of range."""
    checks.at_least(1, top=self.top)

  def negatives(self, parties: Sequence[Party]) -> Exchanged:
    """Runs one round.

    Args:
      parties: all clients, with different names.

    Returns:
      For each client the vectors that it received and, for each question, the
      best of them in order; and the bytes of what it sent and received: float32
      vectors, and of the sentences found, each sent once, int32 positions for
      every question.

    Raises:
      ValueError: if two clients have one name.
    """
    by_name = {party.name: party for party in parties}
    if len(by_name) < len(parties):
      raise ValueError(
        f"expected clients with different names, got {len(parties)} with"
        f" {len(by_name)} names: rename some"
      )
    searched = {
      name: index.exact(party.sentences) for name, party in by_name.items()
    }
    replies: dict[str, list[Negatives]] = {name: [] for name in by_name}
    sent, received = dict.fromkeys(by_name, 0), dict.fromkeys(by_name, 0)
    for name, party in by_name.items():
      for other in filter(name.__ne__, by_name):
        reply = self._reply(searched[other], party.queries)
        replies[name].append(reply)
        answer = reply.vectors.nbytes + reply.rows.nbytes
        sent[name] += party.queries.nbytes
        received[other] += party.queries.nbytes
        sent[other] += answer
        received[name] += answer
    return Exchanged(
      negatives={
        name: _joined(party, replies[name], self.top)
        for name, party in by_name.items()
      },
      traffic={name: Traffic(sent[name], received[name]) for name in by_name},
    )

  def _reply(self, searched: index.Index, queries: np.ndarray) -> Negatives:
    """Returns the best sentences for some questions, each of them once."""
    _, at = searched.search(queries, self.top)
    used, rows = np.unique(at, return_inverse=True)
    return Negatives(
      vectors=np.asarray(searched.vectors[used], np.float32),
      rows=rows.reshape(at.shape).astype(np.int32),
    )


def _joined(party: Party, replies: Sequence[Negatives], top: int) -> Negatives:
  """Keeps the best of what the partners sent, without what answers."""
  starts = np.cumsum([0, *(len(one.vectors) for one in replies)])
  nothing = np.zeros((0, party.sentences.shape[1]), np.float32)
  vectors = np.concatenate([nothing, *(one.vectors for one in replies)])
  rows = np.concatenate(
    [
      np.zeros((len(party.queries), 0), np.int32),
      *(one.rows + at for one, at in zip(replies, starts, strict=False)),
    ],
    axis=1,
  ).astype(np.int32)
  for row, answers in zip(rows, party.answers, strict=True):
    known = party.sentences[np.asarray(answers, np.int64)]
    cosines = vectors[row] @ known.T
    row[np.max(cosines, axis=1, initial=-np.inf) >= SAME_AS] = -1
  scores = np.full(rows.shape, -np.inf)
  if rows.size:
    scores = np.einsum("qd,qnd->qn", party.queries, vectors[rows])
    scores[rows < 0] = -np.inf
  best = np.argsort(-scores, axis=1, kind="stable")[:, :top]
  return Negatives(vectors=vectors, rows=np.take_along_axis(rows, best, axis=1))
