"""Makes a collection whose documents are asked about unevenly, to a known degree.

Reads a BEIR folder and writes another. Documents are grouped by their words; the
groups, the largest first, are asked about by a Zipf law. Queries of two fifths of
the documents are for testing, and drawn without replacement, as many as the law
leaves; train queries are drawn with. With --compare it tests rows of working
directories against the first one's, query by query. Prints one JSON document.

  python tests/benchmarks/topic_skew.py ../shared/data/medquad runs/skewed
  python tests/benchmarks/topic_skew.py --compare uniform/synthetic_eps8 ...
"""

import argparse
import collections
import json
import math
import pathlib
import re

import numpy as np
import repository

from synthq_jax.data import beir, files
from synthq_jax.retrieval import clusters, significance

DIM = 64
TEST = 0.4  # of the documents: their queries are for testing


def vectors(texts: list[str]) -> np.ndarray:
  """Words as random signs, the rarer the longer: no encoder of ours."""
  words = [set(re.findall(r"[a-z]{3,}", text.lower())) for text in texts]
  counts = collections.Counter(word for one in words for word in one)
  names = {word: i for i, word in enumerate(sorted(counts))}
  signs = np.random.default_rng(0).choice([-1.0, 1.0], (len(names), DIM))
  rows = np.zeros((len(texts), DIM))
  for row, own in zip(rows, words, strict=True):
    for word in own:
      row += math.log(len(texts) / counts[word]) * signs[names[word]]
  norms = np.linalg.norm(rows, axis=1, keepdims=True)
  return (rows / np.maximum(norms, 1e-9)).astype(np.float32)


def zipf(number: int, exponent: float) -> np.ndarray:
  """Shares of the groups, the largest first."""
  shares = np.arange(1, number + 1) ** -exponent
  return shares / shares.sum()


def drawn(rng, groups: np.ndarray, shares: np.ndarray, total: int | None):
  """Positions of queries by the law; None: without replacement, all it leaves."""
  held = np.bincount(groups, minlength=len(shares))
  each = np.where(held > 0, shares / np.maximum(held, 1), 0.0)
  if total is not None:
    return rng.choice(len(groups), total, p=each[groups] / each[groups].sum())
  keep = rng.uniform(size=len(groups)) < each[groups] / each.max()
  return np.flatnonzero(keep)


def made(source: pathlib.Path, target: pathlib.Path, given) -> dict:
  """Writes the folder, and returns what it holds."""
  rng = np.random.default_rng(given.seed)
  corpus = [
    line for _, line in files.json_lines(files.find(source, "corpus.jsonl"))
  ]
  corpus = [
    corpus[i] for i in np.sort(rng.permutation(len(corpus))[: given.documents])
  ]
  place = {one["_id"]: i for i, one in enumerate(corpus)}
  asked = {
    one["_id"]: one for _, one in files.json_lines(source / "queries.jsonl")
  }
  groups = clusters.assign(
    vectors([f"{one.get('title', '')} {one['text']}" for one in corpus]),
    given.groups,
    seed=given.seed,
  )
  ranks = np.argsort(np.argsort(-np.bincount(groups), kind="stable"))
  groups, shares = ranks[groups], zipf(given.groups, given.exponent)
  pairs = collections.defaultdict(list)
  held_out = rng.uniform(size=len(corpus)) < TEST
  for split in ("train", "dev", "test"):
    read = beir.read_judgements(source / "qrels" / f"{split}.tsv")
    for query, judged in read.items():
      own = [d for d, grade in judged.items() if grade > 0 and d in place]
      if own:
        side = "test" if held_out[place[own[0]]] else "train"
        pairs[side].append((query, own[0]))
  target.mkdir(parents=True)
  (target / "qrels").mkdir()
  lines = {"corpus": corpus, "queries": []}
  told = {"law": np.round(shares, 4).tolist()}
  for split, total in (("train", given.queries), ("test", None)):
    of = np.array([groups[place[document]] for _, document in pairs[split]])
    chosen = drawn(rng, of, shares, total)
    rows = ["query-id\tcorpus-id\tscore"]
    for number, i in enumerate(chosen.tolist()):
      query, document = pairs[split][i]
      name = f"{split}-{number}"
      lines["queries"].append({"_id": name, "text": asked[query]["text"]})
      rows.append(f"{name}\t{document}\t1")
    (target / "qrels" / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    found = np.bincount(of[chosen], minlength=given.groups) / len(chosen)
    told[split] = {
      "queries": len(chosen),
      "shares": np.round(found, 4).tolist(),
    }
  sizes = np.bincount(groups, minlength=given.groups) / len(groups)
  told["documents"] = {
    "number": len(groups),
    "shares": np.round(sizes, 4).tolist(),
  }
  for name, entries in lines.items():
    text = "".join(json.dumps(one) + "\n" for one in entries)
    (target / f"{name}.jsonl").write_text(text)
  return told


def compared(names: list[str], measure: str) -> list[dict]:
  """Each row less the first one, with 95% intervals over queries."""
  values = {}
  for name in names:
    folder, _, row = name.rpartition("/")
    path = pathlib.Path(folder, "private/evaluate/test", row, "per_query.json")
    values[name] = json.loads(path.read_text())[measure]
  first, told = names[0], []
  for name in names:
    one = {"row": name, "mean": float(np.mean(list(values[name].values())))}
    if name != first:
      pair = {name: (values[name], values[first])}
      [found] = significance.compare(pair, samples=10_000, seed=0)
      one |= {
        "over first": found.difference.mean,
        "interval": [found.difference.low, found.difference.high],
      }
    told.append(one)
  return told


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("places", nargs="+")
  parser.add_argument("--compare", action="store_true")
  parser.add_argument("--measure", default="nDCG@10")
  parser.add_argument("--documents", type=int, default=None)
  parser.add_argument("--queries", type=int, default=6000)
  parser.add_argument("--groups", type=int, default=30)
  parser.add_argument("--exponent", type=float, default=1.0)
  parser.add_argument("--seed", type=int, default=0)
  given = parser.parse_args()
  if given.compare:
    told = {"rows": compared(given.places, given.measure)}
  else:
    told = made(*map(pathlib.Path, given.places), given)
  print(json.dumps({"commit": repository.commit(), **told}, indent=1))


if __name__ == "__main__":
  main()
