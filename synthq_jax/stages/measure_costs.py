"""Measures what a query costs each system, and how large its index is.

Queries are asked one after the other, on one core. Synthetic queries are asked,
never private ones. Times are of the machine, and no other result depends on them.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from synthq_jax import extras
from synthq_jax.pipeline import config_types, results, search, system_results
from synthq_jax.pipeline import queries as queries_lib
from synthq_jax.retrieval import index
from synthq_jax.stages import stage

with extras.required("run"):
  import faiss

__all__ = ["STAGE", "Config", "run"]

_FIRST = 3  # queries that compile and fill caches, and are not counted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """How many queries are asked."""

  num_queries: int = 0
  """Of each system; 0: nothing is measured."""
  depth: int = 100
  """Documents of each answer."""
  links: int = 32
  """Of an HNSW index, at least 2, which is measured beside the exact one for the
  first dense row; 0: none."""
  ef_search: int = 100
  """Candidates of a search in it."""
  seed: int = 0
  """Which queries are asked."""

  def __post_init__(self):
    config_types.at_least(self, 0, "num_queries", "seed")
    config_types.at_least(self, 2 if self.links else 0, "links")
    config_types.at_least(self, 1, "depth", "ef_search")


def jobs(run):
  """Yields one table of all systems, where it is wanted."""
  config = run.config.measure_costs
  if not config.num_queries:
    return
  queries = next(iter(run.rows("generate").values()), None)
  if queries is None:
    run.say("[measure_costs] no generator wrote a query to ask: left out")
    return
  yield stage.Job(
    depends=(
      config,
      *run.data,
      *(made.digest for made in run.systems.values()),
      queries.digest,
    ),
    settings=config,
    inputs={
      "systems": [
        made.value
        for name, made in run.systems.items()
        if name == results.row_of(name) or name.endswith(run.seeds[0])
      ],
      "vectors": {
        name: made.value for name, made in run.rows("encode_documents").items()
      },
      "synthetic": queries.value,
    },
  )


def run(task: stage.Task) -> system_results.Costs:
  """Asks every system; rerankers are left out.

  Args:
    task: its inputs are "systems"; "vectors" of the retrievers, by row; and
      "synthetic" queries, which are asked.

  Returns:
    A row for each system, under `private/`, since some of them are.
  """
  config, folders = task.settings, task.folders
  queries = _queries(task)
  known = search.rows(folders, private=True)
  made = {one.name: one for one in task.inputs["systems"]}
  names = [system_results.LEXICAL, *(name for name in made if name in known)]
  hnsw = index.HNSW(
    links=config.links, ef_search=config.ef_search, seed=config.seed
  )
  searcher = search.open_run(
    str(folders.root),
    names,
    private=True,
    hnsw=hnsw if config.links else None,
  )
  rows = []
  with _one_core():
    for name, find in searcher.systems.items():
      times = _times(find, queries, config.depth)
      one = made.get(name.removesuffix(" (HNSW)"))
      encoded = task.inputs["vectors"].get(getattr(one, "retriever", None))
      if isinstance(one, results.Checkpoint):
        encoded = task.inputs["vectors"][one.name]
      rows.append(
        system_results.Cost(
          name=name,
          index_bytes=searcher.num_bytes[name],
          encode_seconds=encoded.seconds if encoded else None,
          p50=float(np.quantile(times, 0.5)),
          p95=float(np.quantile(times, 0.95)),
        )
      )
  return system_results.Costs(
    directory=folders.relative(task.folder(private=True)),
    num_queries=len(queries),
    rows=tuple(rows),
  )


def _queries(task: stage.Task) -> list[str]:
  """Draws synthetic queries."""
  config = task.settings
  folder = task.folders.root / task.inputs["synthetic"].directory
  texts = queries_lib.texts(folder)
  drawn = np.random.default_rng([config.seed, 9]).permutation(len(texts))
  return [texts[i] for i in drawn[: config.num_queries]]


@contextlib.contextmanager
def _one_core() -> Iterator[None]:
  """Keeps the threads of this process on one core, where the system can."""
  threads = faiss.omp_get_max_threads()
  can = hasattr(os, "sched_setaffinity")
  cores = os.sched_getaffinity(0) if can else set()
  faiss.omp_set_num_threads(1)
  try:
    if can:
      _keep_on({min(cores)})
    yield
  finally:
    faiss.omp_set_num_threads(threads)
    if can:
      _keep_on(cores)


def _keep_on(cores: set[int]) -> None:
  """Moves all threads there are now, and those that they start, to these cores."""
  for one in os.listdir("/proc/self/task"):
    with contextlib.suppress(OSError):  # a thread that has ended
      os.sched_setaffinity(int(one), cores)


def _times(find: Any, queries: Sequence[str], depth: int) -> np.ndarray:
  """Returns the milliseconds of each query."""
  for query in queries[:_FIRST]:
    find(query, depth)
  times = []
  for query in queries:
    start = time.perf_counter()
    find(query, depth)
    times.append(1000 * (time.perf_counter() - start))
  return np.array(times)


STAGE = stage.of(
  __name__,
  needs=("encode_documents", "fuse", "learn_map", "expand"),
)
