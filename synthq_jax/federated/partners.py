"""Which clients a client exchanges with.

A choice is a frozen dataclass with one method, and knows names, public
descriptions and the number of the round only: who is asked says nothing about
the texts of who asks.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Float

__all__ = ["Everyone", "Fixed", "Nearest", "Partners", "Random"]


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
class Random:
  """Some of the others, drawn anew in each round.

  >>> Random(count=1, seed=0).choose("a", ["a", "b"], 0)
  ('b',)
  """

  count: int
  """How many; all where there are fewer."""
  seed: int
  """Public."""

  def __post_init__(self):
    _check_count(self)

  def choose(self, asking, names, round_number):
    others = [name for name in names if name != asking]
    place = list(names).index(asking)
    rng = np.random.default_rng([self.seed, round_number, place])
    drawn = rng.permutation(len(others))[: self.count]
    return tuple(others[i] for i in np.sort(drawn))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Nearest:
  """Those whose public descriptions are most similar to the client's own."""

  count: int
  """How many; all where there are fewer."""
  descriptions: Mapping[str, Float[np.ndarray, " dim"]]
  """For each client a vector made from public facts about it, such as what the
  operator says it is for. A mean of its texts would be no description: it is
  private."""

  def __post_init__(self):
    _check_count(self)

  def choose(self, asking, names, round_number):
    del round_number
    missing = sorted(set(names) - set(self.descriptions))
    if missing:
      raise ValueError(
        f"expected a description of every client, got none of {missing}"
      )
    own = self.descriptions[asking]
    others = [name for name in names if name != asking]
    scores = np.array([self.descriptions[name] @ own for name in others])
    best = np.argsort(-scores, kind="stable")[: self.count]
    return tuple(others[i] for i in np.sort(best))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Fixed:
  """A list for each client; one without a list has no partners."""

  lists: Mapping[str, Sequence[str]]

  def choose(self, asking, names, round_number):
    del round_number
    wanted = set(self.lists.get(asking, ())) - {asking}
    if unknown := sorted(wanted - set(names)):
      raise ValueError(
        f"expected partners among the clients, got {unknown}: correct the list"
      )
    return tuple(name for name in names if name in wanted)


def _check_count(choice: "Random | Nearest") -> None:
  if choice.count < 0:
    raise ValueError(
      f"{type(choice).__name__}.count must be at least 0, got {choice.count}"
    )
