"""The queries that a check for leaks holds against each other."""

import dataclasses
import pathlib

import numpy as np
from jaxtyping import Bool, Int

from synthq_jax.data import files
from synthq_jax.pipeline import inputs, results, workspace

__all__ = ["Real", "Written", "real", "tests", "written"]

_TRAIN = "train"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Real:
  """Private queries: those that were trained on, and all others."""

  texts: list[str]
  trained: Bool[np.ndarray, " query"]
  tested: Bool[np.ndarray, " query"]  # of the test split


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
  """Synthetic queries."""

  name: str
  texts: list[str]
  owners: Int[np.ndarray, " query"]  # numbers of their documents


def real(
  space: workspace.Workspace,
  prepared: results.PreparedData,
  *,
  limit: int,
  seed: int,
) -> Real:
  """Reads private queries with a relevant document, those trained on first.

  A query of several splits, train among them, was trained on. The seed draws
  at most `limit` of each group alike, so that neither prefers some kind of
  query.
  """
  folder = space.root / prepared.private_directory
  ids = {
    split: inputs.arrays(space, prepared, folder / f"{split}.npz")["ids"]
    for split in prepared.num_queries
  }
  trained = dict.fromkeys(ids[_TRAIN].tolist())
  others = dict.fromkeys(
    query
    for split, queries in ids.items()
    for query in queries.tolist()
    if query not in trained
  )
  rng = np.random.default_rng([seed, 4])
  chosen = [_draw([*group], limit, rng) for group in (trained, others)]
  names = [*chosen[0], *chosen[1]]
  texts = _texts(folder, set(names))
  tested = {*ids[prepared.test_split].tolist()}
  return Real(
    texts=[texts[name] for name in names],
    trained=np.arange(len(names)) < len(chosen[0]),
    tested=np.array([name in tested for name in names], bool),
  )


def _draw(names: list[str], limit: int, rng) -> list[str]:
  if len(names) <= limit:
    return names
  kept = rng.permutation(len(names))[:limit]
  return [names[i] for i in np.sort(kept)]


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
  _, owners, counts = np.unique(
    np.array([line["document"] for line in lines]),
    return_inverse=True,
    return_counts=True,
  )
  order = np.random.default_rng([seed, 5]).permutation(len(counts))
  before = np.cumsum(counts[order]) - counts[order]
  kept = np.zeros(len(counts), bool)
  kept[order[before < limit]] = True
  rows = np.flatnonzero(kept[owners])
  return Written(
    name=made.name,
    texts=[lines[i]["text"] for i in rows],
    owners=owners[rows],
  )


def tests(folders: workspace.Folders, made: results.TestSet) -> list[str]:
  """Reads the judged queries of a public test set."""
  folder = folders.root / made.directory
  ids = inputs.arrays(folders, made, folder / results.TestSet.QUERIES)["ids"]
  texts = _texts(folder, {*ids.tolist()})
  return [texts[name] for name in ids.tolist()]


def _texts(folder: pathlib.Path, names: set[str]) -> dict[str, str]:
  lines = files.json_lines(files.find(folder, "queries.jsonl"))
  return {
    line["_id"]: line["text"] for _, line in lines if line["_id"] in names
  }
