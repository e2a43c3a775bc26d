"""What the exchanges share: searching, dropping known answers, adding up."""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float

from synthq_jax.federated._exchange_types import Negatives, Party, Traffic
from synthq_jax.retrieval import index

__all__ = ["by_name", "searched", "traffic", "without_answers"]


def by_name(parties: Sequence[Party]) -> dict[str, Party]:
  """Returns the clients by name, in order.

  Raises:
    ValueError: if two have one name.
  """
  found = {party.name: party for party in parties}
  if len(found) < len(parties):
    raise ValueError(
      f"expected clients with different names, got {len(parties)} with"
      f" {len(found)} names: rename some"
    )
  return found


def searched(
  party: Party,
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
  return without_answers(found, party, same_as)


def without_answers(
  found: Negatives, party: Party, same_as: float
) -> Negatives:
  """Drops, for each question, what is too similar to one of its answers."""
  rows = found.rows.copy()
  for row, answers in zip(rows, party.answers, strict=True):
    known = party.sentences[np.asarray(answers, np.int64)]
    cosines = found.vectors[row] @ known.T
    row[np.max(cosines, axis=1, initial=-np.inf) >= same_as] = -1
  return Negatives(vectors=found.vectors, rows=rows)


def traffic(
  names: Iterable[str], messages: Iterable[tuple[str, str, int]]
) -> dict[str, Traffic]:
  """Adds up messages (sender, receiver, bytes) for each client."""
  sent = dict.fromkeys(names, 0)
  received = dict.fromkeys(sent, 0)
  for sender, receiver, size in messages:
    sent[sender] += size
    received[receiver] += size
  return {name: Traffic(sent[name], received[name]) for name in sent}
