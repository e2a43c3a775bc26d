"""The launcher of local processes, with children that need no JAX."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import processes

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "launch" / "processes.py"

# A child reads what to do in this start: the line of its own number.
CHILD = """
import os, pathlib, signal, sys, time
folder, me = pathlib.Path(sys.argv[1]), os.environ["SYNTHQ_PROCESS_ID"]
with open(folder / f"starts_{me}", "a") as stream:
  stream.write(os.environ["SYNTHQ_COORDINATOR_ADDRESS"] + "\\n")
nth = len((folder / f"starts_{me}").read_text().splitlines()) - 1
plan = sys.argv[2 + int(me)].split(",")
what = plan[min(nth, len(plan) - 1)]
print("does", what)
def stop(number, frame):
  time.sleep(0.3)
  (folder / f"saved_{me}").touch()
  sys.exit(143)
if what in ("waits", "deaf"):
  signal.signal(signal.SIGTERM, stop if what == "waits" else signal.SIG_IGN)
  (folder / f"ready_{me}").touch()
  time.sleep(60)
if what == "dies":
  while len(list(folder.glob("starts_*"))) < len(sys.argv) - 2:
    time.sleep(0.01)
  os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(what))
"""


def start(folder, *plans, flags=()):
  flags = [f"--num_processes={len(plans)}", *flags]
  child = [sys.executable, "-c", CHILD, str(folder), *plans]
  return subprocess.Popen(
    [sys.executable, str(LAUNCHER), *flags, "--", *child],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def run(folder, *plans, flags=()):
  """Returns the exit code and the output."""
  process = start(folder, *plans, flags=flags)
  output, _ = process.communicate(timeout=50)
  return process.returncode, output


def starts(folder, process=0):
  return (folder / f"starts_{process}").read_text().splitlines()


def test_lines_carry_the_number_of_their_process(tmp_path):
  code, output = run(tmp_path, "0", "0")
  assert code == 0
  assert "[0] does 0\n" in output and "[1] does 0\n" in output
  assert starts(tmp_path, 0) == starts(tmp_path, 1)


@pytest.mark.parametrize(
  ("plans", "code", "restarts"),
  [
    (("0,0", "dies,0"), 0, 1),  # one is killed: nothing says that 0 was right
    (("143,0", "143,0"), 0, 1),
    (("1,0", "1,0"), 0, 1),
    (("3", "3"), 3, 0),
    (("143,2", "143,2"), 2, 1),
    (("dies,0", "2,0"), 0, 1),  # a lost process makes others fail somehow
    (("143", "143"), 143, 2),
  ],
)
def test_what_was_lost_starts_again_and_what_is_final_does_not(
  tmp_path, plans, code, restarts
):
  found, output = run(tmp_path, *plans, flags=["--max_restarts=2"])
  assert (found, len(starts(tmp_path)) - 1) == (code, restarts), output
  assert output.count(": restart ") == restarts
  assert len(set(starts(tmp_path))) == restarts + 1  # a port for each start


def test_without_restarts_a_lost_process_is_the_end(tmp_path):
  code, output = run(tmp_path, "waits", "dies", flags=["--max_restarts=0"])
  assert code == 137 and "giving up" in output
  assert not (
    tmp_path / "saved_0"
  ).exists()  # killed, as it would wait for ever


def test_an_error_gives_the_others_some_time_and_then_ends_them(
  tmp_path, monkeypatch
):
  job = processes.Job(
    command=[sys.executable, "-c", CHILD, str(tmp_path), "waits", "2"],
    num_processes=2,
    grace=0.5,
  )
  began = time.monotonic()
  assert processes.run(job) == 2
  assert time.monotonic() - began < 20


@pytest.mark.parametrize(
  ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_a_launcher_told_to_stop_tells_all_and_waits(tmp_path, number, code):
  process = start(tmp_path, "waits", "waits")
  ready = [tmp_path / f"ready_{i}" for i in range(2)]
  while not all(path.exists() for path in ready):
    assert process.poll() is None
    time.sleep(0.02)
  process.send_signal(number)
  process.communicate(timeout=20)
  assert process.returncode == code
  assert (tmp_path / "saved_0").exists() and (tmp_path / "saved_1").exists()
  assert len(starts(tmp_path)) == 1


def test_a_launcher_told_twice_waits_for_nobody(tmp_path):
  process = start(tmp_path, "deaf")
  while not (tmp_path / "ready_0").exists():
    assert process.poll() is None
    time.sleep(0.02)
  for _ in range(2):
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
  process.communicate(timeout=20)
  assert process.returncode == 143


def test_children_find_each_other_through_the_environment():
  job = processes.Job(command=["x"], num_processes=3, devices_per_process=2)
  found = processes.environment(job, 1, 7777, {"HOME": "h"})
  assert found["HOME"] == "h"
  assert {k: v for k, v in found.items() if k.startswith("SYNTHQ")} == {
    "SYNTHQ_DISTRIBUTED": "local",
    "SYNTHQ_COORDINATOR_ADDRESS": "127.0.0.1:7777",
    "SYNTHQ_NUM_PROCESSES": "3",
    "SYNTHQ_PROCESS_ID": "1",
    "SYNTHQ_CPU_DEVICES": "2",
  }


def test_a_progress_bar_becomes_a_line_now_and_then(
  tmp_path, monkeypatch, capfdbinary
):
  bar = "import sys, time\nfor i in range(3):\n  sys.stderr.write(f'\\r{i}/2')"
  bar += "\n  sys.stderr.flush()\n  time.sleep(0.2)\nprint('', file=sys.stderr)"
  job = processes.Job(command=[sys.executable, "-c", bar], num_processes=1)
  assert processes.run(job) == 0
  assert capfdbinary.readouterr().out.splitlines()[1:] == [b"[0] 2/2"]
  monkeypatch.setattr(processes, "BAR", 0.0)
  assert processes.run(job) == 0
  lines = capfdbinary.readouterr().out.splitlines()
  assert lines[-1] == b"[0] 2/2"
  assert {b"[0] 0/2", b"[0] 1/2"} & set(lines)


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    ("--num_processes=0 -- x", "--num_processes must be 1 or more: 0"),
    ("--num_processes=1", "required: command"),
  ],
)
def test_wrong_flags_start_nothing(flags, words, capsys):
  with pytest.raises(SystemExit) as stopped:
    processes.main(flags.split())
  assert stopped.value.code == 2
  assert words in capsys.readouterr().err


def test_a_command_that_cannot_start_is_named(capsys):
  before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
  try:
    missing = [*"--num_processes=1 -- ".split(), os.devnull + "/nothing"]
    assert processes.main(missing) == 2
    assert os.devnull + "/nothing: Not a directory" in capsys.readouterr().out
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
