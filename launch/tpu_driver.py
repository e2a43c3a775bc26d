"""Runs the steps of a job: restarts what was preempted, always deletes.

What `synthq` exits with decides: 0 ends the job; 143 means that its state is
saved, and 75 that the system failed it in passing, and the same command goes on;
2 is a mistake of the user and 3 an audit that refutes a claim, and neither is
tried again. A slice that is no longer READY was taken away, and is made anew; one
whose state gcloud cannot tell may well be there, and is asked for again.
"""

import contextlib
import dataclasses
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import tpu_steps
import tpu_types

__all__ = ["LaunchError", "drive"]

_SAVED = 143  # synthq: told to stop, the same command goes on
_LOST = 255  # ssh: no connection, or it broke; or a worker without its mount
_PASSING = 75  # synthq: a stale file handle, a broken pipe, an I/O error
_FINAL = {2, 3}
# A worker that dies takes the others with it, and they exit with anything. So
# does a bug: on several hosts it is tried this often, on one host never.
_CRASHES = 3
# A lock of apt, a package index, a copy that broke: gone when tried again.
_SET_UP_TRIES = 4
_EXPECTED = {_SAVED, _LOST, _PASSING}
_MAKE = ("create", "wait")
_SET_UP = ("copy", "install", "mount")
_GONE = {"", "FAILED", "SUSPENDING", "SUSPENDED", "DELETING"}
_QUESTIONS = 120  # an hour without a network, at 30 seconds each
_DELETE_TRIES = 5
# Waits double, up to this many times --poll_seconds.
_LONGEST = 32


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


@dataclasses.dataclass
class _Made:
  """State of a slice that this launcher made; nobody else's is deleted.

  A create that fails may have been heard, and its slice may even come after a
  delete found nothing: then `unsure` is left, and the slice is ours.
  """

  maybe: bool = False  # a create here may have made it
  unsure: bool = False  # the last create failed


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
    KeyboardInterrupt: after Ctrl-C, once the slice is deleted; one that was
      there before stays, and the job on it is told to save its state.
  """
  steps = tpu_steps.steps(job)
  for step in steps:
    if step.phase == "check":
      _check(job, step)
  for step in steps:
    if step.phase == "pack":
      _must(step)
  results = [step for step in steps if step.phase == "results"]
  created = _Made()
  with _stopped(job) if job.attach else _deleted(job, created, poll_seconds):
    _until_done(job, steps, created, max_restarts, poll_seconds)
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
  accounts = done.stdout.split()
  why = _why(done)
  problem = ""
  match step.expect:
    case "account" if not accounts:
      problem = "gcloud has no account: run `gcloud auth login`"
    case "bucket":
      problem = _bucket_problem(job, done, why)
    case "free":
      problem = _name_problem(job, done, why)
    case "there":
      problem = _slice_problem(job, done, why)
    case "tracked" if done.returncode:
      files = " and ".join(job.gin_files)
      problem = f"expected a git checkout with {files}: commit it ({why})"
    case "clean" if accounts:
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


def _slice_problem(job, done: subprocess.CompletedProcess, why: str) -> str:
  """Refuses a slice that is not there, at work or of the type that was said."""
  if done.returncode:
    return (
      f"--attach={job.attach} is no slice in {job.zone}, project {job.project}:"
      f" {why}; `gcloud compute tpus tpu-vm list --zone={job.zone}` names them"
      " (of a queued resource: its node id)"
    )
  state, kind = (*done.stdout.split(), "", "")[:2]
  if state != "READY":
    return f"--attach={job.attach} is {state or 'unknown'}: wait until READY"
  if not _is_of_type(kind, job):
    return (
      f"--attach={job.attach} is {kind}, got --accelerator={job.accelerator}:"
      f" give --accelerator={kind}"
    )
  return ""


def _is_of_type(kind: str, job: tpu_steps.Job) -> bool:
  """Whether gcloud's name of a type is what the job was checked against."""
  if kind == job.accelerator:
    return True
  try:
    other = tpu_types.describe(kind)
  except ValueError:  # of a shape of its own, which has no such name here
    return "x" in job.accelerator and kind.startswith(job.slice.generation)
  return (other.generation, other.chips) == (
    job.slice.generation,
    job.slice.chips,
  )


