"""Exchanges negatives between clients, and counts the bytes sent.

Fed-Negative: a client sends the vectors of its questions to its partners. Each
partner searches its own collection and returns the vectors of the best
sentences. The client keeps the best of all returned vectors for each question
(equation 4.2 of the thesis: the best over the partners' collections together).
They answer none of the client's questions unless collections overlap. Nobody can
check this without texts, so vectors near a known answer (`SAME_AS`) are dropped.

Formal guarantee: NONE. Question and sentence vectors leave the clients without
noise, and much of a text can be reconstructed from its vector
(`studies.vectors`).

A client asks all other clients, so the choice of partners says nothing about
texts. The thesis asks a selection (equation 4.1) that "can" follow the network or
the distance, and does not say which it made.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from synthq_jax import checks
from synthq_jax.federated import clients
from synthq_jax.retrieval import index

__all__ = [
  "SAME_AS",
  "Exchanged",
  "Negatives",
  "Party",
  "Traffic",
  "fed_negative",
]

SAME_AS = 0.95
"""Least cosine to a known answer at which a sentence counts as that answer.

With the public T5 and two sites of MedQuAD without a common sentence, the ten
nearest sentences of the other site reach cosines of 0.84 to an answer."""


_LENGTH_ERROR = 1e-2  # vectors may come in half precision


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Party:
  """One client's vectors and answers in a round."""

  name: str
  """Public name of the client."""
  queries: Float[np.ndarray, "question dim"]
  """Unit vectors of its train questions."""
  sentences: Float[np.ndarray, "sentence dim"]
  """Unit vectors of its collection."""
  answers: Sequence[Sequence[int]]
  """Positions of the sentences that answer each question; never sent."""

  def __post_init__(self):
    """Refuses parts of different sizes, and vectors of another length than 1.

    `SAME_AS` is a cosine: of longer vectors, hardly any would be a negative, of
    shorter ones the answers would.
    """
    for vectors in (self.queries, self.sentences):
      lengths = np.linalg.norm(vectors, axis=-1)
      if not np.all((abs(lengths - 1) < _LENGTH_ERROR) | (lengths == 0)):
        raise ValueError(
          f"client {self.name!r}: expected vectors of length 1, got others:"
          " divide them by their lengths"
        )
    if len(self.queries) != len(self.answers):
      raise ValueError(
        f"client {self.name!r}: expected answers for every question, got"
        f" {len(self.answers)} for {len(self.queries)}: give one list each"
      )
    clients.check_positions(self.name, len(self.sentences), [self.answers])


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Negatives:
  """Vectors of sentences that are not known to answer a client's questions."""

  vectors: Float[np.ndarray, "vector dim"]
  """Unit vectors, float32."""
  rows: Int[np.ndarray, "question extra"]
  """Positions in `vectors` for each question, int32; -1 for none."""


class Traffic(NamedTuple):
  """Bytes of one client in one round, over all its partners."""

  sent: int
  received: int


class Exchanged(NamedTuple):
  """Negatives and traffic of a round, by name of the client."""

  negatives: Mapping[str, Negatives]
  traffic: Mapping[str, Traffic]


def fed_negative(parties: Sequence[Party], *, top: int) -> Exchanged:
  """Asks partners for their sentences nearest to a client's questions, once.

  Formal guarantee: NONE, neither for the client that asks nor for its partners.

  Args:
    parties: all clients, with different names.
    top: sentences that a question gets from all partners together. Each partner
      returns as many, since the best may all come from one partner.

  Returns:
    For each client the vectors that it received and the best of them for each
    question, in order; and the bytes that it sent and received. A reply holds
    float32 vectors, each sentence once, and int32 positions for each question.

  Raises:
    ValueError: if two clients have one name, or `top` is below 1.
  """
  checks.at_least(1, top=top)
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
      reply = _reply(searched[other], party.queries, top)
      replies[name].append(reply)
      answer = reply.vectors.nbytes + reply.rows.nbytes
      sent[name] += party.queries.nbytes
      received[other] += party.queries.nbytes
      sent[other] += answer
      received[name] += answer
  return Exchanged(
    negatives={
      name: _join_replies(party, replies[name], top)
      for name, party in by_name.items()
    },
    traffic={name: Traffic(sent[name], received[name]) for name in by_name},
  )


def _reply(searched: index.Index, queries: np.ndarray, top: int) -> Negatives:
  """Returns the best sentences for a partner's questions, each once."""
  _, positions = searched.search(queries, top)
  used, rows = np.unique(positions, return_inverse=True)
  return Negatives(
    vectors=np.asarray(searched.vectors[used], np.float32),
    rows=rows.reshape(positions.shape).astype(np.int32),
  )


def _join_replies(
  party: Party, replies: Sequence[Negatives], top: int
) -> Negatives:
  """Joins the partners' replies to a question's best vectors, without answers."""
  starts = np.cumsum([0, *(len(reply.vectors) for reply in replies)])
  nothing = np.zeros((0, party.sentences.shape[1]), np.float32)
  vectors = np.concatenate([nothing, *(reply.vectors for reply in replies)])
  rows = np.concatenate(
    [
      np.zeros((len(party.queries), 0), np.int32),
      *(
        reply.rows + start
        for reply, start in zip(replies, starts, strict=False)
      ),
    ],
    axis=1,
  ).astype(np.int32)
  for row, answers in zip(rows, party.answers, strict=True):
    own = party.sentences[np.asarray(answers, np.int64)]
    cosines = vectors[row] @ own.T
    row[np.max(cosines, axis=1, initial=-np.inf) >= SAME_AS] = -1
  scores = np.full(rows.shape, -np.inf)
  if rows.size:
    scores = np.einsum("qd,qnd->qn", party.queries, vectors[rows])
    scores[rows < 0] = -np.inf
  best = np.argsort(-scores, axis=1, kind="stable")[:, :top]
  return Negatives(vectors=vectors, rows=np.take_along_axis(rows, best, axis=1))
