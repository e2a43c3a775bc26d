"""The pipeline over two processes on one working directory."""

import contextlib
import fcntl
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import small_data

from synthq_jax.privacy import ledger
from tests.pipeline import kills

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = pathlib.Path(__file__).with_name("hosts_script.py")
LAUNCHER = ROOT / "launch" / "processes.py"


@pytest.fixture(name="flags", scope="module")
def _flags(tmp_path_factory):
  path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
  return [
    "--gin_file=recipes/demo_tiny.gin",
    f"--gin.SOURCE={small_data.write_pairs(path, 100)}",
    "--gin.plan.RunConfig.public_data=True",
    "--gin.SECRET_SEED=5",
    "--gin.TRAIN_STEPS=5",
    "--gin.MESH_DATA=2",
    "--gin.prepare_data.Config.public_test_documents=20",
    "--gin.plan.Rows.public_only=False",
    "--gin.plan.Rows.original=False",
    "--gin.plan.Rows.direct_dp=()",
    "--gin.finetune_dp.Config.settings=@loop.Settings()",
    "--gin.loop.Settings.save_seconds=0.0",
    "--gin.loop.Settings.log_every=3",
  ]


def run(command):
  xla = os.environ.get("XLA_FLAGS", "")
  xla = re.sub(r"--xla_force_host_platform_device_count=\d+", "", xla)
  own = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla}
  return subprocess.run(
    [sys.executable, *map(str, command)],
    env={**os.environ, **own},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    check=False,
    timeout=300,
  )


def in_two(*command, max_restarts=0):
  counts = ["--num_processes=2", "--devices_per_process=1"]
  limit = f"--max_restarts={max_restarts}"
  return run([LAUNCHER, *counts, limit, "--", sys.executable, *command])


def test_two_processes_of_which_one_is_killed_end_like_one_that_was_not(
  tmp_path, flags
):
  whole, cut, dead = (tmp_path / name for name in ("whole", "cut", "dead"))
  stage = ["evaluate", "--quiet", *flags]
  one = run([SCRIPT, "-", *stage, "--cpu_devices=2", f"--workdir={whole}"])
  assert one.returncode == 0, one.stdout
  dead.mkdir()
  two = in_two(SCRIPT, dead, *stage, f"--workdir={cut}", max_restarts=1)
  assert two.returncode == 0, two.stdout
  assert [path.name for path in dead.iterdir()] == ["in_a_save_2"]
  assert two.stdout.count(": restart ") == 1
  assert len(kills.files(whole)) > 30
  assert kills.differences(whole, cut) == []
  assert list(ledger.read(cut / "private" / "ledger.jsonl")) == list(
    ledger.read(whole / "private" / "ledger.jsonl")
  )
  said = re.findall(r"\[(\d)\] \[(\S+)\] running", two.stdout)
  assert {number for number, _ in said} == {"0"}
  names = [name for _, name in said]
  assert names.count("finetune_dp/eps8") == 2  # killed in it once
  assert names.count("prepare_data") == 1
  assert two.stdout.count("evaluate finished") == 1
  for what in ("part", "block"):  # each made once, by both in turns
    made = {
      me: re.findall(rf"(?m)^\[{me}\] {what} (\d+)$", two.stdout) for me in "01"
    }

    assert min(map(len, made.values())) > 0
    assert one.stdout.count(f"{what} ") == sum(map(len, made.values()))


@contextlib.contextmanager
def occupied(workdir):
  workdir.mkdir()
  with open(workdir / ".lock", "a+") as stream:
    fcntl.flock(stream, fcntl.LOCK_EX)
    yield


def test_what_the_user_can_mend_ends_both_with_one_line(tmp_path, flags):
  """Process 0 alone finds it; the other one waits for it at that time."""
  command = ["-m", "synthq_jax.cli.main", "prepare_data", *flags]
  with occupied(tmp_path / "run"):
    done = in_two(*command, f"--workdir={tmp_path / 'run'}", max_restarts=2)
  assert done.returncode == 2
  lines = [one for one in done.stdout.splitlines() if "Gloo" not in one]
  assert len(lines) == 2 and lines[0].startswith("processes: started")
  assert "[0] synthq:" in lines[1] and "of our own" in lines[1]


@pytest.mark.parametrize("leftovers", [False, True])
def test_processes_with_working_directories_of_their_own_are_refused(
  tmp_path, flags, leftovers
):
  """Two secrets would be two samples and two noises in one training."""
  for number in "01":
    place = tmp_path / number / "private"
    place.mkdir(parents=True)
    if leftovers:
      (place / "secret_seed").write_text(f"{number}abc\n")
  command = [sys.executable, "-m", "synthq_jax.cli.main", "finetune_dp", *flags]
  line = shlex.join([*command, "--gin.SECRET_SEED=None"])
  own = f"exec {line} --workdir={tmp_path}/$SYNTHQ_PROCESS_ID"
  done = run(
    [LAUNCHER, "--num_processes=2", "--max_restarts=0", "--", "sh", "-c", own]
  )
  assert done.returncode == 2, done.stdout
  said = [one for one in done.stdout.splitlines() if "synthq:" in one]
  assert len(said) == 1 and "--workdir" in said[0]
  assert "abc" not in done.stdout
  assert not list(tmp_path.glob("*/private/ledger.jsonl"))
  secrets = [path.parts[-3] for path in tmp_path.glob("*/private/secret_seed")]
  assert sorted(secrets) == (["0", "1"] if leftovers else ["0"])
