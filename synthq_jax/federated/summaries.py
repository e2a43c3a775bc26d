"""One system over all clients, and two systems beside each other.

Intervals are bootstrap intervals: they take the clients as they are, and the
questions of each as draws from more of the same kind.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from synthq_jax.federated import ranking
from synthq_jax.retrieval import significance

__all__ = ["Summary", "difference", "summarise"]


class _Bootstrap(NamedTuple):
  level: float
  samples: int
  seed: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
  """One measure over all clients, or the difference between two systems.

  The worst client is chosen by the values it is described by: new questions
  would make its value higher, the more so the more clients there are.

  Attributes:
    measure: such as "MRR@10".
    level: "sentence" or "passage".
    clients: client -> mean over its questions.
    num_questions: client -> how many those are.
    over_clients: the mean of the clients' means.
    over_questions: the mean over all questions.
    worst: the client of the lowest mean, the first of several.
    left_out: clients without questions, which nothing above counts.
  """

  measure: str
  level: str
  clients: Mapping[str, significance.Interval]
  num_questions: Mapping[str, int]
  over_clients: significance.Interval
  over_questions: significance.Interval
  worst: str
  left_out: tuple[str, ...]


def summarise(
  scores: Sequence[ranking.Scores],
  measure: str = "MRR@10",
  level: str = "sentence",
  *,
  seed: int,
  confidence: float = 0.95,
  samples: int = 2000,
) -> Summary:
  """Puts the clients' values of one system together.

  Args:
    scores: one for each client.
    measure: such as those in `MEASURES`.
    level: "sentence" or "passage".
    seed: of the bootstrap.
    confidence: the level of the intervals, in (0, 1).
    samples: how often questions are drawn again.

  Returns:
    Means and intervals.

  Raises:
    ValueError: if no client has a question, or a client stands twice.
  """
  values = _by_client(scores, lambda each: each.values(measure, level))
  return _summary(values, measure, level, _Bootstrap(confidence, samples, seed))


def difference(
  first: Sequence[ranking.Scores],
  second: Sequence[ranking.Scores],
  measure: str = "MRR@10",
  level: str = "sentence",
  *,
  seed: int,
  confidence: float = 0.95,
  samples: int = 2000,
) -> Summary:
  """Compares two systems question by question.

  Args:
    first: of one system, one for each client.
    second: of the other, on the same clients and questions.
    measure: such as those in `MEASURES`.
    level: "sentence" or "passage".
    seed: of the bootstrap.
    confidence: as in `summarise`.
    samples: as in `summarise`.

  Returns:
    Means and intervals of `first` minus `second`; "worst" is the client that
    gains least. Where an interval leaves out 0, the systems differ there.

  Raises:
    ValueError: as `summarise`, or if clients or numbers of questions differ.
  """
  one = _by_client(first, lambda each: each.values(measure, level))
  other = _by_client(second, lambda each: each.values(measure, level))
  if {k: len(v) for k, v in one.items()} != {
    k: len(v) for k, v in other.items()
  }:
    raise ValueError(
      "expected two systems on the same clients and questions, got "
      f"{len(one)} and {len(other)} clients with other questions"
    )
  values = {name: one[name] - other[name] for name in one}
  return _summary(values, measure, level, _Bootstrap(confidence, samples, seed))


def _by_client(
  scores: Sequence[ranking.Scores],
  value: Callable[[ranking.Scores], np.ndarray],
) -> dict[str, np.ndarray]:
  """Returns client -> values, and refuses a client that stands twice."""
  values = {each.client: value(each) for each in scores}
  if len(values) < len(scores):
    raise ValueError(
      f"expected each client once, got {len(scores)} scores of {len(values)} "
      "clients; give those of one split and system"
    )
  return values


def _summary(
  values: Mapping[str, np.ndarray],
  measure: str,
  level: str,
  bootstrap: "_Bootstrap",
) -> Summary:
  """Makes a summary of the values of each client's questions."""
  asked = {name: array for name, array in values.items() if len(array)}
  if not asked:
    raise ValueError(
      f"expected a client with questions, got {len(values)} without any; "
      "choose another split"
    )
  options = bootstrap._asdict()
  arrays = list(asked.values())
  sizes = [len(array) for array in arrays]
  clients = {
    name: significance.bootstrap_interval(array, **options)
    for name, array in asked.items()
  }
  return Summary(
    measure=measure,
    level=level,
    clients=clients,
    num_questions=dict(zip(asked, sizes, strict=True)),
    over_clients=significance.stratified_interval(arrays, **options),
    over_questions=significance.stratified_interval(arrays, sizes, **options),
    worst=min(clients, key=lambda name: clients[name].mean),
    left_out=tuple(name for name in values if name not in asked),
  )
