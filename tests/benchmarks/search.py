"""Search by inner product: exact, and by a graph (HNSW).

Queries a second for all queries at once; recall of the exact results against that
speed for HNSW with several numbers of candidates. The vectors
are unit vectors in clusters whose spectrum decays, or rows of a file, of which
the last are the queries. Prints one JSON document.

  python tests/benchmarks/search.py
  python tests/benchmarks/search.py --vectors=encoded.npy --queries=1000
"""

import argparse
import dataclasses
import importlib.metadata
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import measuring
import numpy as np

CUTOFFS = (10, 100)


def generated(documents: int, queries: int, dim: int) -> np.ndarray:
  """Returns unit vectors, about a hundred a cluster."""
  rng = np.random.default_rng(0)
  spectrum = np.arange(1, dim + 1) ** -0.5
  centres = rng.normal(size=(-(-documents // 100), dim)) * spectrum
  rows = centres[rng.integers(len(centres), size=documents + queries)]
  rows = rows + 0.7 * rng.normal(size=rows.shape) * spectrum
  # Turned, so that the parts of a quantizer see about as much each.
  rows = rows @ np.linalg.qr(rng.normal(size=(dim, dim)))[0]
  return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def timed(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, Any]:
  """Times functions in turn, after one run of each that is not counted."""
  walls: dict[str, list[float]] = {name: [] for name in runs}
  for run in runs.values():
    run()
  for _ in range(repeats):
    for name, run in runs.items():
      walls[name].append(measuring.timed(run)["wall_s"])
  return walls


def speed(walls: list[float], queries: int) -> dict[str, Any]:
  return {
    "queries_per_s": round(queries / statistics.median(walls), 1),
    "queries_per_s_best": round(queries / min(walls), 1),
    "runs_s": [round(wall, 5) for wall in walls],
  }


def exact_search(
  documents: np.ndarray, queries: np.ndarray, options: argparse.Namespace
) -> tuple[dict[str, Any], np.ndarray]:
  """Measures the exact search; returns the true results as well."""
  from synthq_jax.retrieval import index

  searched = index.exact(documents)
  run = {"exact": lambda: searched.search(queries, options.k)}
  walls = timed(run, options.repeats)["exact"]
  return speed(walls, len(queries)), searched.search(queries, options.k)[1]


def recalls(found: np.ndarray, best: np.ndarray) -> dict[str, float]:
  """Returns the share of the true first ones that are among those found."""
  shares = {}
  for cutoff in CUTOFFS:
    if cutoff <= best.shape[1]:
      rows = zip(found[:, :cutoff], best[:, :cutoff], strict=True)
      hits = [len(set(a) & set(b)) / cutoff for a, b in rows]
      shares[f"recall@{cutoff}"] = round(float(np.mean(hits)), 4)
  return shares


def approximate_searches(
  documents: np.ndarray,
  queries: np.ndarray,
  best: np.ndarray,
  options: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
  """Yields speed and recall of the graph with each number of candidates."""
  from synthq_jax.retrieval import index

  config = index.HNSW(
    links=options.links,
    ef_construction=options.ef_construction,
    ef_search=1,
    seed=0,
  )
  start = time.perf_counter()
  built = config.build(documents)
  build_s = round(time.perf_counter() - start, 2)
  for candidates in options.ef_search:
    graph = dataclasses.replace(built, ef_search=candidates)
    search = {"one": lambda graph=graph: graph.search(queries, options.k)}
    walls = timed(search, options.repeats)["one"]
    yield {
      "index": repr(config),
      "build_s": build_s,
      "ef_search": candidates,
      **recalls(graph.search(queries, options.k)[1], best),
      **speed(walls, len(queries)),
    }


def parse() -> argparse.Namespace:
  parser = measuring.parser(__doc__)
  parser.add_argument("--vectors", help="a .npy file of vectors")
  parser.add_argument("--documents", type=int, default=100_000)
  parser.add_argument("--dim", type=int, default=128)
  parser.add_argument("--queries", type=int, default=1000)
  parser.add_argument("--k", type=int, default=100)
  parser.add_argument("--links", type=int, default=32)
  parser.add_argument("--ef_construction", type=int, default=200)
  parser.add_argument(
    "--ef_search", type=int, nargs="*", default=(100, 200, 400, 800)
  )
  parser.add_argument("--repeats", type=int, default=5)
  parser.add_argument("--cores", type=int, default=2)
  return parser.parse_args()


def main() -> int:
  options = parse()
  measuring.keep_to(options.cores)
  before = os.getloadavg()[0]
  if options.vectors:
    rows = np.load(options.vectors).astype(np.float32)
  else:
    rows = generated(options.documents, options.queries, options.dim)
  documents, queries = rows[: -options.queries], rows[-options.queries :]
  exact, best = exact_search(documents, queries, options)
  measuring.say(exact)
  found = []
  for one in approximate_searches(documents, queries, best, options):
    found.append(one)
    measuring.say(one)
  result = {
    "versions": {
      name: importlib.metadata.version(name) for name in ("faiss-cpu", "numpy")
    },
    "load": [round(before, 1), round(os.getloadavg()[0], 1)],
    "vectors": options.vectors or "generated",
    "documents": documents.shape,
    "queries": len(queries),
    "k": options.k,
    "exact": exact,
    "approximate": found,
  }
  return measuring.finish("search", result)


if __name__ == "__main__":
  sys.exit(main())
