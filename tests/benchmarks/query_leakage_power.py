"""How often the search for real queries finds nothing that is there, or more.

Takes the working directory of a run that wrote synthetic queries. Who was trained
on is drawn anew, so that nothing leaks whatever was written: the share of alarms
should be what was promised. Then some train queries are said to be reproduced: how
few are found says what a quiet table means. Prints one JSON document.

  synthq query_leakage --gin_file=gin_configs/recipes/demo_query_leakage.gin \
    --workdir=runs/demo_query_leakage
  python tests/benchmarks/query_leakage_power.py runs/demo_query_leakage
"""

import argparse
import json
import sys

import numpy as np
import repository

from synthq_jax import artifacts
from synthq_jax.leakage import near_duplicates, shares
from synthq_jax.pipeline import (
  query_comparisons,
  results,
  workspace,
)

LEVEL = 0.05
DETECTORS = {
  "exact": near_duplicates.Exact(),
  "token_set": near_duplicates.TokenSet(threshold=0.8),
}


def counted(found, name, real):
  """Returns who counts, and who of them is reproduced."""
  alone = shares.alone(
    zip(*map(np.ndarray.tolist, found.real), strict=True), found.num_targets
  )
  hit = np.zeros(found.num_targets, bool)
  hit[found.written[name][1]] = True
  return hit[alone], int((alone & real.trained).sum())


def measure(hit, num_train: int, planted: float, repeats: int, rng) -> dict:
  """Draws who was trained on, again and again."""
  alarms, covered, differences = 0, 0, []
  for _ in range(repeats):
    trained = np.zeros(len(hit), bool)
    trained[rng.permutation(len(hit))[:num_train]] = True
    now = hit | (trained & (rng.random(len(hit)) < planted))
    # What is planted in queries that come out anyway adds nothing.
    truth = planted * (1 - hit.mean())
    train, control = now[trained], now[~trained]
    gap = shares.difference(
      shares.wilson(int(train.sum()), len(train)),
      shares.wilson(int(control.sum()), len(control)),
    )
    p_value = shares.two_sample_p_value(
      int(train.sum()), len(train), int(control.sum()), len(control)
    )
    alarms += p_value <= LEVEL
    covered += gap.low <= truth <= gap.high
    differences.append(gap.mean)
  return {
    "planted": planted,
    "alarms": round(float(alarms) / repeats, 4),
    "covered": round(covered / repeats, 4),
    "mean_difference": round(float(np.mean(differences)), 5),
  }


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("workdir")
  parser.add_argument("--repeats", type=int, default=1000)
  parser.add_argument("--planted", type=float, nargs="+",
                      default=[0.0, 0.002, 0.005, 0.01, 0.02])  # fmt: skip
  options = parser.parse_args()
  space = workspace.Folders(options.workdir)
  prepared = artifacts.load(space.private("prepare_data"), results.PreparedData)
  real = query_comparisons.real(space, prepared, limit=20_000, seed=0)
  written = [
    query_comparisons.written(
      space,
      artifacts.load(path.parent, results.SyntheticQueries),
      limit=100_000,
      seed=0,
    )
    for place in (space.public("generate"), space.private("generate"))
    for path in sorted(place.glob("*/result.json"))
  ]
  rng = np.random.default_rng(0)
  rows = []
  for name, detector in DETECTORS.items():
    found = query_comparisons.NearDuplicates(
      detector.index, real.texts, real, written
    )
    for one in written:
      hit, num_train = counted(found, one.name, real)
      rows += [
        {
          "generator": one.name,
          "detector": name,
          "train": num_train,
          "control": len(hit) - num_train,
          "reproduced": round(float(hit.mean()), 5),
          **measure(hit, num_train, share, options.repeats, rng),
        }
        for share in options.planted
      ]
  result = {
    "benchmark": "query_leakage_power",
    "commit": repository.commit(),
    "repeats": options.repeats,
    "level": LEVEL,
    "rows": rows,
  }
  print(json.dumps(result, indent=1))
  return 0


if __name__ == "__main__":
  sys.exit(main())
