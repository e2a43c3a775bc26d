"""Counts near-duplicates of real queries among written ones, and compares."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Int
from scipy import stats

from synthq_jax import intervals
from synthq_jax.data import files
from synthq_jax.leakage import calibration, near_duplicates, shares
from synthq_jax.runtime import comparison_results, inputs, results, workspace
from synthq_jax.runtime import queries as queries_lib

__all__ = ["Real", "Written", "compare", "real", "written"]

_TRAIN = "train"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Real:
  """Private queries: those that were trained on, and all others."""

  texts: list[str]
  trained: Bool[np.ndarray, " query"]
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
      name: getattr(self, name)[rows] for name in ("trained", "units", "drawn")
    }
    return Real(texts=[self.texts[row] for row in rows], **arrays)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
  """Synthetic queries."""

  name: str
  texts: list[str]


def real(space: workspace.Folders, prepared: results.PreparedData) -> Real:
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
  units = _units(arrays, trained)
  return Real(
    texts=queries_lib.texts(folder, names),
    trained=np.arange(len(names)) < len(trained),
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
  return Written(name=made.name, texts=[lines[i]["text"] for i in rows])


def compare(
  index: Callable[[Sequence[str]], near_duplicates.Index],
  queries: Real,
  generators: Sequence[Written],
  *,
  name: str,
  confidence: float,
  is_fair: bool = True,
) -> Iterator[comparison_results.Membership]:
  """Yields, for each generator, queries trained on beside the others.

  Args:
    index: of a detector of `near_duplicates`, from targets to their index.
    queries: the private queries, which are the targets.
    generators: what each generator wrote.
    name: of the detector, in results.
    confidence: of each interval by itself, in (0, 1).
    is_fair: whether documents were chosen without looking at who was trained
      on; if not, shares are counted, and neither compared nor tested.
  """
  indexed, number = index(queries.texts), len(queries.texts)
  pairs = near_duplicates.pairs(queries.texts, indexed)
  pairs = zip(*map(np.ndarray.tolist, pairs), strict=True)
  trained, alone = queries.trained, shares.alone(pairs, number) & queries.drawn
  for one in generators:
    hit = np.zeros(number, bool)
    hit[near_duplicates.pairs(one.texts, indexed)[1]] = True
    train, control = _count(hit[alone & trained]), _count(hit[alone & ~trained])
    difference = p_value = None
    if is_fair and train.total and control.total:
      difference, p_value = _test(
        hit[alone], trained[alone], queries.units[alone], confidence
      )
    yield comparison_results.Membership(
      name=one.name,
      detector=name,
      train=train,
      control=control,
      difference=difference,
      p_value=p_value,
      train_all=_count(hit[trained]),
      control_all=_count(hit[~trained]),
    )


def _test(hit, trained, units, confidence) -> tuple[intervals.Interval, float]:
  """Compares the share of train queries that was hit with that of the others."""
  difference = shares.difference(
    *(
      calibration.grouped_interval(
        hit[side],
        [1.0] * int(side.sum()),
        units[side].tolist(),
        confidence=confidence,
      )
      for side in (trained, ~trained)
    )
  )
  if len(np.unique(units)) < len(units):
    return difference, shares.permutation_p_value(hit, trained, units)
  # Fisher's test asks how many of those found would fall into each group if
  # chance had put every text into its group: exact where groups were drawn so.
  table = [
    [hit[side].sum(), (~hit[side]).sum()] for side in (trained, ~trained)
  ]
  return difference, float(stats.fisher_exact(table).pvalue)


def _count(hit: Bool[np.ndarray, " text"]) -> comparison_results.Found:
  return comparison_results.Found(number=int(hit.sum()), total=len(hit))
