"""One finished run of every stage, made once for all processes of the tests.

The tiny demo recipe with a T5 of chance on a small log, with a filter, all kinds
of direct training and further test sets. Nobody writes to it: who changes a run changes
a copy.
"""

import dataclasses
import fcntl
import json
import os
import pathlib
import pickle
import shutil
import sys
from typing import NamedTuple

import missing
import numpy as np
import random_t5
import small_data

from synthq_jax.cli import main
from synthq_jax.runtime import results
from synthq_jax.stages import direct_dp, plan

NUM_PAIRS = 120
_SECRETS = "quince marzipan zeppelin gondola thimble walrus".split()
_DIRECT = direct_dp.Config(steps=2, batch_size=8, public_negatives=5)
_PART = dataclasses.replace(_DIRECT, trained=".*/mlp/.*")  # compiles sooner
DIRECT_METHODS = {
  "direct_dp": _DIRECT,
  "direct_dp_group": dataclasses.replace(
    _PART, label="group", method="group", group_size=4
  ),
  "direct_dp_example": dataclasses.replace(
    _PART, label="example", method="example"
  ),
  "direct_dp_row": dataclasses.replace(_PART, label="row", method="row"),
  "direct_dp_text": dataclasses.replace(
    _PART, label="text", method="row", negatives="batch", unit="query"
  ),
  "direct_dp_logit": dataclasses.replace(
    _DIRECT,
    label="logit",
    method="logit",
    temperature=1.0,
    projection=True,
    trained="projection/.*",
  ),
}
"""By the name of the row."""
TEST_SETS = ("cqadupstack.gis", "cqadupstack.tex", "msmarco", "scifact", "tiny")


class Run(NamedTuple):
  """A working directory that nothing is missing in."""

  config: plan.RunConfig
  root: pathlib.Path
  report: results.Report
  test_sets: pathlib.Path

  def copy(self, folder: pathlib.Path) -> pathlib.Path:
    """Copies the working directory into a folder."""
    return shutil.copytree(self.root, folder / "run")


def log() -> list[dict[str, str]]:
  """Pairs whose queries hold words that no document holds."""
  rng = np.random.default_rng(0)
  pairs = []
  for number in range(NUM_PAIRS):
    first, second = rng.choice(_SECRETS, 2, replace=False)
    topic = small_data.TOPICS[number % 8]
    query = f"where does {first}{number} meet the {topic} {second}"
    pairs.append({"query": query, "document": small_data.document(number)})
  return pairs


def write_test_set(folder, *, first, split="test", count=30):
  """Writes a BEIR folder of pairs, every second of them relevant."""
  ids = range(first, first + count)
  small_data.write_beir(
    folder,
    {f"d{i}": f"Report {i} on the station of row {i % 7}." for i in ids},
    {f"q{i}": f"row {i % 7} report {i}" for i in ids},
    {split: [(f"q{i}", f"d{i}", i % 2) for i in ids]},
  )


def write_test_sets(root: pathlib.Path) -> None:
  """Writes a folder of sets, as BEIR's downloads are unzipped."""
  write_test_set(root / "scifact", first=100)
  write_test_set(root / "msmarco", first=200, split="dev")
  write_test_set(root / "cqadupstack" / "gis", first=300)
  write_test_set(root / "cqadupstack" / "tex", first=400, count=20)
  write_test_set(root / "tiny", first=500, count=2)  # one judged query


def configure(folder: pathlib.Path) -> plan.RunConfig:
  """Returns the settings of the run on data in a folder."""
  flags = [
    f"SOURCE=jsonl:{folder / 'log.jsonl'}",
    f"CHECKPOINT='{folder / 't5'}'",
    f'TEST_SETS=("beir:{folder / "sets"}",)',
    "LTR=('untrained', 'public_only', 'synthetic', 'original',"
    " 'direct_dp_group', 'direct_dp_text', 'adapter')",
    "STATIC_DIM=0",  # static vectors have tests of their own
    "SECRET_SEED=7",
    "COMPARED=('direct_dp_group',)",  # the other rows count as released
    "plan.RunConfig.public_data=True",
    "prepare_data.Config.public_test_documents=20",
    "NUM_DOCUMENTS=72",
    "RETRIEVER_BATCH_SIZE=8",
    "generate.Config.max_length=12",
    "generate.Config.gauge_queries=10",
    # Words of chance: BM25 finds one query in fifty.
    "generate.Config.queries_per_document=12",
    "generate.Config.batch_size=288",
    f"filter_queries.Config.top_k={NUM_PAIRS - 1}",
    "evaluate.Config.bootstrap_samples=20",
    "fuse.Config.min_queries=5",
    "fuse.Config.weight=None",
  ]
  recipe = ["recipes/demo_tiny.gin"]
  config, _ = main.configure(plan.RunConfig, recipe, flags)
  methods = tuple(DIRECT_METHODS.values())
  return dataclasses.replace(config, direct_dp_methods=methods)


def make(folder: pathlib.Path) -> None:
  """Makes the run in a folder, and notes which packages that took."""
  small_data.write_lines(folder / "log.jsonl", map(json.dumps, log()))
  write_test_sets(folder / "sets")
  random_t5.save(folder / "t5")
  report = plan.run(configure(folder), folder / "run")
  packages = sorted({name.split(".")[0] for name in sys.modules})
  (folder / "packages.json").write_text(json.dumps(packages))
  (folder / "report.pickle").write_bytes(pickle.dumps(report))


def shared(folder: str | os.PathLike) -> Run:
  """Returns the run in a folder; the first process to ask has it made.

  In a process without TensorFlow, so that every test of it shows that no stage
  needs it.
  """
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  done = folder / "report.pickle"
  with open(folder / "lock", "w") as stream:
    fcntl.flock(stream, fcntl.LOCK_EX)
    if not done.exists():
      missing.call(
        "import pathlib, finished_runs\n"
        f"finished_runs.make(pathlib.Path({str(folder)!r}))"
      )
  report = pickle.loads(done.read_bytes())
  return Run(configure(folder), folder / "run", report, folder / "sets")


def state(run: Run) -> dict[str, tuple[int, int]]:
  """Returns size and time of every file, by which a change shows."""
  lock = run.root.parent / "lock"  # every process that asks for the run
  paths = (p for p in run.root.parent.rglob("*") if p.is_file() and p != lock)
  stats = {str(path): path.stat() for path in paths}
  return {p: (one.st_size, one.st_mtime_ns) for p, one in stats.items()}
