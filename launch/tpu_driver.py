"""Runs the steps of a job: restarts what was preempted, always deletes.

What `synthq` exits with decides: 0 ends the job; 143 means that its state is
saved, and the same command goes on; 2 is a mistake of the user and 3 an audit
that refutes a claim, and neither is tried again. A slice that is no longer READY
was taken away, and is made anew.
"""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import tpu_steps

__all__ = ["LaunchError", "drive"]

_SAVED = 143  # synthq: told to stop, the same command goes on
_LOST = 255  # ssh: no connection, or it broke
_FINAL = {2, 3}
# A worker that dies takes the others with it, and they exit with anything. So
# does a bug: on several hosts it is tried this often, on one host never.
_CRASHES = 3
_EXPECTED = {_SAVED, _LOST}
_SET_UP = ("create", "wait", "copy", "install", "mount")
_GONE = {"FAILED", "SUSPENDING", "SUSPENDED", "DELETING"}
_DELETE_TRIES = 3


class LaunchError(Exception):
  """A job that did not work; its text is one line, `code` the exit code."""

  def __init__(self, message: str, code: int = 1):
    super().__init__(message)
    self.code = code


class _StepFailed(Exception):  # noqa: N818
  """A step of the set-up or the run ended with another code than 0."""

  def __init__(self, step: tpu_steps.Step, code: int):
    super().__init__(f"{step.phase} failed with exit code {code}")
    self.phase, self.code = step.phase, code


def drive(
  job: tpu_steps.Job, *, max_restarts: int = 20, poll_seconds: float = 30.0
) -> None:
  """Runs a job to its end and deletes its slice, whatever happens.

  Args:
    job: the job.
    max_restarts: how often the command or the slice may be started again.
    poll_seconds: between questions for the state, and before a restart.

  Raises:
    LaunchError: if a check refuses the job (nothing was created then), a step
      failed for good, or the slice could not be deleted.
    KeyboardInterrupt: after Ctrl-C, once the slice is deleted.
  """
  steps = tpu_steps.steps(job)
  for step in steps:
    if step.phase == "check":
      _check(job, step)
  for step in steps:
    if step.phase == "pack":
      _must(step)
  results = [step for step in steps if step.phase == "results"]
  with _deleted(job):
    _until_done(job, steps, max_restarts, poll_seconds)
    if not job.bucket:
      for step in results:
        _must(step)
  if job.bucket:
    for step in results:
      _must(step)


# Checks: before anything is paid for.


def _check(job: tpu_steps.Job, step: tpu_steps.Step) -> None:
  """Refuses a job whose check says no."""
  done = _ask(step.argv)
  said = done.stdout.split()
  # The last line of what gcloud says names the reason.
  why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
  problem = ""
  match step.expect:
    case "account" if not said:
      problem = "gcloud has no account: run `gcloud auth login`"
    case "bucket":
      problem = _bucket_problem(job, done, why)
    case "free":
      problem = _name_problem(job, done, why)
    case "tracked" if done.returncode:
      files = " and ".join(job.gin_files)
      problem = f"expected a git checkout with {files}: commit it ({why})"
    case "clean" if said:
      problem = (
        "uncommitted changes would stay behind: commit them, or give"
        " --allow_dirty"
      )
  if problem:
    raise LaunchError(problem, 2)


def _bucket_problem(job, done: subprocess.CompletedProcess, why: str) -> str:
  if done.returncode:
    return (
      f"gs://{job.bucket} cannot be read: {why}; make it with `gcloud storage"
      f" buckets create gs://{job.bucket} --uniform-bucket-level-access"
      " --enable-hierarchical-namespace`, or ask for access"
    )
  if done.stdout.strip().lower() != "true":
    return (
      f"gs://{job.bucket} has no hierarchical namespace, so that renaming a"
      " folder is not atomic there and a saved state could be half a state;"
      " make a bucket with --enable-hierarchical-namespace"
    )
  return ""


def _name_problem(job, done: subprocess.CompletedProcess, why: str) -> str:
  if done.returncode:
    return f"{job.zone} in project {job.project} cannot be asked: {why}"
  if job.name in done.stdout.split():
    return (
      f"{job.name} exists in {job.zone}: choose another --name, or delete it"
      " first (this launcher deletes only what it made)"
    )
  return ""


def _ask(argv: tuple[str, ...], **session) -> subprocess.CompletedProcess:
  return subprocess.run(
    argv, capture_output=True, text=True, check=False, **session
  )


