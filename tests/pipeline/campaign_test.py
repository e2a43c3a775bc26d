"""Half a minute of faults; `python tests/pipeline/campaign.py --hours=3` does more."""

import os
import subprocess
import sys

import pytest

from tests.pipeline import campaign


@pytest.mark.slow
def test_half_a_minute_of_faults_loses_nothing_and_claims_nothing_false():
  """In a process of its own, which forks and has not started JAX."""
  command = [sys.executable, campaign.__file__, "--hours=0.012", "--quick"]
  own = {k: v for k, v in os.environ.items() if not k.startswith("XLA_FLAGS")}
  done = subprocess.run(command, capture_output=True, text=True, env=own)
  assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
  last = done.stdout.splitlines()[-1]
  assert last.endswith(" 0 wrong") and int(last.split()[0]) > 0


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