def _ask(argv: tuple[str, ...], **session) -> subprocess.CompletedProcess:
  return subprocess.run(
    argv, capture_output=True, text=True, check=False, **session
  )


def _why(done: subprocess.CompletedProcess) -> str:
  """The last line of what gcloud says, which names the reason."""
  return (done.stderr.strip().splitlines() or ["no reason given"])[-1]


def _is_missing(done: subprocess.CompletedProcess) -> bool:
  return bool(done.returncode) and "NOT_FOUND" in done.stderr.upper()


# The run: from create to the end of the last command.


def _until_done(
  job: tpu_steps.Job,
  steps: list[tpu_steps.Step],
  created: _Made,
  max_restarts: int,
  poll_seconds: float,
) -> None:
  """Sets the slice up and runs the command, again where that helps."""
  make = [step for step in steps if step.phase in _MAKE]
  set_up = [step for step in steps if step.phase in _SET_UP]
  run, state = (s for s in steps if s.phase in ("run", "state"))
  todo = [*make, *set_up, run]
  failures: list[_StepFailed] = []
  crashes = refusals = 0
  while failed := _first_failure(todo, created, poll_seconds):
    failures.append(failed)
    if failed.phase == "run" and failed.code in _FINAL:
      words = f"synthq ended with exit code {failed.code}, which says why above"
      raise LaunchError(words, failed.code) from failed
    refused = failed.phase in _MAKE
    refusals = refusals + 1 if refused else 0
    is_there = not refused and _answer(state, poll_seconds) == "READY"
    crashes += (
      is_there and failed.phase == "run" and failed.code not in _EXPECTED
    )
    _check_hope(job, failures, crashes, is_there)
    restart = len(failures)
    if restart > max_restarts:
      words = f"{failed} after {max_restarts} restarts; --max_restarts=N allows"
      raise LaunchError(f"{words} more, and the state is saved") from failed
    if not is_there and job.attach:
      raise LaunchError(
        f"{job.attach} is no longer READY, and is not this launcher's to make"
        " anew; the state is saved, and the same command goes on from it"
      ) from failed
    if not is_there:
      lost = "was not made" if refused else "was taken away"
      _say(f"restart {restart}: the slice {lost}, and is made anew")
      _delete(job, created, poll_seconds)
      todo = [*make, *set_up, run]
    elif failed.phase in ("mount", "run"):
      _say(f"restart {restart}: the same command goes on")
      # A worker that was started again has lost its mount.
      todo = [step for step in (*set_up, run) if step.phase in ("mount", "run")]
    else:
      _say(f"restart {restart}: {failed}, the slice is set up again")
      todo = [*set_up, run]
    time.sleep(poll_seconds * min(2 ** max(refusals - 1, 0), _LONGEST))


def _check_hope(
  job: tpu_steps.Job, failures: list[_StepFailed], crashes: int, is_there: bool
) -> None:
  """Refuses to go on after what another try would not mend."""
  failed = failures[-1]
  # What has worked once works again when the cloud or the network does.
  if all(failure.phase in _MAKE for failure in failures):
    hint = "" if job.queued else "; --queued waits for capacity"
    raise LaunchError(f"{failed}, see above{hint}") from failed
  same = itertools.takewhile(
    lambda failure: failure.phase == failed.phase and failure.code != _LOST,
    reversed(failures),
  )
  tries = len(list(same)) if failed.phase in _SET_UP else 0
  if is_there and tries >= _SET_UP_TRIES:
    words = f"{failed}, tried {_SET_UP_TRIES} times, see above"
    raise LaunchError(words) from failed
  if crashes > (_CRASHES if job.slice.hosts > 1 else 0):
    raise LaunchError(f"{failed}, see above") from failed


def _first_failure(
  todo: list[tpu_steps.Step], created: _Made, poll_seconds: float
) -> _StepFailed | None:
  """Runs steps until one fails, and returns how it did."""
  try:
    for step in todo:
      match step.phase:
        case "create":
          _create(step, created)
        case "wait":
          _wait(step, poll_seconds)
        case _:
          _do(step)
  except _StepFailed as failed:
    return failed
  return None


