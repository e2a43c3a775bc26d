"""Several processes of one command on this machine, started again when lost.

  python launch/processes.py --num_processes=2 --devices_per_process=2 -- \
      synthq run --gin_file=gin_configs/recipes/demo.gin --workdir=runs/demo

The command finds the other processes through SYNTHQ_* variables. Lines of
output stand behind [0], [1], ... One process that dies takes the others with
it, and all start again: the saved state is where they go on. So do they when
they exit with 143, told to stop by somebody else (a machine that is taken
away). Told to stop itself, by SIGTERM or Ctrl-C, the launcher tells them, waits
for their states and exits with 143 or 130. Exit codes 2 (a mistake that the
user can mend) and 3 (an audit refutes a claim) are final.

Standard library only: it never imports what it starts.
"""

import argparse
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

PREEMPTED = 143
FINAL = (0, 2, 3)
POLL = 0.05
BAR = 10.0  # seconds between two lines of a progress bar


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """A command and how often it may start."""

  command: Sequence[str]
  num_processes: int
  devices_per_process: int | None = None
  max_restarts: int = 3
  grace: float = 30.0
  """Seconds for the others to end after one has ended by itself."""


def environment(
  job: Job, process: int, port: int, outer: Mapping[str, str]
) -> dict[str, str]:
  """The variables of one process."""
  own = {
    "SYNTHQ_DISTRIBUTED": "local",
    "SYNTHQ_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
    "SYNTHQ_NUM_PROCESSES": str(job.num_processes),
    "SYNTHQ_PROCESS_ID": str(process),
    "PYTHONUNBUFFERED": "1",
  }
  if job.devices_per_process is not None:
    own["SYNTHQ_CPU_DEVICES"] = str(job.devices_per_process)
  return {**outer, **own}


def free_port() -> int:
  """A port that nobody listens on at the moment."""
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]


def say(text: str) -> None:
  print(f"processes: {text}", flush=True)


def start(job: Job) -> tuple[list[subprocess.Popen], list[threading.Thread]]:
  """Starts all processes, each in a session of its own, and their output."""
  port, started, outputs = free_port(), [], []
  for process in range(job.num_processes):
    started.append(
      subprocess.Popen(
        job.command,
        env=environment(job, process, port, os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C comes from here, once
      )
    )
    outputs.append(
      threading.Thread(
        target=forward, args=(process, started[-1].stdout), daemon=True
      )
    )
    outputs[-1].start()
  say(f"started {' '.join(str(child.pid) for child in started)}")
  return started, outputs


def forward(process: int, stream) -> None:
  """Copies lines of output behind the process's number.

  A progress bar, which writes itself over and over, becomes a line now and
  then.
  """

  def write(line: bytes) -> None:
    sys.stdout.buffer.write(b"[%d] %s\n" % (process, line))
    sys.stdout.buffer.flush()

  rest, shown = b"", time.monotonic()
  while chunk := stream.read1():
    *lines, rest = (rest + chunk).split(b"\n")
    for line in lines:
      write(line.rstrip(b"\r").rpartition(b"\r")[2])
    bar, _, rest = rest.rpartition(b"\r")
    if bar and time.monotonic() - shown > BAR:
      write(bar.rpartition(b"\r")[2])
      shown = time.monotonic()
  if rest:
    write(rest)


def signal_all(children: Sequence[subprocess.Popen], number: int) -> None:
  for child in children:
    if child.poll() is None:
      child.send_signal(number)


def wait(
  children: Sequence[subprocess.Popen], job: Job, told: Sequence[int]
) -> int:
  """Waits for all; returns what they came to, as one exit code.

  One that dies, or ends with an error, takes the others with it: at once, or
  when they have had the time to notice, since without it no step of theirs can
  end. Exit code 143 means that a state is being saved, so nobody is hurried.
  """
  while all(child.poll() in (None, 0) for child in children):
    if told:
      return stop(children, told)
    if all(child.poll() == 0 for child in children):
      return 0
    time.sleep(POLL)
  began = time.monotonic()
  while True:
    codes = [child.poll() for child in children]
    failed = [code for code in codes if code]
    is_lost = min(failed) < 0
    waited = time.monotonic() - began
    is_late = PREEMPTED not in failed and waited >= job.grace
    if None not in codes or is_lost or is_late:
      signal_all(children, signal.SIGKILL)
      return outcome(failed)
    if told:
      return stop(children, told)
    time.sleep(POLL)


def stop(children: Sequence[subprocess.Popen], told: Sequence[int]) -> int:
  """Tells all to stop and waits for their states; told again, for nothing."""
  say("told to stop: waiting for saved states")
  signal_all(children, signal.SIGTERM)
  while any(child.poll() is None for child in children):
    if len(told) > 1:
      signal_all(children, signal.SIGKILL)
    time.sleep(POLL)
  codes = [child.poll() for child in children]
  if all(code in FINAL for code in codes):  # they had ended already
    return next((code for code in codes if code), 0)
  return 128 + told[0]


def outcome(codes: Sequence[int]) -> int:
  """One exit code for all that ended by themselves, in some way but well.

  What one that was killed did to the others says nothing; else final codes
  win.

  >>> outcome([2, -9]), outcome([-6, 1]), outcome([143, 143]), outcome([1, 2])
  (137, 134, 143, 2)
  """
  if min(codes) < 0:
    return 128 - min(codes)
  return next((code for code in codes if code in FINAL), codes[0])


def run(job: Job, told: Sequence[int] = ()) -> int:
  """Runs the command to its end, however often it has to start.

  `told` grows by the number of each signal that this launcher gets: a handler
  that raised could do so while a child is being born.
  """
  restarts = 0
  while True:
    children, outputs = start(job)
    code = wait(children, job, told)
    for child, output in zip(children, outputs, strict=True):
      child.wait()
      output.join(5.0)
    if code in FINAL:
      return code
    if told:
      return 128 + told[0]
    if restarts == job.max_restarts:
      say(f"ended with {code}, after {restarts} restarts: giving up")
      return code
    restarts += 1
    say(f"ended with {code}: restart {restarts} of {job.max_restarts}")


def parse(argv: Sequence[str]) -> Job:
  parser = argparse.ArgumentParser(
    prog="launch/processes.py",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  flag = parser.add_argument
  flag("--num_processes", type=int, required=True)
  words = "virtual devices of each, on CPUs"
  flag("--devices_per_process", type=int, help=words)
  flag("--max_restarts", type=int, default=3)
  flag("command", nargs="+", help="behind --")
  options = parser.parse_args(argv)
  if options.num_processes < 1:
    parser.error(f"--num_processes must be 1 or more: {options.num_processes}")
  if options.max_restarts < 0:
    parser.error(f"--max_restarts must be 0 or more: {options.max_restarts}")
  return Job(**vars(options))


def main(argv: Sequence[str] | None = None) -> int:
  job = parse(sys.argv[1:] if argv is None else argv)

  told: list[int] = []
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: told.append(number))
  try:
    return run(job, told)
  except OSError as error:
    say(f"{error.filename or job.command[0]}: {error.strerror}")
    return 2


if __name__ == "__main__":
  sys.exit(main())
