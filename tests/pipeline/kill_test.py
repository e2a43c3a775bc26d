"""A run that is killed and started again ends as one that was not.

A few kills of a small run; `python tests/pipeline/kills.py` does twenty of a
larger one.
"""

import json
import random
import time

import pytest
import random_t5
import small_data

from synthq_jax.cli import main
from tests.pipeline import kills


@pytest.fixture(name="flags")
def _flags(tmp_path):
  return [
    f"--gin_file={kills.RECIPE}",
    f"--gin.SOURCE={small_data.write_pairs(tmp_path / 'pairs.jsonl', 100)}",
    f"--gin.CHECKPOINT={random_t5.save(tmp_path / 't5')}",
    "--gin.plan.RunConfig.public_data=True",
    "--gin.prepare_data.Config.public_test_documents=20",
    "--gin.plan.Rows.public_only=False",
    "--gin.plan.Canaries.number=0",
  ]


def test_a_run_killed_and_started_again_ends_like_one_that_was_not(
  tmp_path, flags
):
  whole, cut = tmp_path / "whole", tmp_path / "cut"
  began = time.monotonic()
  assert main.main(["run", "--quiet", f"--workdir={whole}", *flags]) == 0
  took = time.monotonic() - began
  rng = random.Random(3)
  made = kills.kill_again_and_again(
    cut, flags, kills=2, delay=took / 2, rng=rng
  )
  assert len(made) == 2
  kills.finish(cut, flags)
  assert len(kills.files(whole)) > 30
  assert kills.differences(whole, cut) == []


def test_a_difference_of_one_byte_is_found(tmp_path):
  for name, byte in (("a", 1), ("b", 2)):
    (tmp_path / name / "x").mkdir(parents=True)
    (tmp_path / name / "x/params.safetensors").write_bytes(bytes([0, byte]))
    timed = json.dumps({"result": {"seconds": byte, "steps": 3}})
    (tmp_path / name / "x/result.json").write_text(timed)
    (tmp_path / name / "x/report.md").write_text(f"took {byte} min 3 s")
  (tmp_path / "b/only.txt").write_text("left over")
  different = ["only.txt", "x/params.safetensors"]
  assert kills.differences(tmp_path / "a", tmp_path / "b") == different
