"""What noise on questions costs: how often the same sentences are found.

The truth about private Fed-Negative is a line of this table: a noise, the
epsilon that it earns, and how much of the search it leaves.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Key

from synthq_jax.federated import query_messages
from synthq_jax.federated._exchange_types import Party
from synthq_jax.retrieval import index

__all__ = ["Line", "agreement", "table"]


class Line(NamedTuple):
  """One noise."""

  noise_multiplier: float
  epsilon: float
  """Of one round, per question; of the message, not of the answers."""
  agreement: float
  """Share of the sentences that the exact vectors find, in [0, 1]."""


def agreement(
  message: query_messages.Message,
  party: Party,
  sentences: Float[np.ndarray, "sentence dim"],
  *,
  top: int,
) -> float:
  """Returns the mean share of the exact top sentences that a message finds.

  A measure of private vectors, and itself private: it is for whoever chooses a
  noise, on public questions best.

  Args:
    message: what the client sends.
    party: the client.
    sentences: unit vectors of the collection that is asked.
    top: how many sentences are found for each question, at least 1.

  Returns:
    The share; top / number of sentences is what chance alone finds.
  """
  search = index.exact(sentences).search
  _, exact = search(party.queries, top)
  _, found = search(message.vectors, top)
  found = found[message.places]
  same = exact[:, :, None] == found[:, None, :]
  return float(np.mean(np.any(same, axis=2)))


def table(
  make: Callable[[float], query_messages.QueryMessage],
  noise_multipliers: Sequence[float],
  party: Party,
  sentences: Float[np.ndarray, "sentence dim"],
  *,
  top: int,
  key: Key[Array, ""],
) -> tuple[Line, ...]:
  """Returns a line for each noise.

  Args:
    make: from a noise multiplier to the way to ask.
    noise_multipliers: at least 0.
    party: the client that asks.
    sentences: unit vectors of the collection that is asked.
    top: as in `agreement`.
    key: of the noise, for this table alone.
  """
  lines = []
  for number, noise_multiplier in enumerate(noise_multipliers):
    own_key = jax.random.fold_in(key, number)
    message = make(noise_multiplier).write(party, 0, own_key)
    same = agreement(message, party, sentences, top=top)
    lines.append(Line(noise_multiplier, message.promise.epsilon, same))
  return tuple(lines)
