"""Counts near-duplicates of real queries among synthetic ones, and compares."""

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

__all__ = ["Real", "Written", "compare", "read_real", "read_written"]

_TRAIN = "train"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Real:
  """Private queries: those that were trained on, and all others."""

  texts: list[str]
  trained: Bool[np.ndarray, " query"]
  units: Int[np.ndarray, " query"]
  """Units that the split drew: users or documents, if all queries of each are
  on one side; else the queries themselves."""
  drawn: Bool[np.ndarray, " query"]
  """Whether a draw chose the query's side. Queries that a rule of the splits
  put on one side are in no comparison."""

  def sample(self, limit: int, seed: int) -> "Real":
    """Returns about `limit` queries, or all if there are fewer.

    Whole units are drawn without looking at their side. Otherwise one side
    would lose near-duplicates that the other side keeps.
    """
    if len(self.texts) <= limit:
      return self
    is_drawn = _whole(self.units, limit, np.random.default_rng([seed, 4]))
    rows = np.flatnonzero(is_drawn)
    arrays = {
      name: getattr(self, name)[rows] for name in ("trained", "units", "drawn")
    }
    return Real(texts=[self.texts[row] for row in rows], **arrays)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
  """Synthetic queries of one generator."""

  name: str
  texts: list[str]


def read_real(space: workspace.Folders, prepared: results.PreparedData) -> Real:
  """Reads the private queries with a relevant document; trained ones come
  first.

  A query of several splits, train among them, counts as trained on.
  """
  folder = space.root / prepared.private_directory
  arrays = {
    split: inputs.arrays(space, prepared, folder / f"{split}.npz")
    for split in prepared.num_queries
  }
  ids = {split: split_arrays["ids"] for split, split_arrays in arrays.items()}
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
    for split_arrays in arrays.values()
    if "gathered" in split_arrays
    for query in split_arrays["ids"][split_arrays["gathered"]].tolist()
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
  """Returns query id -> number of the unit that the split drew."""
  ids = [
    name
    for split_arrays in arrays.values()
    for name in split_arrays["ids"].tolist()
  ]
  for kind in ("users", "documents"):
    if not all(kind in split_arrays for split_arrays in arrays.values()):
      continue
    owners = [
      (split if kind == "users" else "", owner)  # numbered within their split
      for split, split_arrays in arrays.items()
      for owner in split_arrays[kind].tolist()
    ]
    numbers = {owner: i for i, owner in enumerate(dict.fromkeys(owners))}
    units, sides = {}, {}
    for name, owner in zip(ids, owners, strict=True):
      units[name] = numbers[owner]
    for name, unit in units.items():
      sides.setdefault(unit, []).append(name in trained)
    several = [
      unit_sides for unit_sides in sides.values() if len(unit_sides) > 1
    ]
    if several and all(len({*unit_sides}) == 1 for unit_sides in several):
      return units
  return {name: i for i, name in enumerate(dict.fromkeys(ids))}


def _whole(
  units: np.ndarray, limit: int, rng: np.random.Generator
) -> Bool[np.ndarray, " row"]:
  """Draws units until they have about `limit` rows; returns a mask of rows."""
  _, inverse, counts = np.unique(units, return_inverse=True, return_counts=True)
  order = rng.permutation(len(counts))
  before = np.cumsum(counts[order]) - counts[order]
  is_drawn = np.zeros(len(counts), bool)
  is_drawn[order[before < limit]] = True
  return is_drawn[inverse]


def read_written(
  folders: workspace.Folders,
  synthetic: results.SyntheticQueries,
  *,
  limit: int,
  seed: int,
) -> Written:
  """Reads about `limit` queries of a generator, all of a document or none."""
  path = files.find(folders.root / synthetic.directory, "queries.jsonl")
  lines = [line for _, line in files.json_lines(path)]
  _, owners = np.unique(
    np.array([line["document"] for line in lines]), return_inverse=True
  )
  rng = np.random.default_rng([seed, 5])
  rows = np.flatnonzero(_whole(owners, limit, rng))
  return Written(name=synthetic.name, texts=[lines[i]["text"] for i in rows])


def compare(
  index: Callable[[Sequence[str]], near_duplicates.Index],
  queries: Real,
  generators: Sequence[Written],
  *,
  name: str,
  confidence: float,
  is_fair: bool = True,
) -> Iterator[comparison_results.Membership]:
  """Yields, for each generator, a comparison of trained and other queries.

  Args:
    index: function from target texts to their index, of a detector of
      `near_duplicates`.
    queries: the private queries, which are the targets.
    generators: the synthetic queries of each generator.
    name: name of the detector, in results.
    confidence: confidence of each interval by itself, in (0, 1).
    is_fair: whether documents were chosen without looking at which queries were
      trained on. If not, shares are counted, and neither compared nor tested.
  """
  indexed, number = index(queries.texts), len(queries.texts)
  pairs = near_duplicates.pairs(queries.texts, indexed)
  pairs = zip(*map(np.ndarray.tolist, pairs), strict=True)
  trained, is_unique = (
    queries.trained,
    shares.alone(pairs, number) & queries.drawn,
  )
  for generator in generators:
    hit = np.zeros(number, bool)
    hit[near_duplicates.pairs(generator.texts, indexed)[1]] = True
    train, control = (
      _count(hit[is_unique & trained]),
      _count(hit[is_unique & ~trained]),
    )
    difference = p_value = None
    if is_fair and train.total and control.total:
      difference, p_value = _test(
        hit[is_unique], trained[is_unique], queries.units[is_unique], confidence
      )
    yield comparison_results.Membership(
      name=generator.name,
      detector=name,
      train=train,
      control=control,
      difference=difference,
      p_value=p_value,
      train_all=_count(hit[trained]),
      control_all=_count(hit[~trained]),
    )


def _test(hit, trained, units, confidence) -> tuple[intervals.Interval, float]:
  """Compares the share of train queries that were hit with that of the
  others."""
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
  # Fisher's test counts the hits that each group would get if chance had put
  # every text into its group: exact if the groups were drawn so.
  table = [
    [hit[side].sum(), (~hit[side]).sum()] for side in (trained, ~trained)
  ]
  return difference, float(stats.fisher_exact(table).pvalue)


def _count(hit: Bool[np.ndarray, " text"]) -> comparison_results.Found:
  return comparison_results.Found(number=int(hit.sum()), total=len(hit))
