"""Near-duplicates of TREC's topics among queries; a long log; what both take.

Every query of a log is compared with title and description of every topic, by
each detector on its own; so are the queries that the labelled pairs of SPIRE 2022
name, which were chosen because they resemble topics. With --made N, a log of N made queries follows, for
queries a second and memory. Prints one JSON document.

  python tests/benchmarks/leakage_topics.py ../shared/data/query_leakage
"""

import argparse
import itertools
import json
import pathlib
import resource
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import repository

from synthq_jax.data import query_pairs
from synthq_jax.leakage import near_duplicates as detectors
from synthq_jax.pipeline import near_duplicates
from synthq_jax.retrieval import text_encoders

SETTINGS = {
  "exact": detectors.Exact(),
  "token set, 1": detectors.TokenSet(),
  "token set, .571": detectors.TokenSet(threshold=4 / 7),
  "containment, .9": detectors.Containment(),
  "trigrams, .6": detectors.Trigrams(),
  "trigrams, .477": detectors.Trigrams(threshold=0.477),
}


def log(path: pathlib.Path) -> Iterator[detectors.Text]:
  return (
    detectors.Text(id=name, text=text)
    for name, text in query_pairs.query_log(path)
  )


def labelled(folder: pathlib.Path) -> list[detectors.Text]:
  """The queries of the labelled pairs, each once."""
  pairs = query_pairs.labelled_pairs(folder / "spire22_annotations.jsonl")
  texts = {pair.query_id: pair.query for pair in pairs}
  return [detectors.Text(id=name, text=text) for name, text in texts.items()]


def made(number: int, texts: list[str]) -> Iterator[detectors.Text]:
  """Yields queries of words drawn from real ones, of their lengths."""
  words = [word for text in texts for word in text.split()]
  lengths = [len(text.split()) for text in texts]
  rng = np.random.default_rng(0)
  for start in itertools.count(0, 10_000):
    sizes = rng.choice(lengths, 10_000)
    drawn = iter(rng.choice(len(words), sizes.sum()).tolist())
    for offset, size in enumerate(sizes.tolist()):
      if start + offset == number:
        return
      text = " ".join(words[i] for i in itertools.islice(drawn, size))
      yield detectors.Text(id=str(start + offset), text=text)


def timed(queries, known, detector) -> tuple[dict, list]:
  """Counts matches of a stream; how long it took, and the memory until then."""
  wall, processor = time.perf_counter(), time.process_time()
  pairs = list(near_duplicates.find(queries, known, detector, progress=False))
  taken = {
    "wall_s": round(time.perf_counter() - wall, 2),
    "processor_s": round(time.process_time() - processor, 2),
    "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
  }
  return taken, pairs


def candidates(queries: Callable, known, settings) -> dict:
  """What each detector finds in real queries, by collection."""
  table = {}
  for name, detector in settings.items():
    taken, pairs = timed(queries(), known, detector)
    found = near_duplicates.count(pairs, known, name)
    table[name] = taken | {
      each.collection: {
        "pairs": each.pairs,
        "queries": each.queries,
        "topics": each.topics,
        "of": each.of,
      }
      for each in found
    }
  return table


def streamed(number: int, path: pathlib.Path, known, settings) -> list[dict]:
  """Time and memory of made logs, one a tenth of the other."""
  texts = [query.text for query in log(path)]
  rows = []
  for name, detector in settings.items():
    for size in (number // 10, number):
      taken, pairs = timed(made(size, texts), known, detector)
      rate = round(size / taken["wall_s"])
      row = {"detector": name, "queries": size, "matches": len(pairs)}
      rows.append(row | taken | {"queries_per_s": rate})
  return rows


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--encoder", action="store_true")
  parser.add_argument("--made", type=int, default=0)
  parser.add_argument("--detectors", nargs="+", default=list(SETTINGS))
  options = parser.parse_args()
  settings = {name: SETTINGS[name] for name in options.detectors}
  if options.encoder:
    own = detectors.Embedding(
      encode=text_encoders.load().encode, threshold=0.804
    )
    settings["embedding, .804"] = own
  known = near_duplicates.targets(options.folder / "trec_topics.jsonl")
  path = options.folder / "msmarco_queries.tsv"
  result = {
    "benchmark": "leakage_topics",
    "commit": repository.commit(),
    "texts of topics": len(known),
    "queries": sum(1 for _ in log(path)),
    "candidates": candidates(lambda: log(path), known, settings),
    "candidates among labelled queries": candidates(
      lambda: iter(labelled(options.folder)), known, settings
    ),
  }
  if options.made:
    result["made"] = streamed(options.made, path, known, settings)
  print(json.dumps(result, indent=1))
  return 0


if __name__ == "__main__":
  sys.exit(main())
