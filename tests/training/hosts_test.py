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
  assert states(folder) == ["files_8.json", "pending_8.json", "step_8"]


def states(folder):
  return sorted(path.name for path in (folder / "state").iterdir())


def test_two_processes_train_what_one_does_and_say_it_once(tmp_path, whole):
  output = ended(launch(tmp_path / "two", "--progress"))
  assert_equal(tmp_path / "two", whole)
  # A bar that ends long after its last step is drawn once more.
  assert set(re.findall(r"\[(\d)\] .*8/8", output)) == {"0"}
  assert "[0] test: 100%" in output and "[1] test" not in output


def test_two_tasks_of_a_node_under_slurm_train_on_the_devices_of_both(
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
  command = [SCRIPT, tmp_path, "--distributed=slurm", "--cpu_devices=2"]
  tasks = [
    hosts.start(
      *command, **variables, SLURM_PROCID=number, SLURM_LOCALID=number
    )
    for number in "01"
  ]
  for task in tasks:
    ended(task)
  assert_equal(tmp_path, whole)


def test_a_state_moves_from_one_process_to_two_and_back(tmp_path, whole):
  in_one(tmp_path, "--steps=3")
  ended(launch(tmp_path, "--steps=6"))
  in_one(tmp_path)
  result = (tmp_path / "result.npy").read_bytes()
  assert result == (whole / "result.npy").read_bytes()
  assert states(tmp_path) == ["files_8.json", "pending_8.json", "step_8"]


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
  cut = tmp_path / "cut"
  # Step 2 is the third; its vote is read behind the next one.
  for process, step, last in ((1, 2, 4), (0, 5, 7)):
    told = f"--signal={signal.SIGTERM:d},{process},{step}"
    ended(launch(cut, told), code=143)
    assert states(cut) == [
      f"files_{last}.json",
      f"pending_{last}.json",
      f"step_{last}",
    ]
    assert not (cut / "result.npy").exists()
  ended(launch(cut))
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
  while not (cut / "metrics.jsonl").exists():
    assert process.poll() is None
    time.sleep(0.05)
  time.sleep(0.5)
  process.send_signal(signal.SIGTERM)
  output = ended(process, code=143)
  assert "restart" not in output
  step = states(cut)[-1].removeprefix("step_")
  assert states(cut) == [
    f"files_{step}.json",
    f"pending_{step}.json",
    f"step_{step}",
  ]
  assert 0 < int(step) < 8
  ended(launch(cut))
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
  while not (cut / "metrics.jsonl").exists():
    assert stopped.poll() is None
    time.sleep(0.05)
  pids = re.search(r"started (\d+) (\d+)", stopped.stdout.readline())
  os.kill(int(pids[2]), signal.SIGTERM)
  ended(stopped, code=143)
  assert [name.partition("_")[0] for name in states(cut)] == [
    "files", "pending", "step",
  ]  # fmt: skip
  assert "step_8" not in states(cut)
  ended(launch(cut, "--alone"))
  assert_equal(cut, whole)
