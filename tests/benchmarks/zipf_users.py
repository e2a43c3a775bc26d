"""Gives a collection people who ask: a few ask much, most ask once.

Reads any source and writes two BEIR folders below the second argument. `log` holds
its train queries, each with the name of a user, drawn for every query by a Zipf law
over a public number of users: made up, and said so wherever a table of it stands.
`held_out` holds its dev and test queries, the same for every way to protect the log.
Prints one JSON document.

  python tests/benchmarks/zipf_users.py environment_docs runs/people
  synthq run ... --gin.SOURCE=beir:runs/people/log --gin.UNIT=user \\
    --gin.QUERIES_PER_USER=4 --gin.TEST_SETS='("beir:runs/people/held_out",)'
"""

import argparse
import collections
import dataclasses
import json
import pathlib

import numpy as np
import repository
import topic_skew

from synthq_jax.data import beir, sources
from synthq_jax.data import collection as collection_lib

MOST = (1, 4, 16)


def users(number: int, queries: int, exponent: float, seed: int) -> np.ndarray:
  """Draws who asks each query: user r of `number` in proportion to r^-exponent."""
  rng = np.random.default_rng(seed)
  return rng.choice(number, queries, p=topic_skew.zipf(number, exponent))


def only(
  data: collection_lib.Collection, split: str, name: str
) -> collection_lib.Collection:
  """Keeps the queries of a split, or of two, that something answers, as one."""
  data = collection_lib.join_splits(data, split)
  relevant = {query for query, _ in data.pairs(split)}
  judged = {
    query: grades
    for query, grades in data.judgements(split).items()
    if query in relevant
  }
  return collection_lib.Collection(
    tuple(dataclasses.replace(one, client="") for one in data.documents),
    tuple(
      dataclasses.replace(one, client="")
      for one in data.queries
      if one.id in judged
    ),
    {name: judged},
  )


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("source")
  parser.add_argument("target", type=pathlib.Path)
  parser.add_argument("--users", type=int, default=20_000)
  parser.add_argument("--exponent", type=float, default=1.0)
  parser.add_argument("--seed", type=int, default=0)
  given = parser.parse_args()
  data = sources.open(given.source, seed=given.seed).read()
  log = only(data, "train", "train")
  test = only(data, "dev+test", "test")
  who = users(given.users, len(log.queries), given.exponent, given.seed)
  log = dataclasses.replace(
    log,
    queries=tuple(
      dataclasses.replace(query, client=f"user{user}")
      for query, user in zip(log.queries, who.tolist(), strict=True)
    ),
  )
  given.target.mkdir(parents=True, exist_ok=True)
  beir.write_beir(given.target / "log", log)
  beir.write_beir(given.target / "held_out", test)
  asked = np.array(sorted(collections.Counter(who.tolist()).values()))
  told = {
    "commit": repository.commit(),
    "documents": len(log.documents),
    "log": len(log.queries),
    "test": len(test.queries),
    "users": len(asked),
    "largest": asked[-3:].tolist(),
    "median": float(np.median(asked)),
    "kept": {most: int(np.minimum(asked, most).sum()) for most in MOST},
  }
  print(json.dumps(told, indent=1))


if __name__ == "__main__":
  main()
