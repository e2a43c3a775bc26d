"""Which clients take part in a round, from a secret seed and the round alone.

`poisson` is what user-level privacy asks for: every client throws a coin of its
own. `Uniform` has the same number of clients in every round, and claims
nothing. Both have `batch(seed, round)`, so that either may stand in a loop.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from synthq_jax.privacy import sampling

__all__ = ["Uniform", "poisson"]

_TAG = 0x636C6E74  # keeps other uses of the same seed apart


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uniform:
  """Draws a fixed number of different clients, each set equally likely.

  Formal guarantee: none. Whether a client takes part depends on the others'
  taking part, and no accountant of this project knows that law; private
  training refuses it. Use `poisson`.

  >>> drawn = Uniform(num_clients=9, clients_per_round=3).batch(seed=7, step=0)
  >>> len(set(drawn.indices.tolist())), drawn.is_padding.any().item()
  (3, False)
  """

  num_clients: int
  """How many there are."""
  clients_per_round: int
  """How many of them take part in a round."""

  def __post_init__(self):
    """Refuses rounds of more clients than there are."""
    if not 1 <= self.clients_per_round <= self.num_clients:
      raise ValueError(
        "expected clients_per_round from 1 to num_clients, got"
        f" clients_per_round={self.clients_per_round},"
        f" num_clients={self.num_clients}"
      )

  def batch(self, seed: int | Sequence[int], step: int) -> sampling.Batch:
    """Draws the clients of a round, a function of (seed, step) alone.

    Args:
      seed: a non-negative integer, or several; secret.
      step: number of the round, from 0.

    Returns:
      Numbers of clients in random order, none of them padding.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(_TAG, step))
    generator = np.random.Generator(np.random.PCG64(sequence))
    chosen = generator.choice(
      self.num_clients, size=self.clients_per_round, replace=False
    )
    return sampling.Batch(
      chosen.astype(np.int32), np.zeros(self.clients_per_round, bool)
    )


def poisson(
  *, num_clients: int, clients_per_round: int, multiple_of: int = 1
) -> sampling.Poisson:
  """Returns the sampler in which each client throws a coin of its own.

  Formal guarantee: that of `privacy.sampling.Poisson`, whose records are
  clients here: a round has rows for so many that hardly ever one is cut, which
  is accounted for all the same. With clients_per_round = num_clients everybody
  takes part in every round. Public: all arguments. Secret: seed and draws.

  >>> sampler = poisson(num_clients=1000, clients_per_round=50)
  >>> sampler.probability, sampler.max_batch_size
  (0.05, 105)

  Args:
    num_clients: how many there are.
    clients_per_round: the expected number of a round.
    multiple_of: rows of a round are a multiple of this, for example the devices
      of a mesh times `clients_at_once`.
  """
  sampler = sampling.Poisson.with_margin(
    num_examples=num_clients,
    expected_batch_size=clients_per_round,
    multiple_of=multiple_of,
  )
  if sampler.max_batch_size != num_clients:
    return sampler
  # A neighbour with one client more has room, too: nothing is ever cut.
  rows = -(-(num_clients + 1) // multiple_of) * multiple_of
  return dataclasses.replace(sampler, max_batch_size=rows)
