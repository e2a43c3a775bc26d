"""Two faults; `python tests/runtime/campaign.py --hours=3` does more."""

import json
import os
import subprocess
import sys

import pytest

from tests.runtime import campaign, kills

FAULTS = ("killed_at_a_write:finetune_dp", "byte_flipped")


@pytest.mark.slow
def test_faults_lose_nothing_and_have_nothing_false_claimed():
  """In a process of its own, which forks and has not started JAX."""
  command = [sys.executable, campaign.__file__, "--hours=0.2", "--quick"]
  command += [f"--faults={len(FAULTS)}", f"--only={','.join(FAULTS)}"]
  own = {k: v for k, v in os.environ.items() if not k.startswith("XLA_FLAGS")}
  done = subprocess.run(command, capture_output=True, text=True, env=own)
  assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
  said = done.stdout.splitlines()
  assert said[-1].startswith(f"{len(FAULTS)} faults, ")
  assert said[-1].endswith(" 0 wrong")
  ended = [line.split()[:3] for line in said if line.startswith("killed")]
  for fault in FAULTS:
    name, _, stage = fault.partition(":")
    if stage:  # killed, and what was left ended like what was not
      assert [name, stage, "undisturbed"] in ended


def test_the_table_counts_by_fault_and_by_stage():
  records = [
    {"fault": f, "stage": s, "outcome": o, "seconds": 900.0, "words": f"{o}!"}
    for f, s, o in [
      ("killed", "evaluate", "undisturbed"),
      ("killed", "fuse", campaign.LATE),
      ("killed", "generate", campaign.LOST),
      ("moved", "evaluate", "one line"),
    ]
  ]
  text = campaign.table(records)
  rows = {
    line.split()[0]: line.split()[1:] for line in text.splitlines()[:-2] if line
  }
  assert rows["killed"] == ["2", "1", "0", "1"]
  assert rows["evaluate"] == ["2", "0", "1", "1"]
  assert "fuse" not in rows
  assert text.splitlines()[-2:] == [
    "killed in generate: lost!",
    "3 faults, 1 more came too late, 1.00 h, 1 wrong",
  ]


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