def _create(step: tpu_steps.Step, created: _Made) -> None:
  """Makes the slice, unless there is one of that name that is not ours."""
  _say(f"create: {step.argv[0]} ...")
  earlier = created.unsure
  created.maybe = created.unsure = True  # whatever ends this before gcloud does
  done = subprocess.run(
    step.argv, stderr=subprocess.PIPE, text=True, check=False
  )
  with contextlib.suppress(OSError):
    print(done.stderr, end="", file=sys.stderr, flush=True)
  if not done.returncode:
    created.unsure = False
    return
  message = done.stderr.upper().replace(" ", "_")
  if "ALREADY_EXISTS" in message and not earlier:
    created.maybe = created.unsure = False
    raise LaunchError(
      "a slice or request of that name exists and was not made here: choose"
      f" another --name; nothing was deleted ({_why(done)})",
      2,
    )
  raise _StepFailed(step, done.returncode)


def _answer(step: tpu_steps.Step, poll_seconds: float) -> str:
  """Asks for a state until gcloud knows it; "" says that there is nothing.

  Without a network gcloud fails, too, and the slice may be there and at work.
  """
  for question in range(_QUESTIONS):
    done = _ask(step.argv)
    state = done.stdout.strip()
    if state and not done.returncode:
      return state
    if _is_missing(done):
      return ""
    if not question:
      _say(f"no answer ({_why(done)}): asks again, the slice may be there")
    time.sleep(poll_seconds)
  raise LaunchError(f"no answer to {_QUESTIONS} questions ({_why(done)})")


def _do(step: tpu_steps.Step) -> None:
  _say(f"{step.phase}: {step.argv[0]} ...")
  umask = 0o077 if step.private else -1  # -1: as it is
  code = subprocess.run(step.argv, check=False, umask=umask).returncode
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
  while (state := _answer(step, poll_seconds)) != "ACTIVE":
    if state in _GONE:
      _say(f"the queue says {state or 'that there is no such request'}")
      raise _StepFailed(step, 1)
    time.sleep(poll_seconds)


# The end: nothing may go on costing money unseen, or work on another's slice.


@contextlib.contextmanager
def _stopped(job: tpu_steps.Job) -> Iterator[None]:
  """Tells the job on a slice that stays to end, where this launcher ends early."""
  _say(f"{job.attach} was there before, and stays")
  try:
    yield
  except BaseException:
    _say("stop: the job saves its state")
    step = tpu_steps.stop_step(job)
    with _deaf():
      done = _ask(step.argv, start_new_session=True)
    if done.returncode:
      _say(f"NOT STOPPED ({_why(done)}): run {' '.join(step.argv)}")
    raise


@contextlib.contextmanager
def _deleted(
  job: tpu_steps.Job, created: _Made, poll_seconds: float
) -> Iterator[None]:
  """Deletes the slice on the way out, however that is, if it is ours."""
  delete = " ".join(tpu_steps.delete_step(job).argv)
  _say(f"should this machine fail, end the costs with: {delete}")
  try:
    yield
  finally:
    if created.maybe and job.keep:
      _say(f"kept, and costs money until: {delete}")
    elif created.maybe:
      _delete(job, created, poll_seconds)


def _delete(job: tpu_steps.Job, created: _Made, poll_seconds: float) -> None:
  """Deletes the slice; a second Ctrl-C does not stop that."""
  step = tpu_steps.delete_step(job)
  _say("delete: please wait")
  with _deaf():
    for attempt in range(_DELETE_TRIES):
      done = _ask(step.argv, start_new_session=True)
      if not done.returncode or _is_missing(done):
        created.unsure = created.unsure and bool(done.returncode)
        created.maybe = created.unsure
        return
      if attempt < _DELETE_TRIES - 1:  # a network needs time to come back
        _say(f"not deleted yet ({_why(done)}): tries again")
        time.sleep(poll_seconds * 2**attempt)
  raise LaunchError(
    f"NOT DELETED, it still costs money ({_why(done)}): run"
    f" {' '.join(step.argv)}"
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
