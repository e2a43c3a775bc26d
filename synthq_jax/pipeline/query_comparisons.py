"""Counts near-duplicates of real queries among written ones, and compares."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int
from scipy import stats

from synthq_jax import intervals
from synthq_jax.data import files
from synthq_jax.leakage import calibration, near_duplicates, shares
from synthq_jax.pipeline import comparison_results, inputs, results, workspace
from synthq_jax.pipeline import queries as queries_lib

__all__ = [
  "NearDuplicates",
  "Real",
  "Written",
  "real",
  "tests",
  "written",
]

_TRAIN = "train"

Pairs = tuple[Int[np.ndarray, " pair"], Int[np.ndarray, " pair"]]
"""Positions of a query and of a target that are near-duplicates."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Real:
  """Private queries: those that were trained on, and all others."""

  texts: list[str]
  trained: Bool[np.ndarray, " query"]
  tested: Bool[np.ndarray, " query"]  # of the test split
  units: Int[np.ndarray, " query"]
  """What the split drew: users or documents, where it kept all queries of each on
  one side; else the queries themselves."""
  drawn: Bool[np.ndarray, " query"]
  """Whether the side is that of a draw; those that a rule of splits gathered on
  one side are in no comparison."""

  def sample(self, limit: int, seed: int) -> "Real":
    """Returns about `limit` queries, or all if there are no more.

    Whole units, drawn without looking at their side: of some kinds of queries
    one side would else lose the doubles that the other keeps.
    """
    if len(self.texts) <= limit:
      return self
    kept = _whole(self.units, limit, np.random.default_rng([seed, 4]))
    rows = np.flatnonzero(kept)
    arrays = {
      name: getattr(self, name)[rows]
      for name in ("trained", "tested", "units", "drawn")
    }
    return Real(texts=[self.texts[row] for row in rows], **arrays)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
  """Synthetic queries."""

  name: str
  texts: list[str]
  owners: Int[np.ndarray, " query"]  # numbers of their documents


def real(space: workspace.Workspace, prepared: results.PreparedData) -> Real:
  """Reads private queries with a relevant document, those trained on first.

  A query of several splits, train among them, was trained on.
  """
  folder = space.root / prepared.private_directory
  arrays = {
    split: inputs.arrays(space, prepared, folder / f"{split}.npz")
    for split in prepared.num_queries
  }
  ids = {split: of_split["ids"] for split, of_split in arrays.items()}
  trained = dict.fromkeys(ids[_TRAIN].tolist())
  others = dict.fromkeys(
    query
    for split, queries in ids.items()
    for query in queries.tolist()
    if query not in trained
  )
  names = [*trained, *others]
  gathered = {
    query
    for of_split in arrays.values()
    if "gathered" in of_split
    for query in of_split["ids"][of_split["gathered"]].tolist()
  }
  tested = {*ids[prepared.test_split].tolist()}
  units = _units(arrays, trained)
  return Real(
    texts=queries_lib.texts(folder, names),
    trained=np.arange(len(names)) < len(trained),
    tested=np.array([name in tested for name in names], bool),
    units=np.array([units[name] for name in names], np.int64),
    drawn=np.array([name not in gathered for name in names], bool),
  )


def _units(
  arrays: dict[str, dict[str, np.ndarray]], trained: dict[str, None]
) -> dict[str, int]:
  """Returns query id -> what the split drew it with."""
  ids = [name for one in arrays.values() for name in one["ids"].tolist()]
  for kind in ("users", "documents"):
    if not all(kind in one for one in arrays.values()):
      continue
    owners = [
      (split if kind == "users" else "", owner)  # numbered within their split
      for split, one in arrays.items()
      for owner in one[kind].tolist()
    ]
    place = {owner: i for i, owner in enumerate(dict.fromkeys(owners))}
    units, sides = {}, {}
    for name, owner in zip(ids, owners, strict=True):
      units[name] = place[owner]
    for name, unit in units.items():
      sides.setdefault(unit, []).append(name in trained)
    several = [of_unit for of_unit in sides.values() if len(of_unit) > 1]
    if several and all(len({*of_unit}) == 1 for of_unit in several):
      return units
  return {name: i for i, name in enumerate(dict.fromkeys(ids))}


def _whole(
  units: np.ndarray, limit: int, rng: np.random.Generator
) -> Bool[np.ndarray, " row"]:
  """Draws units until they have about `limit` rows; says which rows are kept."""
  _, place, counts = np.unique(units, return_inverse=True, return_counts=True)
  order = rng.permutation(len(counts))
  before = np.cumsum(counts[order]) - counts[order]
  kept = np.zeros(len(counts), bool)
  kept[order[before < limit]] = True
  return kept[place]


def written(
  folders: workspace.Folders,
  made: results.SyntheticQueries,
  *,
  limit: int,
  seed: int,
) -> Written:
  """Reads about `limit` queries of a generator, all of a document or none."""
  path = files.find(folders.root / made.directory, "queries.jsonl")
  lines = [line for _, line in files.json_lines(path)]
  _, owners = np.unique(
    np.array([line["document"] for line in lines]), return_inverse=True
  )
  rng = np.random.default_rng([seed, 5])
  rows = np.flatnonzero(_whole(owners, limit, rng))
  return Written(
    name=made.name,
    texts=[lines[i]["text"] for i in rows],
    owners=owners[rows],
  )


