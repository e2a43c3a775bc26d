"""Trainings of several real processes, disturbed and not: the same in the end.

Each process has two virtual devices; hosts_script.py is what it runs.
"""

import os
import pathlib
import re
import signal
import time

import hosts
import numpy as np
import pytest
from hosts import ended

from synthq_jax.privacy import ledger

SCRIPT = pathlib.Path(__file__).with_name("hosts_script.py")


def launch(folder, *flags, max_restarts=0):
  """Starts two processes with two devices each."""
  folder.mkdir(exist_ok=True)
  return hosts.launch(SCRIPT, folder, *flags, max_restarts=max_restarts)


def in_one(folder, *flags):
  folder.mkdir(exist_ok=True)
  ended(hosts.start(SCRIPT, folder, "--cpu_devices=4", *flags))


@pytest.fixture(name="whole", scope="module")
def _whole(tmp_path_factory):
  """An undisturbed training in one process."""
  folder = tmp_path_factory.mktemp("whole")
  in_one(folder)
  return folder


def assert_equal(folder, whole):
  """Result, metrics and ledger are the same, and one state is left."""
  assert np.load(whole / "result.npy").std() > 1000
  for name in ("result.npy", "metrics.jsonl", "ledger.jsonl"):
    assert (folder / name).read_bytes() == (whole / name).read_bytes(), name
  assert len(ledger.read(folder / "ledger.jsonl")) == 1
  assert states(folder) == states_of(8)


def states(folder):
  return sorted(path.name for path in (folder / "state").iterdir())


def wait_for_metrics(process, folder):
  while not (folder / "metrics.jsonl").exists():
    assert process.poll() is None
    time.sleep(0.05)


def states_of(step):
  return [f"files_{step}.json", f"pending_{step}.json", f"step_{step}"]


def test_two_tasks_of_a_node_under_slurm_train_what_one_does_and_say_it_once(
  tmp_path, whole
):
  """Four devices on a node, two of each task; srun would set these variables."""
  variables = {
    "SLURM_JOB_ID": str(os.getpid()),  # by which the port is chosen
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_GPUS_ON_NODE": "4",
  }
  flags = ["--distributed=slurm", "--cpu_devices=2", "--progress"]
  tasks = [
    hosts.start(
      *(SCRIPT, tmp_path, *flags),
      **variables,
      SLURM_PROCID=number,
      SLURM_LOCALID=number,
    )
    for number in "01"
  ]
  said, by_the_other = map(ended, tasks)
  assert_equal(tmp_path, whole)
  # A bar that ends long after its last step is drawn once more.
  assert re.search(r"test: 100%.*8/8", said)
  assert "test:" not in by_the_other


def test_all_start_again_when_one_is_killed_and_nothing_shows_it(
  tmp_path, whole
):
  killed = [f"--signal={signal.SIGKILL:d},{at}" for at in ("0,4", "1,6")]
  cut = tmp_path / "cut"
  output = ended(launch(cut, "--save_seconds=0", *killed, max_restarts=2))
  assert "ended with 137: restart 1 of 2" in output
  assert "ended with 137: restart 2 of 2" in output
  assert_equal(cut, whole)


def test_sigterm_to_one_stops_both_after_the_same_step(tmp_path, whole):
  """And the state moves between one process and two."""
  cut = tmp_path / "cut"
  in_one(cut, "--steps=3")
  (cut / "result.npy").unlink()
  # Step 3 is the fourth; its vote is read behind the next one.
  for process, step, last in ((1, 3, 5), (0, 5, 7)):
    told = f"--signal={signal.SIGTERM:d},{process},{step}"
    ended(launch(cut, told), code=143)
    assert states(cut) == states_of(last)
    assert not (cut / "result.npy").exists()
  in_one(cut)
  assert_equal(cut, whole)


@pytest.mark.parametrize("processes", [(1,), (0, 1)])
def test_an_error_of_one_ends_the_other_in_its_step_and_is_said_once(
  tmp_path, processes
):
  """The other one waits for this one's part of a sum, which never comes."""
  began = time.monotonic()
  flags = [f"--signal=0,{process},3" for process in processes]
  output = ended(launch(tmp_path / "run", *flags, max_restarts=3), code=2)
  assert time.monotonic() - began < 60
  assert output.count("a mistake of the user") == 1
  assert "restart" not in output


def test_a_launcher_that_is_told_to_stop_waits_for_one_saved_state(
  tmp_path, whole
):
  cut = tmp_path / "cut"
  process = launch(cut, "--pause=0.4", max_restarts=5)
  wait_for_metrics(process, cut)
  time.sleep(0.5)
  process.send_signal(signal.SIGTERM)
  output = ended(process, code=143)
  assert "restart" not in output
  step = states(cut)[-1].removeprefix("step_")
  assert states(cut) == states_of(step)
  assert 0 < int(step) < 8
  in_one(cut)
  assert_equal(cut, whole)


@pytest.mark.parametrize("process", [0, 1])
def test_a_process_that_is_told_while_it_joins_tells_the_others(
  tmp_path, process
):
  began = time.monotonic()
  flags = [f"--signal_in_start={process}", "--alone"]
  ended(launch(tmp_path / "cut", *flags), code=143)
  assert time.monotonic() - began < 60


def test_process_0_trains_alone_while_the_others_wait(tmp_path, whole):
  cut = tmp_path / "cut"
  # The other one is told to stop: process 0 saves its state first.
  stopped = launch(cut, "--alone", "--pause=0.4")
  wait_for_metrics(stopped, cut)
  pids = re.search(r"started (\d+) (\d+)", stopped.stdout.readline())
  os.kill(int(pids[2]), signal.SIGTERM)
  ended(stopped, code=143)
  assert [name.partition("_")[0] for name in states(cut)] == [
    "files", "pending", "step",
  ]  # fmt: skip
  assert "step_8" not in states(cut)
  ended(launch(cut, "--alone"))
  assert_equal(cut, whole)
