"""How often each detector of near-duplicates is right, on labelled pairs.

The labels are those of Froebe et al., SPIRE 2022: 827 queries of MS MARCO and
ORCAS whose cosine with a variant of a topic is at least .90. Prints one JSON
document; with --table the tables of docs/experiments.md instead.

  python tests/benchmarks/leakage_detectors.py ../shared/data/query_leakage
"""

import argparse
import collections
import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import repository

from synthq_jax.data import query_pairs
from synthq_jax.leakage import (
  calibration,
  encoders,
  near_duplicates,
  relations,
  shares,
)

PRECISION = 0.9
POINTS = 60
DRAWS = 500
SIDES = ("variant", "title")
DETECTORS = {
  "exact": near_duplicates.Exact(),
  "token set": near_duplicates.TokenSet(),
  "token set without function words": near_duplicates.TokenSet(
    ignored=near_duplicates.FUNCTION_WORDS
  ),
  "containment": near_duplicates.Containment(),
  "minhash": near_duplicates.MinHash(),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Labelled:
  """Pairs as columns.

  Attributes:
    pairs: one per query.
    labels: whether query and topic are near-duplicates.
    topics: groups of pairs that depend on each other.
  """

  pairs: Sequence[query_pairs.LabelledPair]
  labels: np.ndarray
  topics: list[str]


def read(folder: pathlib.Path) -> Labelled:
  """Reads the pairs; positive is whatever is not 'Different Topic'."""
  pairs = query_pairs.labelled_pairs(folder / "spire22_annotations.jsonl")
  labels = np.array([not pair.different_topic for pair in pairs])
  return Labelled(
    pairs=pairs, labels=labels, topics=[pair.topic for pair in pairs]
  )


def scored(
  labelled: Labelled, detectors=DETECTORS
) -> Iterator[tuple[str, str, np.ndarray, float | None]]:
  """Yields detector, side, scores and the default threshold."""
  pairs = labelled.pairs
  cosines = np.array([pair.cosine for pair in pairs])
  yield "cosine of the paper", "variant", cosines, None
  queries = [pair.query for pair in pairs]
  for name, detector in detectors.items():
    for side in SIDES:
      texts = [getattr(pair, side) for pair in pairs]
      scores = detector.scores(queries, texts)
      default = None if name == "embedding" else detector.threshold
      yield name, side, scores, default


def interval(hits, counted, labelled: Labelled) -> list[float]:
  """A share, Wilson's interval, and that of drawn topics."""
  groups = calibration.grouped_interval(hits, counted, labelled.topics, seed=0)
  alone = groups  # nan where nothing is counted
  if np.sum(counted):
    alone = shares.wilson(int(np.sum(hits)), int(np.sum(counted)))
  ends = (alone.mean, alone.low, alone.high, groups.low, groups.high)
  return [round(float(each), 4) for each in ends]


def at(threshold: float, scores: np.ndarray, labelled: Labelled) -> dict:
  """Precision and recall of the pairs that score at least so much."""
  found = scores >= threshold
  right = found & labelled.labels
  return {
    "threshold": round(float(threshold), 4),
    "found": int(found.sum()),
    "right": int(right.sum()),
    "precision": interval(right, found, labelled),
    "recall": interval(right, labelled.labels, labelled),
  }


def thresholds(scores: np.ndarray, labels: np.ndarray) -> dict:
  """The lowest with the wanted precision, or the best precision there is."""
  try:
    wanted = calibration.threshold(scores, labels, precision=PRECISION)
  except ValueError:
    curve = calibration.curve(scores, labels)
    return {"best precision": round(float(curve.precision.max()), 4)}
  return {"lowest": wanted}


def points(curve: calibration.Curve) -> list[list[float]]:
  """Threshold, precision and recall, thinned out."""
  step = -(-len(curve.thresholds) // POINTS)
  rows = zip(curve.thresholds, curve.precision, curve.recall, strict=True)
  return [[round(float(x), 4) for x in row] for row in rows][::step]


def drawn(labelled: Labelled, number: int) -> Iterator[np.ndarray]:
  """Yields positions of the pairs of topics drawn with replacement."""
  rng = np.random.default_rng(0)
  names, of_pair = np.unique(labelled.topics, return_inverse=True)
  rows = [np.flatnonzero(of_pair == topic) for topic in range(len(names))]
  for draw in rng.integers(len(names), size=(number, len(names))):
    yield np.concatenate([rows[topic] for topic in draw])


def averages(scores: np.ndarray, labelled: Labelled) -> list[float]:
  """Average precision, and the interval of drawn topics."""
  draws = [
    calibration.average_precision(scores[rows], labelled.labels[rows])
    for rows in drawn(labelled, DRAWS)
  ]
  value = calibration.average_precision(scores, labelled.labels)
  return [
    round(float(each), 4)
    for each in (value, *np.quantile(draws, [0.025, 0.975]))
  ]


def kept_apart(scores: np.ndarray, labelled: Labelled) -> dict:
  """Chooses the threshold on half of the topics, measures on the others."""
  rng = np.random.default_rng(0)
  names, of_pair = np.unique(labelled.topics, return_inverse=True)
  shares = []
  for _ in range(DRAWS):
    known = rng.permutation(len(names))[of_pair] % 2 == 0
    reached = thresholds(scores[known], labelled.labels[known])
    found = ~known & (scores >= reached.get("lowest", np.inf))
    if found.any():
      shares.append(labelled.labels[found].mean())
  low, high = np.quantile(shares, [0.025, 0.975])
  return {
    "precision": [round(float(x), 4) for x in (np.mean(shares), low, high)],
    "splits": len(shares),
  }


def row(name: str, side: str, scores, default, labelled: Labelled) -> dict:
  """All figures of a detector on one side of the topics."""
  curve = calibration.curve(scores, labelled.labels)
  found = {
    "detector": name,
    "compared with": side,
    "average precision": averages(scores, labelled),
    "curve": points(curve),
  }
  if default is not None:
    found["default"] = at(default, scores, labelled)
  reached = thresholds(scores, labelled.labels)
  if "lowest" in reached:
    found[f"precision {PRECISION}"] = at(reached["lowest"], scores, labelled)
    found["on topics kept apart"] = kept_apart(scores, labelled)
  return found | reached


def paper(labelled: Labelled) -> dict:
  """Precision at round thresholds of the paper's cosines."""
  cosines = np.array([pair.cosine for pair in labelled.pairs])
  lowest = calibration.threshold(cosines, labelled.labels, precision=PRECISION)
  rounded = np.arange(900, 1000) / 1000
  shares = [labelled.labels[cosines >= t].mean() for t in rounded]
  return {
    "lowest cosine": round(lowest, 5),
    "lowest of three decimals": float(
      rounded[np.array(shares) >= PRECISION][0]
    ),
    "at": [
      at(value, cosines, labelled)
      for value in (0.90, 0.91, 0.92, 0.926, 0.93, 0.94, 0.95)
    ],
  }


def agreement(folder: pathlib.Path) -> dict:
  """Kappa of both annotators, several labels of a pair in four ways."""
  found = query_pairs.agreement(folder / "spire22_agreement.jsonl")
  people = sorted(next(iter(found.values())))
  both = [[said[person] for said in found.values()] for person in people]
  ways = {
    "different topic or not": lambda said: bool(said["other"]),
    "relation to the title": lambda said: said["title"],
    "relation to the variant": lambda said: said["variant"],
    "title, or different topic": lambda said: said["other"] or said["title"],
    "variant, or different topic": (
      lambda said: said["other"] or said["variant"]
    ),
    "all labels together": lambda said: tuple(said.values()),
  }
  table = {}
  for name, way in ways.items():
    first, second = ([way(said) for said in side] for side in both)
    agreed = sum(a == b for a, b in zip(first, second, strict=True))
    table[name] = {
      "kappa": round(calibration.cohens_kappa(first, second), 4),
      "agreed": agreed,
      "pairs": len(first),
    }
  return table


def confusion(labelled: Labelled, side: str) -> dict:
  """What the rule says against what people said of the same two texts."""
  counts: collections.Counter = collections.Counter()
  for pair in labelled.pairs:
    told = getattr(pair, f"{side}_relations")
    if pair.different_topic:
      told = ("different topic",)
    if told:
      said = relations.relation(pair.query, getattr(pair, side))
      counts[told[0], said] += 1
  kinds = relations.RELATIONS
  table = [[counts[one, other] for other in kinds] for one in kinds]
  right = sum(table[i][i] for i in range(len(kinds)))
  total = sum(counts.values())
  alike = max(sum(each) for each in table)
  return {
    "relations": kinds,
    "rows are people's": table,
    "accuracy": round(right / total, 4),
    "interval": [
      round(float(x), 4)
      for x in dataclasses.astuple(shares.wilson(right, total))[1:]
    ],
    "commonest alone": round(alike / total, 4),
    "pairs": total,
  }


def collect(folder: pathlib.Path, *, with_encoder: bool) -> dict:
  """All figures."""
  labelled = read(folder)
  detectors = DETECTORS
  if with_encoder:
    own = near_duplicates.Embedding(encode=encoders.own())
    detectors = DETECTORS | {"embedding": own}
  return {
    "benchmark": "leakage_detectors",
    "pairs": len(labelled.pairs),
    "near-duplicates": int(labelled.labels.sum()),
    "topics": len(set(labelled.topics)),
    "paper": paper(labelled),
    "kappa": agreement(folder),
    "relations": {side: confusion(labelled, side) for side in SIDES},
    "detectors": [row(*each, labelled) for each in scored(labelled, detectors)],
  }


def written(share: list[float]) -> str:
  """A share and the interval of drawn topics."""
  return "{:.3f} [{:.3f}, {:.3f}]".format(share[0], *share[3:])


def tables(result: dict) -> Iterator[str]:
  """The tables of docs/experiments.md."""
  head = ("Detector", "With", "At", "Found", "Precision", "Recall", "AP")
  yield f"| {' | '.join(head)} |"
  yield "|---|---|--:|--:|---|---|--:|"
  for each in result["detectors"]:
    for key in ("default", f"precision {PRECISION}"):
      if key in each:
        point = each[key]
        cells = (
          each["detector"],
          each["compared with"],
          f"{point['threshold']:.3f}{' (default)' * (key == 'default')}",
          str(point["found"]),
          written(point["precision"]),
          written(point["recall"]),
          f"{each['average precision'][0]:.3f}",
        )
        yield f"| {' | '.join(cells)} |"
  for side, table in result["relations"].items():
    yield f"\n{side}: accuracy {table['accuracy']} {table['interval']}"
    yield f"| People \\ rule | {' | '.join(table['relations'])} |"
    yield f"|---{'|--:' * len(table['relations'])}|"
    named = zip(table["relations"], table["rows are people's"], strict=True)
    for name, counts in named:
      yield f"| {name} | {' | '.join(map(str, counts))} |"
  for name, value in result["kappa"].items():
    yield f"{name}: kappa {value['kappa']}, agreed {value['agreed']}"


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--no_encoder", action="store_true")
  parser.add_argument("--table", action="store_true")
  options = parser.parse_args()
  result = collect(options.folder, with_encoder=not options.no_encoder)
  result["commit"] = repository.commit()
  if options.table:
    print("\n".join(tables(result)))
  else:
    print(json.dumps(result, indent=1))
  return 0


if __name__ == "__main__":
  sys.exit(main())
