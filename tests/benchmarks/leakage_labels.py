"""Prints how detectors of near-duplicates do on labelled pairs, and table 2.

The labels are those of Fröbe et al., SPIRE 2022: queries of MS MARCO and ORCAS
whose cosine with a variant of a TREC topic is at least .90, and whether people
took query and topic for near-duplicates. Recall is that among these pairs alone.

  python tests/benchmarks/leakage_labels.py ../shared/data/query_leakage
"""

import argparse
import collections
import pathlib
import sys
import types
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from synthq_jax.data import files
from synthq_jax.leakage import calibration, near_duplicates, words

SIDES = ("variant", "title")
DETECTORS = {
  "exact": near_duplicates.Exact(),
  "token set": near_duplicates.TokenSet(),
  "token set without function words": near_duplicates.TokenSet(
    ignored=near_duplicates.FUNCTION_WORDS
  ),
  "containment": near_duplicates.Containment(),
  "trigrams": near_duplicates.Trigrams(),
}
_RELATIONS = {
  "Identical": "identical",
  "Generalization": "generalisation",
  "Specialization": "specialisation",
  "Reformulation": "reformulation",
}
_READ = ("query", "topic", "title", "variant", "cosine", "collections")
_READINGS = {
  "different topic or not": lambda said: said["Different Topic"],
  "relation to the title": lambda said: said["Title"],
  "relation to the variant": lambda said: said["Variant"],
  "title, or different topic": lambda said: (
    said["Different Topic"] or said["Title"]
  ),
  "variant, or different topic": lambda said: (
    said["Different Topic"] or said["Variant"]
  ),
  "all labels together": lambda said: tuple(said.values()),
}


def read_pairs(folder: pathlib.Path) -> list[Any]:
  """Reads the labelled pairs, with the relations' names of `words.RELATIONS`."""
  lines = files.json_lines(folder / "spire22_annotations.jsonl")
  return [
    types.SimpleNamespace(
      different_topic=bool(line["other_label"]),
      title_relations=[_RELATIONS[x] for x in line["title_label"]],
      variant_relations=[_RELATIONS[x] for x in line["variant_label"]],
      **{name: line[name] for name in _READ},
    )
    for _, line in lines
  ]


def get_labels(pairs: Sequence[Any]) -> np.ndarray:
  """Returns which pairs people took for near-duplicates."""
  return np.array([not pair.different_topic for pair in pairs])


def count_candidates(
  pairs: Sequence[Any],
) -> dict[str, tuple[int, ...]]:
  """Counts table 2 of the paper.

  Returns:
    Test set -> near-duplicates, their topics, other pairs, their topics.
  """
  topics: dict = collections.defaultdict(lambda: ([], []))
  for pair in pairs:
    for name in pair.collections:
      topics[name][pair.different_topic].append(pair.topic)
  return {
    name: tuple(size for side in both for size in (len(side), len({*side})))
    for name, both in topics.items()
  }


def compute_kappa(first: Sequence[Hashable], second: Sequence[Hashable]):
  """Returns Cohen's kappa: 0 is the agreement of chance, 1 is full."""
  number = len(first)
  agreed = sum(a == b for a, b in zip(first, second, strict=True)) / number
  counts = collections.Counter(first), collections.Counter(second)
  chance = sum(n * counts[1][label] for label, n in counts[0].items())
  chance /= number**2
  return 1.0 if agreed == 1 else (agreed - chance) / (1 - chance)


def compute_agreement(folder: pathlib.Path) -> dict[str, float]:
  """Returns kappa of both annotators, several labels of a pair in six ways."""
  by_pair: dict = collections.defaultdict(dict)
  for _, line in files.json_lines(folder / "spire22_agreement.jsonl"):
    by_pair[line["pair"]][line["annotator"]] = {
      about: frozenset(x for x in line["label"] if x.split("-")[0] == about)
      for about in ("Title", "Variant", "Different Topic")
    }
  people = sorted({name for said in by_pair.values() for name in said})
  return {
    name: compute_kappa(
      *([read(said[who]) for said in by_pair.values()] for who in people)
    )
    for name, read in _READINGS.items()
  }


def count_types(
  pairs: Sequence[Any],
) -> collections.Counter[str]:
  """Counts table 2b of the paper: types by the title, or another topic."""
  return collections.Counter(
    "different topic"
    if pair.different_topic
    else next(iter(pair.title_relations), "no label of the title")
    for pair in pairs
  )


def count_relations(pairs: Sequence[Any], side: str) -> np.ndarray:
  """Counts what people said of pairs (rows) by what the rule on words says."""
  counts = np.zeros((len(words.RELATIONS),) * 2, int)
  for pair in pairs:
    told = getattr(pair, f"{side}_relations")
    if pair.different_topic:
      told = ("different topic",)
    if told:
      said = words.relation(pair.query, getattr(pair, side))
      place = map(words.RELATIONS.index, (told[0], said))
      counts[tuple(place)] += 1
  return counts


def score(pairs: Sequence[Any], detector, side: str) -> np.ndarray:
  """Scores each query with one text of its topic."""
  texts = [getattr(pair, side) for pair in pairs]
  return detector.scores([pair.query for pair in pairs], texts)


def _describe(name: str, threshold: float, scores: np.ndarray, pairs) -> str:
  found, labels = scores >= threshold, get_labels(pairs)
  topics = [pair.topic for pair in pairs]
  right = found & labels
  precision, recall = (
    calibration.grouped_interval(right, total, topics)
    for total in (found, labels)
  )
  return (
    f"{name}: from {threshold:.3f}, {found.sum()} pairs, {right.sum()} right,"
    f" precision {precision:.3f}, recall {recall:.3f}"
  )


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--precision", type=float, default=0.9)
  options = parser.parse_args()
  pairs = read_pairs(options.folder)
  labels = get_labels(pairs)
  print(
    f"{len(pairs)} labelled pairs, {labels.sum()} of them near-duplicates\n"
  )
  print("Table 2: near-duplicates, their topics; other pairs, their topics")
  for name, counts in count_candidates(pairs).items():
    print(f"{name}: {', '.join(map(str, counts))}")
  print("\nTable 2b: types by the title")
  for name, number in count_types(pairs).items():
    print(f"{name}: {number}")
  print("\nKappa of the two annotators")
  for name, kappa in compute_agreement(options.folder).items():
    print(f"{name}: {kappa:.3f}")
  print("\nThe rule of relations")
  for side in SIDES:
    counts = count_relations(pairs, side)
    share = np.trace(counts) / counts.sum()
    print(f"query beside {side}: right in {share:.3f} of {counts.sum()}")
  print(f"\nDetectors: own threshold, and the lowest with {options.precision}")
  cosines = np.array([pair.cosine for pair in pairs])
  scores = {"cosine of the paper, variant": (None, cosines)}
  for name, one in DETECTORS.items():
    for side in SIDES:
      scores[f"{name}, {side}"] = one.threshold, score(pairs, one, side)
  for name, (own, values) in scores.items():
    if own is not None:
      print(_describe(name, own, values, pairs))
    try:
      lowest = calibration.threshold(
        values, labels, precision=options.precision
      )
    except ValueError:
      continue  # no threshold is that precise
    if lowest != own:
      print(_describe(name, lowest, values, pairs))
  return 0


if __name__ == "__main__":
  sys.exit(main())
