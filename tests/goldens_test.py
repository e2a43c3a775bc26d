"""Two whole runs give the claims and scores that were recorded.

`goldens.json` holds, for fixed secrets: each line of the ledger with its
statement, the joint claims, every row's nDCG@10 and Recall@10 on every test
set, and digests of what every kind of processor computes alike. Whoever
removes a row removes its entries, and no other.

Noise follows the digest of all settings, so a setting that goes moves every row
with DP. The tiny demo is therefore run with noise that follows the row's name
alone; of the other run only rows without noise are compared.

The file also holds a digest of demo.gin's settings for each stage. Finished private
trainings follow these: when one changes, users train again and pay epsilon again.

  python tests/goldens_test.py    # writes the file again
"""

import hashlib
import json
import pathlib
import re
import sys
import tempfile
from typing import Any

import numpy as np
import pytest

if __name__ == "__main__":
  root = pathlib.Path(__file__).resolve().parents[1]
  sys.path[:0] = [str(root), str(root / "tests" / "shared")]

import finished_runs
import jax
import jax.numpy as jnp
import small_data

from synthq_jax.cli import main
from synthq_jax.privacy import ledger
from synthq_jax.runtime import release, released_results, runner
from synthq_jax.stages import plan
from synthq_jax.storage import artifacts

GOLDENS = pathlib.Path(__file__).with_name("goldens.json")
MEASURES = ("nDCG@10", "R@10")
RELATIVE_TOLERANCE = 1e-5


def run_demo_tiny(folder: pathlib.Path) -> pathlib.Path:
  """Runs demo_tiny.gin with a log that does not change with the packages."""
  source = small_data.write_pairs(folder / "log.jsonl", 160)
  flags = [
    f"SOURCE={source}",
    "SECRET_SEED=7",
    "NUM_DOCUMENTS=48",
    "plan.RunConfig.public_data=True",
    "prepare_data.Config.public_test_documents=20",
    "generate.Config.gauge_queries=10",
    "fuse.Config.min_queries=5",
  ]
  recipe = ["recipes/demo_tiny.gin"]
  config, _ = main.configure(plan.RunConfig, recipe, flags)
  start = release.start

  def start_by_name(space, stage, digest, **named):
    del digest
    return start(space, stage, "golden", **named)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(release, "start", start_by_name)
    plan.run(config, folder / "run")
  return folder / "run"


def read_goldens(root: pathlib.Path) -> dict[str, Any]:
  """Reads the recorded facts of a run from its working directory."""
  started = ledger.read(root / "private" / ledger.NAME)
  lines = (root / "private" / ledger.NAME).read_text().splitlines()
  entries = [json.loads(line) for line in lines]
  assert len(started) == len(entries) > 0
  claims = released_results.read(root)
  return {
    "ledger": {
      _strip_digest(entry["identifier"]): _strip_digests(entry["statement"])
      for entry in entries
    },
    "together": _read_numbers(claims.together),
    "everything": _read_numbers(claims.everything),
    "scores": dict(_read_scores(root)),
    "digests": {
      path.relative_to(root).as_posix(): _digest(path)
      for path in sorted(_list_exact_files(root))
    },
  }


def read_settings() -> dict[str, str]:
  """Digests the settings of each stage of demo.gin, as results follow them."""
  config, _ = main.configure(plan.RunConfig, ["recipes/demo.gin"], [])
  return {
    name: artifacts.fingerprint(runner._FORMAT, getattr(config, name))
    for name in plan.STAGES
    if hasattr(config, name)
  }


def _strip_digest(identifier: str) -> str:
  """Drops the digest at the end of a release's name, which follows the code."""
  return re.sub(r"/([0-9a-f]{16}|golden)$", "", identifier)


def _strip_digests(value: Any) -> Any:
  if isinstance(value, dict):
    return {name: _strip_digests(part) for name, part in value.items()}
  if isinstance(value, list):
    return [_strip_digests(part) for part in value]
  return _strip_digest(value) if isinstance(value, str) else value


