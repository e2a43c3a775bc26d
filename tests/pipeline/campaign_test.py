"""Five minutes of faults; `python tests/pipeline/campaign.py --hours=3` does more."""

import os
import subprocess
import sys

import pytest

from tests.pipeline import campaign


@pytest.mark.slow
def test_five_minutes_of_faults_lose_nothing_and_claim_nothing_false():
  """In a process of its own, which forks and has not started JAX."""
  command = [sys.executable, campaign.__file__, "--hours=0.08", "--faults=20"]
  own = {k: v for k, v in os.environ.items() if not k.startswith("XLA_FLAGS")}
  done = subprocess.run(command, capture_output=True, text=True, env=own)
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
  assert done.stdout.splitlines()[-1].endswith(" 0 wrong")


def test_the_table_counts_by_fault_and_by_stage():
  records = [
    {"fault": f, "stage": s, "outcome": o, "seconds": 1800.0}
    for f, s, o in [
      ("killed", "evaluate", "undisturbed"),
      ("killed", "generate", campaign.LOST),
      ("moved", "evaluate", "one line"),
    ]
  ]
  text = campaign.table(records)
  rows = {
    line.split()[0]: line.split()[1:] for line in text.splitlines() if line
  }
  assert rows["killed"] == ["2", "1", "0", "1"]
  assert rows["evaluate"] == ["2", "0", "1", "1"]
  assert text.endswith("3 faults, 1.50 h, 1 wrong")