def tests(folders: workspace.Folders, made: results.TestSet) -> list[str]:
  """Reads the judged queries of a public test set."""
  folder = folders.root / made.directory
  ids = inputs.arrays(folders, made, folder / results.TestSet.QUERIES)["ids"]
  return queries_lib.texts(folder, ids)


class NearDuplicates:
  """Pairs of targets with private queries and with written ones."""

  def __init__(
    self,
    index: Callable[[Sequence[str]], near_duplicates.Index],
    targets: Sequence[str],
    queries: Real,
    generators: Sequence[Written],
    *,
    name: str = "",
    confidence: float = 0.95,
  ):
    """Looks for all queries in one index.

    Args:
      index: of a detector of `near_duplicates`, from targets to their index.
      targets: the texts that are indexed.
      queries: the private queries.
      generators: what each generator wrote.
      name: of the detector, in results.
      confidence: of each interval by itself, in (0, 1).
    """
    indexed = index(targets)
    self.detector, self.confidence = name, confidence
    self.queries, self.generators = queries, tuple(generators)
    self.num_targets = len(targets)
    self.real = near_duplicates.pairs(queries.texts, indexed)
    self.written = {
      one.name: near_duplicates.pairs(one.texts, indexed) for one in generators
    }

  def memberships(
    self, *, is_fair: bool = True
  ) -> Iterator[comparison_results.Membership]:
    """Yields, for each generator, queries trained on beside the others.

    The targets are the private queries.

    Args:
      is_fair: whether documents were chosen without looking at who was trained
        on; if not, shares are counted, and neither compared nor tested.
    """
    trained = self.queries.trained
    pairs = zip(*map(np.ndarray.tolist, self.real), strict=True)
    alone = shares.alone(pairs, self.num_targets) & self.queries.drawn
    for one in self.generators:
      pairs = self.written[one.name]
      hit = _marked(pairs[1], self.num_targets)
      train, control = (
        _count(hit[alone & trained]),
        _count(hit[alone & ~trained]),
      )
      difference = p_value = None
      if is_fair and train.total and control.total:
        difference, p_value = self._compared(hit, alone)
      yield comparison_results.Membership(
        name=one.name,
        detector=self.detector,
        train=train,
        control=control,
        difference=difference,
        p_value=p_value,
        train_all=_count(hit[trained]),
        control_all=_count(hit[~trained]),
        **self._of_written(pairs, one.owners, alone, is_fair),
      )

  def _compared(self, hit, alone) -> tuple[intervals.Interval, float]:
    """Compares the share of train queries that was hit with that of the others."""
    trained, units = self.queries.trained[alone], self.queries.units[alone]
    hit = hit[alone]
    first, second = (
      (hit[side], units[side].tolist()) for side in (trained, ~trained)
    )
    difference = shares.difference(
      *(
        calibration.grouped_interval(
          found, np.ones(len(found)), drawn, confidence=self.confidence
        )
        for found, drawn in (first, second)
      )
    )
    if len(np.unique(units)) < len(units):
      return difference, shares.permutation_p_value(hit, trained, units)
    (found, _), (others, _) = first, second
    # Fisher's test asks how many of those found would fall into each group if
    # chance had put every text into its group: exact where groups were drawn so.
    table = [[one.sum(), (~one).sum()] for one in (found, others)]
    return difference, float(stats.fisher_exact(table).pvalue)

  def _of_written(
    self,
    pairs: Pairs,
    owners: Int[np.ndarray, " written"],
    alone,
    is_fair: bool,
  ) -> dict[str, Any]:
    """Compares shares of the written queries, at one number of private ones.

    Of these, those that are alone: of a query that was asked several times, the
    split may have kept all on one side.
    """
    trained = self.queries.trained
    sides = (trained & alone, ~trained & alone)
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
      difference = shares.sized_difference(*sized, owners) if is_fair else None
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
  ) -> Iterator[comparison_results.TestOverlap]:
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
      hit, public = hits[name], hits.get("public_only")
      beyond = p_value = None
      if public is not None and name != "public_only":
        beyond = shares.paired_difference(
          hit, public, confidence=self.confidence
        )
        ours, theirs = (hit & ~public).sum(), (public & ~hit).sum()
        p_value = 1.0  # McNemar's test in its exact form
        if ours + theirs:
          p_value = float(stats.binomtest(ours, ours + theirs).pvalue)
      count = _count(hit)
      yield comparison_results.TestOverlap(
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

  def examples(
    self, number: int, seed: int
  ) -> Iterator[comparison_results.Example]:
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
        yield comparison_results.Example(
          name=one.name,
          detector=self.detector,
          written=one.texts[queries[i]],
          real=self.queries.texts[targets[i]],
        )

  def _share(self, one: comparison_results.Found) -> intervals.Interval:
    return intervals.wilson(one.number, one.total, confidence=self.confidence)


def _marked(
  positions: Int[np.ndarray, " found"], number: int
) -> Bool[np.ndarray, " text"]:
  marked = np.zeros(number, bool)
  marked[positions] = True
  return marked


def _count(hit: Bool[np.ndarray, " text"]) -> comparison_results.Found:
  return comparison_results.Found(number=int(hit.sum()), total=len(hit))
