"""Counts near-duplicates of real queries among written ones, and compares."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Bool, Int

from synthq_jax import intervals
from synthq_jax.leakage import near_duplicates, shares
from synthq_jax.pipeline import _query_leakage_results as found_lib
from synthq_jax.pipeline import _query_sides, results

__all__ = ["Detector", "NearDuplicates", "search"]

_TRAIN = "train"

Pairs = tuple[Int[np.ndarray, " pair"], Int[np.ndarray, " pair"]]
"""Positions of a query and of a target that are near-duplicates."""


class Detector(Protocol):
  """What is asked of one of `near_duplicates`."""

  def index(self, targets: Sequence[str]) -> near_duplicates.Index:
    """Indexes the targets."""


def search(
  detector: Detector,
  targets: Sequence[str],
  real: _query_sides.Real,
  written: Sequence[_query_sides.Written],
  *,
  name: str = "",
  confidence: float = 0.95,
) -> "NearDuplicates":
  """Looks for all queries in one index.

  Args:
    detector: what finds them.
    targets: the texts that are indexed.
    real: the private queries.
    written: those of each generator.
    name: of the detector, in results.
    confidence: of each interval by itself, in (0, 1).
  """
  index = detector.index(targets)
  return NearDuplicates(
    detector=name,
    confidence=confidence,
    queries=real,
    generators=tuple(written),
    num_targets=len(targets),
    real=near_duplicates.pairs(real.texts, index),
    written={
      one.name: near_duplicates.pairs(one.texts, index) for one in written
    },
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NearDuplicates:
  """Pairs of targets with private queries and with written ones."""

  detector: str
  """Its name."""
  confidence: float
  """Of each interval by itself."""
  queries: _query_sides.Real
  """The private queries."""
  generators: tuple[_query_sides.Written, ...]
  """What each generator wrote."""
  num_targets: int
  """Texts that were indexed."""
  real: Pairs
  """Of private queries and targets."""
  written: Mapping[str, Pairs]
  """Of each generator's queries and targets."""

  def memberships(self) -> Iterator[found_lib.Membership]:
    """Yields, for each generator, queries trained on beside the others.

    The targets are the private queries.
    """
    trained = self.queries.trained
    pairs = zip(*map(np.ndarray.tolist, self.real), strict=True)
    alone = shares.alone(pairs, self.num_targets)
    for one in self.generators:
      pairs = self.written[one.name]
      hit = _marked(pairs[1], self.num_targets)
      train, control = (
        _count(hit[alone & trained]),
        _count(hit[alone & ~trained]),
      )
      difference = p_value = None
      if train.total and control.total:
        ends = (self._share(each) for each in (train, control))
        difference = shares.difference(*ends)
        p_value = shares.two_sample_p_value(
          train.number, train.total, control.number, control.total
        )
      yield found_lib.Membership(
        name=one.name,
        detector=self.detector,
        train=train,
        control=control,
        difference=difference,
        p_value=p_value,
        train_all=_count(hit[trained]),
        control_all=_count(hit[~trained]),
        **self._of_written(pairs, one.owners),
      )

  def _of_written(
    self, pairs: Pairs, owners: Int[np.ndarray, " written"]
  ) -> dict[str, Any]:
    """Compares shares of the written queries, at one number of private ones."""
    sides = (self.queries.trained, ~self.queries.trained)
    size = min(int(side.sum()) for side in sides) - 1
    if size < 1 or not len(owners):
      shown, difference, size = (0.0, 0.0), None, 0
    else:
      sized = []
      for side in sides:
        inside = side[pairs[1]]
        numbers = np.cumsum(side) - 1  # of a query among those of its side
        one = shares.at_size(
          pairs[0][inside],
          numbers[pairs[1][inside]],
          owners=owners,
          num_originals=int(side.sum()),
          size=size,
          confidence=self.confidence,
        )
        sized.append(one)
      shown = [one.share.mean for one in sized]
      difference = shares.sized_difference(*sized, owners)
    return {
      "size": size,
      "written_train": shown[0],
      "written_control": shown[1],
      "written_difference": difference,
    }

  def overlaps(
    self,
    test_set: str,
    tested: Bool[np.ndarray, " target"],
    hidden: set[str] | None,
  ) -> Iterator[found_lib.TestOverlap]:
    """Looks for test queries among those that a retriever may be trained on.

    Args:
      test_set: its name.
      tested: which targets are test queries.
      hidden: generators whose queries are private; None: the test queries are.

    Yields:
      One for the private train queries and one for each generator; none without
      test queries.
    """
    if not tested.any():
      return
    trained = self.queries.trained
    queries, targets = self.real
    kept = trained[queries]
    sides = {_TRAIN: ((queries[kept], targets[kept]), int(trained.sum()))}
    for one in self.generators:
      sides[one.name] = (self.written[one.name], len(one.texts))
    hits = {
      name: _marked(pairs[1], self.num_targets)[tested]
      for name, (pairs, _) in sides.items()
    }
    for name, ((queries, targets), total) in sides.items():
      hit, public = hits[name], hits.get(_public(name))
      beyond = p_value = None
      if public is not None and name != _public(name):
        beyond = shares.paired_difference(
          hit, public, confidence=self.confidence
        )
        p_value = shares.paired_p_value(hit, public)
      count = _count(hit)
      yield found_lib.TestOverlap(
        test_set=test_set,
        name=name,
        detector=self.detector,
        private=hidden is None or name in hidden | {_TRAIN},
        tested=count,
        share=self._share(count),
        written=_count(_marked(queries[tested[targets]], total)),
        beyond_public=beyond,
        p_value=p_value,
      )

  def examples(self, number: int, seed: int) -> Iterator[found_lib.Example]:
    """Draws some train queries that came out, with one that is like them.

    Args:
      number: train queries of each generator, at most.
      seed: of the draw.
    """
    rng = np.random.default_rng([seed, 6])
    for one in self.generators:
      queries, targets = self.written[one.name]
      order = rng.permutation(np.flatnonzero(self.queries.trained[targets]))
      _, firsts = np.unique(targets[order], return_index=True)
      for i in order[np.sort(firsts)[:number]]:
        yield found_lib.Example(
          name=one.name,
          detector=self.detector,
          written=one.texts[queries[i]],
          real=self.queries.texts[targets[i]],
        )

  def _share(self, one: found_lib.Found) -> intervals.Interval:
    return shares.wilson(one.number, one.total, confidence=self.confidence)


def _public(name: str) -> str:
  """Returns the name of the public checkpoint's queries of the same seed."""
  return "public_only" + name.removeprefix(results.row_of(name))


def _marked(
  positions: Int[np.ndarray, " found"], number: int
) -> Bool[np.ndarray, " text"]:
  marked = np.zeros(number, bool)
  marked[positions] = True
  return marked


def _count(hit: Bool[np.ndarray, " text"]) -> found_lib.Found:
  return found_lib.Found(number=int(hit.sum()), total=len(hit))
