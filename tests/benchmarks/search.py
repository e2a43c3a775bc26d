"""Exact search by inner product.

Queries a second for all queries at once. The vectors are unit vectors in clusters whose spectrum decays, or rows of a file, of which
the last are the queries. Prints one JSON document.

  python tests/benchmarks/search.py
  python tests/benchmarks/search.py --vectors=encoded.npy --queries=1000
"""

import argparse
import importlib.metadata
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import measuring
import numpy as np


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
) -> dict[str, Any]:
  """Measures the exact search."""
  from synthq_jax.retrieval import index

  searched = index.exact(documents)
  run = {"exact": lambda: searched.search(queries, options.k)}
  walls = timed(run, options.repeats)["exact"]
  return speed(walls, len(queries))


def parse() -> argparse.Namespace:
  parser = measuring.parser(__doc__)
  parser.add_argument("--vectors", help="a .npy file of vectors")
  parser.add_argument("--documents", type=int, default=100_000)
  parser.add_argument("--dim", type=int, default=128)
  parser.add_argument("--queries", type=int, default=1000)
  parser.add_argument("--k", type=int, default=100)
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
  exact = exact_search(documents, queries, options)
  measuring.say(exact)
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
  }
  return measuring.finish("search", result)


if __name__ == "__main__":
  sys.exit(main())
