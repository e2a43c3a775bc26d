"""Near-duplicates of real queries among written ones, counted and compared."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Bool, Int

from synthq_jax import intervals
from synthq_jax.leakage import near_duplicates, shares
from synthq_jax.pipeline import _query_leakage_results as found_lib
from synthq_jax.pipeline import _query_sides, results

__all__ = [
  "Detector",
  "NearDuplicates",
  "examples",
  "memberships",
  "overlaps",
  "search",
]

_TRAIN = "train"

Pairs = tuple[Int[np.ndarray, " pair"], Int[np.ndarray, " pair"]]
"""Positions of a query and of a target that are near-duplicates."""


class Detector(Protocol):
  """What is asked of one of `near_duplicates`."""

  def index(self, targets: Sequence[str]) -> near_duplicates.Index:
    """Indexes the targets."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NearDuplicates:
  """Pairs of some targets with the private queries and with the written ones."""

  num_targets: int
  real: Pairs
  written: Mapping[str, Pairs]


def search(
  detector: Detector,
  targets: Sequence[str],
  real: _query_sides.Real,
  written: Sequence[_query_sides.Written],
) -> NearDuplicates:
  """Looks for all of them in one index.

  Args:
    detector: what finds them.
    targets: the texts that are indexed.
    real: the private queries.
    written: those of each generator.

  Returns:
    The pairs.
  """
  index = detector.index(targets)
  return NearDuplicates(
    num_targets=len(targets),
    real=near_duplicates.pairs(real.texts, index),
    written={
      one.name: near_duplicates.pairs(one.texts, index) for one in written
    },
  )


def memberships(
  found: NearDuplicates,
  real: _query_sides.Real,
  written: Sequence[_query_sides.Written],
  *,
  detector: str,
  confidence: float,
) -> Iterator[found_lib.Membership]:
  """Compares private queries that were trained on with the others.

  Args:
    found: near-duplicates of the private queries.
    real: these.
    written: what each generator wrote.
    detector: its name.
    confidence: of each interval.

  Yields:
    One for each generator.
  """
  pairs = zip(*map(np.ndarray.tolist, found.real), strict=True)
  alone = shares.alone(pairs, found.num_targets)
  for one in written:
    pairs = found.written[one.name]
    hit = _marked(pairs[1], found.num_targets)
    groups = [alone & real.trained, alone & ~real.trained]
    train, control = (_count(hit[group]) for group in groups)
    difference = p_value = None
    if train.total and control.total:
      ends = (
        shares.wilson(each.number, each.total, confidence=confidence)
        for each in (train, control)
      )
      difference = _measure(shares.difference(*ends))
      p_value = shares.two_sample_p_value(
        train.number, train.total, control.number, control.total
      )
    yield found_lib.Membership(
      name=one.name,
      detector=detector,
      train=train,
      control=control,
      difference=difference,
      p_value=p_value,
      train_all=_count(hit[real.trained]),
      control_all=_count(hit[~real.trained]),
      **_of_written(pairs, real.trained, one.owners, confidence),
    )


def _of_written(
  pairs: Pairs,
  trained: Bool[np.ndarray, " query"],
  owners: Int[np.ndarray, " written"],
  confidence: float,
) -> dict[str, Any]:
  """Compares shares of the written queries, at one number of private ones."""
  sides = (trained, ~trained)
  size = min(int(side.sum()) for side in sides) - 1
  if size < 1 or not len(owners):
    return {
      "size": 0,
      "written_train": 0.0,
      "written_control": 0.0,
      "written_difference": None,
    }
  sized = []
  for side in sides:
    inside = side[pairs[1]]
    numbers = np.cumsum(side) - 1  # of a private query among those of its side
    one = shares.at_size(
      pairs[0][inside],
      numbers[pairs[1][inside]],
      owners=owners,
      num_originals=int(side.sum()),
      size=size,
      confidence=confidence,
    )
    sized.append(one)
  return {
    "size": size,
    "written_train": sized[0].share.value,
    "written_control": sized[1].share.value,
    "written_difference": _measure(shares.sized_difference(*sized, owners)),
  }


def overlaps(
  found: NearDuplicates,
  real: _query_sides.Real,
  written: Sequence[_query_sides.Written],
  *,
  detector: str,
  confidence: float,
  test_set: str,
  tested: Bool[np.ndarray, " target"],
  hidden: set[str] | None,
) -> Iterator[found_lib.TestOverlap]:
  """Looks for test queries among those that a retriever may be trained on.

  Args:
    found: near-duplicates of targets, test queries among them.
    real: the private queries; of these, those that are trained on.
    written: what each generator wrote.
    detector: its name.
    confidence: of each interval.
    test_set: its name.
    tested: which targets are test queries.
    hidden: generators whose queries are private; None: the test queries are.

  Yields:
    One for the private train queries and one for each generator; none without
    test queries.
  """
  if not tested.any():
    return
  queries, targets = found.real
  kept = real.trained[queries]
  sides = [(_TRAIN, (queries[kept], targets[kept]), int(real.trained.sum()))]
  sides += [(o.name, found.written[o.name], len(o.texts)) for o in written]
  hits = {
    name: _marked(pairs[1], found.num_targets)[tested]
    for name, pairs, _ in sides
  }
  for name, (queries, targets), total in sides:
    hit, public = hits[name], hits.get(_public(name))
    beyond = p_value = None
    if public is not None and name != _public(name):
      beyond = _measure(
        shares.paired_difference(hit, public, confidence=confidence)
      )
      p_value = shares.paired_p_value(hit, public)
    count = _count(hit)
    share = shares.wilson(count.number, count.total, confidence=confidence)
    yield found_lib.TestOverlap(
      test_set=test_set,
      name=name,
      detector=detector,
      private=hidden is None or name in hidden | {_TRAIN},
      tested=count,
      share=_measure(share),
      written=_count(_marked(queries[tested[targets]], total)),
      beyond_public=beyond,
      p_value=p_value,
    )


def _public(name: str) -> str:
  """Returns the name of the public checkpoint's queries of the same seed."""
  return "public_only" + name.removeprefix(results.row_of(name))


def examples(
  found: NearDuplicates,
  real: _query_sides.Real,
  written: Sequence[_query_sides.Written],
  *,
  detector: str,
  number: int,
  seed: int,
) -> Iterator[found_lib.Example]:
  """Draws some train queries that came out.

  Args:
    found: near-duplicates of the private queries.
    real: these.
    written: what each generator wrote.
    detector: its name.
    number: train queries of each generator, at most.
    seed: of the draw.

  Yields:
    A train query with one of those that are like it.
  """
  rng = np.random.default_rng([seed, 6])
  for one in written:
    queries, targets = found.written[one.name]
    order = rng.permutation(np.flatnonzero(real.trained[targets]))
    _, firsts = np.unique(targets[order], return_index=True)
    for i in order[np.sort(firsts)[:number]]:
      yield found_lib.Example(
        name=one.name,
        detector=detector,
        written=one.texts[queries[i]],
        real=real.texts[targets[i]],
      )


def _marked(
  positions: Int[np.ndarray, " found"], number: int
) -> Bool[np.ndarray, " text"]:
  marked = np.zeros(number, bool)
  marked[positions] = True
  return marked


def _count(hit: Bool[np.ndarray, " text"]) -> found_lib.Found:
  return found_lib.Found(number=int(hit.sum()), total=len(hit))


def _measure(share: intervals.Interval) -> results.Measure:
  return results.Measure(mean=share.mean, low=share.low, high=share.high)