# The run: from create to the end of the last command.


def _until_done(
  job: tpu_steps.Job,
  steps: list[tpu_steps.Step],
  max_restarts: int,
  poll_seconds: float,
) -> None:
  """Sets the slice up and runs the command, again where that helps."""
  set_up = [step for step in steps if step.phase in _SET_UP]
  run, state = (s for s in steps if s.phase in ("run", "state"))
  todo = [*set_up, run]
  crashes = 0
  for restart in range(max_restarts + 1):
    try:
      for step in todo:
        _wait(step, poll_seconds) if step.expect else _do(step)
      return
    except _StepFailed as failed:
      if failed.phase in ("create", "wait"):
        hint = "" if job.queued else "; --queued waits for capacity"
        raise LaunchError(f"{failed}, see above{hint}") from failed
      if failed.phase == "run" and failed.code in _FINAL:
        words = (
          f"synthq ended with exit code {failed.code}, which says why above"
        )
        raise LaunchError(words, failed.code) from failed
      is_there = _ask(state.argv).stdout.strip() == "READY"
      if is_there and failed.phase == "run" and failed.code not in _EXPECTED:
        crashes += 1
      may_crash = _CRASHES if job.slice.hosts > 1 else 0
      if is_there and (failed.phase != "run" or crashes > may_crash):
        raise LaunchError(f"{failed}, see above") from failed
      if restart == max_restarts:
        words = (
          f"{failed} after {max_restarts} restarts; --max_restarts=N allows"
        )
        raise LaunchError(f"{words} more, and the state is saved") from failed
    if is_there:
      _say(f"restart {restart + 1}: the same command goes on")
      todo = [run]
    else:
      _say(f"restart {restart + 1}: the slice was taken away, and is made anew")
      _delete(job)
      todo = [*set_up, run]
    time.sleep(poll_seconds)


def _do(step: tpu_steps.Step) -> None:
  _say(f"{step.phase}: {step.argv[0]} ...")
  code = subprocess.run(step.argv, check=False).returncode
  if code:
    raise _StepFailed(step, code)


def _must(step: tpu_steps.Step) -> None:
  """Runs a step for which there is no second try."""
  try:
    _do(step)
  except _StepFailed as failed:
    raise LaunchError(f"{failed}, see above") from failed


def _wait(step: tpu_steps.Step, poll_seconds: float) -> None:
  """Asks until a queued slice is there."""
  _say("wait: in the queue; Ctrl-C leaves it")
  while True:
    done = _ask(step.argv)
    state = done.stdout.strip()
    if state == "ACTIVE":
      return
    if done.returncode or state in _GONE:
      _say(f"the queue says {state or done.stderr.strip()}")
      raise _StepFailed(step, done.returncode or 1)
    time.sleep(poll_seconds)


# The end: nothing may go on costing money unseen.


@contextlib.contextmanager
def _deleted(job: tpu_steps.Job) -> Iterator[None]:
  """Deletes the slice on the way out, however that is."""
  delete = " ".join(tpu_steps.delete_step(job).argv)
  _say(f"should this machine fail, end the costs with: {delete}")
  try:
    yield
  finally:
    if job.keep:
      _say(f"kept, and costs money until: {delete}")
    else:
      _delete(job)


def _delete(job: tpu_steps.Job) -> None:
  """Deletes the slice; a second Ctrl-C does not stop that."""
  step = tpu_steps.delete_step(job)
  _say("delete: please wait")
  with _deaf():
    for _ in range(_DELETE_TRIES):
      done = _ask(step.argv, start_new_session=True)
      if not done.returncode or "NOT_FOUND" in done.stderr.upper():
        return
  why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
  raise LaunchError(
    f"NOT DELETED, it still costs money ({why}): run {' '.join(step.argv)}"
  )


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
  """Inside, Ctrl-C and other requests to stop wait; they count at the end.

  Commands have to be shielded, too: a terminal tells the whole group.
  """
  came: list[int] = []
  numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
  before = {
    number: signal.signal(number, lambda number, frame: came.append(number))
    for number in numbers
  }
  try:
    yield
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
    if came:
      signal.raise_signal(came[0])


def _say(words: str) -> None:
  # Whoever reads this may be gone; the slice is to be deleted all the same.
  with contextlib.suppress(OSError):
    print(f"tpu_vm: {words}", file=sys.stderr, flush=True)