def _read_numbers(claim: Any) -> dict[str, Any]:
  return {
    "epsilon": claim.epsilon,
    "delta": claim.delta,
    "relation": claim.relation,
    "releases": len(claim.ledger),
  }


def _read_scores(root: pathlib.Path):
  for base in (root, root / "private"):
    for path in sorted((base / "evaluate").glob("*/*/result.json")):
      measures = json.loads(path.read_text())["result"]["measures"]
      values = [measures[name]["mean"] for name in MEASURES]
      yield f"{path.parents[1].name}/{path.parent.name}", values


def _list_exact_files(root: pathlib.Path) -> list[pathlib.Path]:
  """Lists files that no processor computes otherwise."""
  data = [root / "prepare_data", root / "private" / "prepare_data"]
  kinds = ("corpus.jsonl", "queries.jsonl", "qrels/*.tsv")
  exact = [path for at in data for kind in kinds for path in at.glob(kind)]
  return exact + list(root.glob("private/evaluate/test/bm25/run.trec"))


def _digest(path: pathlib.Path) -> str:
  return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def describe_processor() -> str:
  """Digests a product whose last bits differ between kinds of processors."""
  rng = np.random.default_rng(0)
  left, right = rng.normal(size=(2, 257, 257)).astype(np.float32)
  product = np.asarray(jax.jit(jnp.matmul)(left, right))
  exp = np.asarray(jax.jit(jnp.exp)(left))
  return hashlib.sha256(product.tobytes() + exp.tobytes()).hexdigest()[:16]


def expect_equal(
  run: dict[str, Any], golden: dict[str, Any], *, with_noise: bool = False
) -> None:
  for part in ("ledger", "together", "everything", "digests"):
    assert run[part] == golden[part], part
  assert run["scores"].keys() == golden["scores"].keys()
  for row, values in golden["scores"].items():
    if with_noise or not re.search(r"eps|ltr|map", row):
      expected = pytest.approx(values, rel=RELATIVE_TOLERANCE)
      assert run["scores"][row] == expected, row


def is_same_processor() -> bool:
  return json.loads(GOLDENS.read_text())["processor"] == describe_processor()


def test_a_finished_run_has_the_recorded_claims_and_scores(finished_run):
  golden = json.loads(GOLDENS.read_text())["finished_run"]
  expect_equal(read_goldens(finished_run.root), golden)


@pytest.mark.slow
def test_the_tiny_demo_has_the_recorded_claims_and_scores(tmp_path):
  golden = json.loads(GOLDENS.read_text())["demo_tiny"]
  # On another kind of processor rows with DP have noise of another draw.
  run = read_goldens(run_demo_tiny(tmp_path))
  expect_equal(run, golden, with_noise=is_same_processor())


def test_finished_trainings_of_the_demo_are_not_made_again():
  assert read_settings() == json.loads(GOLDENS.read_text())["settings"]


def test_a_score_that_moved_by_a_ten_thousandth_is_seen(finished_run):
  golden = json.loads(GOLDENS.read_text())["finished_run"]
  name = "test/bm25"
  golden["scores"][name] = [1.0001 * s for s in golden["scores"][name]]
  with pytest.raises(AssertionError, match=name):
    expect_equal(read_goldens(finished_run.root), golden)


def write() -> None:
  with tempfile.TemporaryDirectory() as folder:
    root = pathlib.Path(folder)
    shared = finished_runs.shared(root / "finished")
    goldens = {
      "processor": describe_processor(),
      "finished_run": read_goldens(shared.root),
      "demo_tiny": read_goldens(run_demo_tiny(root / "demo")),
      "settings": read_settings(),
    }
  text = json.dumps(goldens, indent=1, sort_keys=True)
  GOLDENS.write_text(f"{text}\n")


if __name__ == "__main__":
  write()
