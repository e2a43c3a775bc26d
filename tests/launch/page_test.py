"""The page on slices: from nothing to the first step, in its order."""

import pathlib
import re
import shlex
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/tutorials/tpu_slice.md"
MOST = 12


def commands(heading: str) -> list[list[str]]:
  """The commands of a section, one after the other."""
  section = PAGE.read_text().partition(f"## {heading}\n")[2]
  section = section.partition("\n## ")[0]
  blocks = re.findall(r"(?s)```bash\n(.*?)```", section)
  lines = "".join(blocks).replace("\\\n", " ").splitlines()
  return [shlex.split(line) for line in lines]


def run(cloud, words: list[str]) -> subprocess.CompletedProcess:
  """Runs a command of the page against the stand-in for gcloud."""
  if words[0] == "python":
    script, *flags = words[1:]
    own = [f"--source={cloud.checkout}", f"--results={cloud.folder / 'runs'}"]
    words = [sys.executable, str(ROOT / script), *flags, *own]
  return subprocess.run(
    words,
    env=cloud.environment,
    cwd=cloud.folder,
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )


def test_twelve_commands_or_fewer_lead_to_the_first_step(cloud):
  found = commands("From nothing to the first step")
  assert len(found) <= MOST
  assert {words[0] for words in found} == {"gcloud", "python"}
  for words in found:
    done = run(cloud, words)
    assert done.returncode == 0, (words, done.stderr)
    is_dry = "--dry_run" in words
    assert ("gcloud compute tpus tpu-vm create" in done.stdout) == is_dry
    if is_dry:
      assert set(cloud.kinds) == {"by hand"}, "it has called nothing"
  (step,) = [c["argv"] for c in cloud.calls if c["kind"] == "run"]
  assert "TRAIN_STEPS=10" in " ".join(step)
  assert "finetune_dp" in " ".join(step)
  assert cloud.kinds.count("create") == cloud.kinds.count("delete") == 1
  assert not cloud.costs
  # The account, the bucket and the data are those that the slice is told of.
  by_hand = " ".join(
    w for c in cloud.calls if c["kind"] == "by hand" for w in c["argv"]
  )
  for words in found:
    for flag in words:
      if flag.startswith("--service_account="):
        assert f"serviceAccount:{flag.partition('=')[2]}" in by_hand
      if flag.startswith("--bucket="):
        assert f"buckets create gs://{flag.partition('=')[2]}" in by_hand


def test_a_slice_that_exists_is_one_command(cloud):
  cloud.answers(slice=["READY\tv4-32"])
  (words,) = commands("A slice that exists")
  done = run(cloud, words)
  assert done.returncode == 0, done.stderr
  assert "tpu-vm describe ours" in done.stdout
  assert not re.search(r"tpu-vm (create|delete)", done.stdout)


@pytest.mark.parametrize("word", ["--dry_run", "--confirm_cost"])
def test_what_costs_money_is_looked_at_first(word):
  found = commands("From nothing to the first step")
  assert sum(word in words for words in found) == 1
  launched = [words for words in found if words[0] == "python"]
  assert "--dry_run" in launched[0] and "--confirm_cost" in launched[1]
