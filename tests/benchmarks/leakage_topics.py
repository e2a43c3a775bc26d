"""Leaks of TREC's topics among queries, and how long a long log takes.

Every query of a log is compared with title and description of every topic, by
each detector on its own; so are the queries that the labelled pairs of SPIRE 2022
name, which were chosen because they resemble topics. With --made N only a log of
N made queries is looked at, by the detectors of `synthq leakage check` at once,
on all cores. Prints one JSON document.

  python tests/benchmarks/leakage_topics.py ../shared/data/query_leakage
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import resource
import sys
import tempfile
from collections.abc import Iterable, Iterator

import numpy as np
import repository

from synthq_jax.data import query_pairs
from synthq_jax.leakage import near_duplicates as detectors
from synthq_jax.tools import leakage_check

SETTINGS = {
  "exact": detectors.Exact(),
  "token set, 1": detectors.TokenSet(),
  "token set, .571": detectors.TokenSet(threshold=4 / 7),
  "containment, .9": detectors.Containment(),
  "trigrams, .6": detectors.Trigrams(),
  "trigrams, .477": detectors.Trigrams(threshold=0.477),
}
DEFAULT = ("exact", "token_set", "trigrams")
Rows = Iterable[tuple[str, str]]
_WHO = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def _processor_s(who: int) -> float:
  usage = resource.getrusage(who)
  return usage.ru_utime + usage.ru_stime


def made(number: int, texts: list[str]) -> Iterator[tuple[str, str]]:
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
      yield str(start + offset), text


def checked(rows: Rows, topics: pathlib.Path, used, processes=None) -> dict:
  """What is found, in which time: from the log's file to the page."""
  with tempfile.TemporaryDirectory() as folder:
    log = pathlib.Path(folder, "log.tsv")
    with open(log, "w") as stream:
      stream.writelines(f"{name}\t{text}\n" for name, text in rows)
    request = leakage_check.Request(
      train=str(log), test=str(topics), output=folder, processes=processes
    )
    start = [_processor_s(one) for one in _WHO]
    check, _ = leakage_check.run(request, used)
  spent = [_processor_s(one) - s for one, s in zip(_WHO, start, strict=True)]
  return {
    "queries": check.num_queries,
    "leaked": check.num_leaked,
    "wall_s": round(check.seconds, 2),
    "processor_s": [round(seconds, 2) for seconds in spent],
    "peak_mib": [resource.getrusage(each).ru_maxrss >> 10 for each in _WHO],
    "counts": [dataclasses.asdict(each) for each in check.counts],
  }


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--made", type=int, default=0)
  parser.add_argument("--processes", type=int)
  parser.add_argument("--detectors", nargs="+", default=list(SETTINGS))
  options = parser.parse_args()
  topics = options.folder / "trec_topics.jsonl"
  log = dict(query_pairs.query_log(options.folder / "msmarco_queries.tsv"))
  result = {"benchmark": "leakage_topics", "commit": repository.commit()}
  if options.made:
    used = [leakage_check.detector(name) for name in DEFAULT]
    rows = made(options.made, list(log.values()))
    result["made"] = checked(rows, topics, used, options.processes)
  else:
    settings = {name: SETTINGS[name] for name in options.detectors}
    pairs = query_pairs.labelled_pairs(
      options.folder / "spire22_annotations.jsonl"
    )
    labelled = {pair.query_id: pair.query for pair in pairs}
    for title, queries in (
      ("candidates", log),
      ("candidates among labelled queries", labelled),
    ):
      result[title] = {
        name: checked(queries.items(), topics, [one], processes=1)
        for name, one in settings.items()
      }
  print(json.dumps(result, indent=1))
  return 0


if __name__ == "__main__":
  sys.exit(main())
