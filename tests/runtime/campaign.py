"""Faults of every kind, one after the other: is anything lost, or false?

Makes a small run without disturbance. Then, again and again: cuts a copy of it
back to the beginning of a stage, disturbs that (or its files), looks at what is
left, and has the same command go on, after doing what its message says. Allowed
ends are the undisturbed result, byte for byte but for times, or one line that
says what is broken and what to do, with the ledger intact and no result that
only looks finished; after the advice is followed, the undisturbed result.

  python tests/runtime/campaign.py --hours=3 --out=campaign.jsonl

prints one line per fault and a table of all in the file, with which a second call
goes on; exit code 1 if anything was lost or false.

The data counts as private and the secret is drawn; the 128 bits that each training
draws are the same in all runs, so that noise is no difference between two.
"""

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import importlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [
  str(ROOT),
  str(ROOT / "tests/shared"),
]

import quick_xla  # noqa: E402

from tests.runtime import kills  # noqa: E402

LIMIT = 300.0
"""Seconds after which a run hangs; ten undisturbed ones where that is more."""
_RUNNING = re.compile(r"^\[(\S+)\] running$", re.M)
_FINGERPRINT = re.compile(r"_[0-9a-f]{16}(?![0-9a-f])")
_POINTS = ("replace", "fsync", "rename", "unlink", "mkdir")
_IMPORTED = (
  "flax.linen",
  "mauve",
  "optax",
  "orbax.checkpoint",
  "scipy.optimize",
  "scipy.stats",
  "synthq_jax.report.plots",
)
LOST, FALSE, LATE = "lost", "false", "came too late"
SECRET = "private/secret_seed"


class Wrong(Exception):  # noqa: N818
  """What must not happen; its first word is LOST or FALSE."""


@dataclasses.dataclass
class Child:
  """A run in a process of its own, forked from this one: no import is paid."""

  pid: int
  log: pathlib.Path
  code: int | None = None

  def poll(self) -> int | None:
    if self.code is None:
      pid, status = os.waitpid(self.pid, os.WNOHANG)
      if pid:
        self.code = os.waitstatus_to_exitcode(status)
    return self.code

  def wait(self, seconds: float | None = None) -> int | None:
    seconds = LIMIT if seconds is None else seconds
    end = time.monotonic() + seconds
    while self.poll() is None and time.monotonic() < end:
      time.sleep(0.01)
    return self.code

  def finish(self, seconds: float | None = None) -> int:
    if self.wait(seconds) is None:
      self.kill()
      raise Wrong(f"{FALSE}: hangs for {LIMIT:.0f} s: {self.text()[-300:]}")
    return self.code

  def kill(self, number: int = signal.SIGKILL) -> None:
    if self.poll() is None:
      os.kill(self.pid, number)
      if number == signal.SIGKILL:
        self.wait()

  def text(self) -> str:
    return self.log.read_text(errors="replace")


def fork(call: Callable[[], int], log: pathlib.Path) -> Child:
  """Starts a process that ends with what a function returns."""
  log.write_bytes(b"")  # here: who reads it at once must not see an earlier one
  pid = os.fork()
  if pid:
    return Child(pid, log)
  code = 70
  try:
    stream = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = call()
  except BaseException:
    traceback.print_exc()
  finally:
    sys.stdout.flush()
    os._exit(code)


def synthq(arguments: Sequence[str]) -> int:
  """Runs a command; what its trainings draw are always the same bits."""
  from synthq_jax.cli import main
  from synthq_jax.runtime import release

  release.secrets = types.SimpleNamespace(token_hex=lambda size: "5d" * size)
  return main.main(arguments)


def dies_at(number: int) -> Callable[[], None]:
  """Has the process kill itself before its n-th write, rename or removal."""

  def patch() -> None:
    left = [number]

    def wrapped(call):
      def counted(*args, **named):
        left[0] -= 1
        if not left[0]:
          os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **named)

      return counted

    for name in _POINTS:
      setattr(os, name, wrapped(getattr(os, name)))

  return patch


def another_version() -> None:
  import synthq_jax

  synthq_jax.__version__ = "0.0.1"


class Campaign:
  """The undisturbed run, and copies of it that are disturbed."""

  def __init__(self, folder: pathlib.Path, flags: Sequence[str]):
    folder.mkdir(exist_ok=True)
    self.folder, self.flags = folder, flags
    self.stage = ""
    """Of the last fault; empty: where it was meant to be."""
    self.whole = folder / "whole"
    self.log = folder / "log.txt"
    self.killed: list[tuple[pathlib.Path, str]] = []
    """Copies of what kills left behind, for faults in unfinished work."""
    timing = folder / "timing.json"
    if timing.exists():  # of an earlier call
      self.begins, self.seconds = json.loads(timing.read_text())
    else:
      self.begins, self.seconds = self.timed()
      timing.write_text(json.dumps([self.begins, self.seconds]))
    global LIMIT
    LIMIT = max(LIMIT, 10 * self.seconds)
    self.places = list(self.begins)
    self.content = content_of(self.whole)

  def timed(self) -> tuple[dict[str, float], float]:
    """Runs without disturbance; returns when places began, and the whole."""
    shutil.rmtree(self.whole, ignore_errors=True)
    child = self.run(self.whole)
    began, begins = time.monotonic(), {}
    while child.poll() is None:
      for place in _RUNNING.findall(child.text()) if self.log.exists() else ():
        begins.setdefault(place, time.monotonic() - began)
      time.sleep(0.02)
    if child.code:
      raise RuntimeError(f"the undisturbed run failed:\n{child.text()}")
    return begins, time.monotonic() - began

  # What a fault needs.

  def length(self, place: str) -> float:
    """Seconds that a place took."""
    ends = [*self.begins.values(), self.seconds]
    at = self.places.index(place)
    return ends[at + 1] - ends[at]

  def cut(self, root: pathlib.Path, place: str) -> None:
    """Copies the run as it was when a place began."""
    shutil.copytree(self.whole, root, dirs_exist_ok=True)
    later = self.places[self.places.index(place) :]
    for one in later:
      for folder in (root / one, root / "private" / one):
        shutil.rmtree(folder, ignore_errors=True)
    for name in ("ledger.jsonl", "ledger_copy.jsonl"):
      path = root / "private" / name
      if not path.exists():
        continue
      lines = path.read_text().splitlines(keepends=True)
      kept = [
        line
        for line in lines
        if not json.loads(line)["identifier"].startswith(
          tuple(f"{one}/" for one in later)
        )
      ]
      path.write_text("".join(kept)) if kept else path.unlink()

  def run(
    self, root: pathlib.Path, before: Callable[[], None] = lambda: None
  ) -> Child:
    arguments = ["run", "--quiet", f"--workdir={root}", *self.flags]

    def call() -> int:
      before()
      return synthq(arguments)

    return fork(call, self.log)

  def until_running(self, child: Child) -> None:
    """Waits until a stage has begun: before that a kill hits imports alone."""
    end = time.monotonic() + LIMIT
    while child.poll() is None and time.monotonic() < end:
      if self.log.exists() and _RUNNING.search(child.text()):
        return
      time.sleep(0.01)

  # What must hold.

  def hold(
    self,
    root: pathlib.Path,
    begun: set[str],
    but: Sequence[str] = (),
    other_version: bool = False,
  ) -> None:
    """Holds that nothing was lost, and that what looks finished is so."""
    if lost := begun - entries(root):
      raise Wrong(f"{LOST}: the ledger forgot {sorted(lost)}")
    if other_version:
      return
    found = content_of(root)
    done = [
      n.removesuffix("result.json") for n in found if n.endswith("/result.json")
    ]
    for name, content in found.items():
      public = name.removeprefix("private/")
      places = [
        d for d in done if public.startswith(d.removeprefix("private/"))
      ]
      if not places or name in but or _FINGERPRINT.search(name):
        continue
      if content != self.content.get(name):
        raise Wrong(f"{FALSE}: {places[0]} looks finished, and {name} differs")

  def refused(self, child: Child) -> str:
    """Returns the line with which a run must have ended."""
    text = child.text()
    lines = [
      line
      for line in text.splitlines()
      if line.startswith("synthq: ") and not line.startswith("synthq: note: ")
    ]
    if "Traceback" in text or len(lines) != 1 or child.code not in (2, 75):
      raise Wrong(f"{FALSE}: code {child.code}, said {text[-600:]!r}")
    return lines[0]

  def finish(
    self,
    root: pathlib.Path,
    begun: set[str],
    damaged: Sequence[str] = (),
    other_version: bool = False,
  ) -> str:
    """Goes on until the run ends; follows what it says; compares."""
    outcome = "undisturbed"
    for _ in range(4):
      child = self.run(root)
      if child.finish() == 0:
        break
      line = self.refused(child)
      self.hold(root, begun, damaged, other_version)
      outcome = "one line"
      self.follow(root, line, damaged)
    else:
      raise Wrong(f"{FALSE}: the advice helps nothing: {child.text()[-500:]!r}")
    self.compare(root, other_version)
    return outcome

  def follow(
    self, root: pathlib.Path, line: str, damaged: Sequence[str]
  ) -> None:
    """Does what a message says: restores, puts a copy in place, or deletes."""
    if found := re.search(r"put (\S+) in its place", line):
      copy = pathlib.Path(found[1])
      shutil.copy(copy, copy.with_name("ledger.jsonl"))
    elif found := re.search(r"[Dd]elete (/.+)", line):
      doomed = named(found[1])
      if doomed is None or not doomed.is_relative_to(root):
        raise Wrong(f"{FALSE}: advice names nothing that is there: {line}")
      shutil.rmtree(doomed) if doomed.is_dir() else doomed.unlink()
    elif "restore" in line and damaged:
      for name in damaged:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.whole / name, root / name)
    else:
      raise Wrong(f"{FALSE}: no advice: {line}")

  def compare(self, root: pathlib.Path, other_version: bool = False) -> None:
    """Holds that a finished run is the undisturbed one."""
    found = content_of(root)
    wrong = []
    for name in sorted(found.keys() | self.content.keys()):
      if found.get(name) == self.content.get(name):
        continue
      is_extra = name not in self.content and _FINGERPRINT.search(name)
      # More trainings were begun, and the page counts them.
      counts = name.startswith(("private/ledger", "private/report", "report/"))
      if not (other_version and (is_extra or counts)):
        wrong.append(name)
    if wrong:
      raise Wrong(f"{LOST}: {len(wrong)} files differ: {', '.join(wrong[:4])}")
    if missing := entries(self.whole) - entries(root):
      raise Wrong(f"{LOST}: the ledger forgot {sorted(missing)}")


def named(text: str) -> pathlib.Path | None:
  """The path with which a text begins, of those that are there the longest."""
  words = text.split(" ")
  for number in range(len(words), 0, -1):
    path = pathlib.Path(" ".join(words[:number]).rstrip(",;:"))
    if path.exists():
      return path
  return None


def content_of(root: pathlib.Path) -> dict[str, bytes]:
  """What a run left, but for times and for how many processes wrote a block."""
  found = kills.files(root)
  for name in found:
    if re.fullmatch(r"block_\d+\.json", name.rpartition("/")[2]):
      with contextlib.suppress(ValueError):
        content = json.loads(found[name])
        content.pop("num_shards", None)
        found[name] = json.dumps(content).encode()
  return found


def entries(root: pathlib.Path) -> set[str]:
  """The trainings that the ledger or its copy still knows."""
  found = set()
  for name in ("ledger.jsonl", "ledger_copy.jsonl"):
    path = root / "private" / name
    for line in path.read_bytes().splitlines() if path.exists() else ():
      with contextlib.suppress(ValueError, KeyError, TypeError):
        found.add(json.loads(line)["identifier"])
  return found


# The faults: each disturbs a directory and returns how that ended.


def killed(one: Campaign, root, place, rng, *, times=1, before=None) -> str:
  one.cut(root, place)
  begun, struck = set(), 0
  for _ in range(times):
    child = one.run(root, *([before] if before else []))
    one.until_running(child)
    child.wait(rng.uniform(0, 1.1 * one.length(place) + 0.05))
    child.kill()
    struck += child.code == -signal.SIGKILL
    begun |= entries(root)
    one.hold(root, begun)
  if struck and rng.random() < 0.3:
    keep(one, root, place)
  return one.finish(root, begun) if struck else LATE


def killed_twice(one, root, place, rng) -> str:
  return killed(one, root, place, rng, times=2)


def killed_at_a_write(one: Campaign, root, place, rng) -> str:
  one.cut(root, place)
  child = one.run(root, dies_at(1 + int(rng.expovariate(1 / 25))))
  child.finish()
  begun = entries(root)
  one.hold(root, begun)
  if child.code == -signal.SIGKILL:
    if rng.random() < 0.3:
      keep(one, root, place)
    return one.finish(root, begun)
  return LATE


def keep(one: Campaign, root: pathlib.Path, place: str) -> None:
  """Keeps what a kill left, for later faults in its files."""
  copy = one.folder / f"killed_{len(one.killed) % 6}"
  shutil.rmtree(copy, ignore_errors=True)
  shutil.copytree(root, copy)
  one.killed = [x for x in one.killed if x[0] != copy] + [(copy, place)]


def told_to_stop(one: Campaign, root, place, rng) -> str:
  one.cut(root, place)
  child = one.run(root)
  one.until_running(child)
  child.wait(rng.uniform(0, one.length(place)))
  number, code = rng.choice([(signal.SIGTERM, 143), (signal.SIGINT, 130)])
  child.kill(number)
  if child.finish() == 0:
    return LATE
  if child.code == -number and "run finished: " in child.text():
    one.compare(root)  # it had ended, and Python was leaving
    return LATE
  if child.code != code or "Traceback" in child.text():
    raise Wrong(f"{FALSE}: code {child.code}, said {child.text()[-600:]!r}")
  begun = entries(root)
  one.hold(root, begun)
  return one.finish(root, begun)


def damage(one: Campaign, root, place, rng, change) -> str:
  """Damages one file of a finished, a cut or a killed run."""
  source = rng.choice(["whole", "cut", "killed"])
  if source == "killed" and one.killed:
    copy, place = rng.choice(one.killed)
    shutil.copytree(copy, root, dirs_exist_ok=True)
  elif source == "cut":
    one.cut(root, place)
  else:
    shutil.copytree(one.whole, root, dirs_exist_ok=True)
  begun = entries(root)
  names = [
    path.relative_to(root).as_posix()
    for path in sorted(root.rglob("*"))
    if path.is_file() and path.stat().st_size
  ]
  if not begun and SECRET in names and change is _removed:
    names.remove(SECRET)  # another is drawn, and nothing was lost
  if not names:
    return LATE
  name = rng.choice(names)
  parts = name.removeprefix("private/").split("/")
  one.stage = parts[0] if parts[1:] else name.removeprefix("private/")
  whole = (root / name).read_bytes()
  if not change(root / name, whole, rng):
    return LATE
  try:
    outcome = one.finish(root, begun, [name])
  except Wrong as error:
    raise Wrong(f"{error} [{name}]") from error
  return outcome


def _removed(path, whole, rng) -> bool:
  path.unlink()
  return True


def _cut_short(path, whole, rng) -> bool:
  path.write_bytes(whole[: rng.randrange(len(whole))])
  return True


def _flipped(path, whole, rng) -> bool:
  at = rng.randrange(len(whole))
  changed = whole[at] ^ (1 << rng.randrange(8))
  path.write_bytes(whole[:at] + bytes([changed]) + whole[at + 1 :])
  return True


def file_removed(one, root, place, rng) -> str:
  return damage(one, root, place, rng, _removed)


def file_truncated(one, root, place, rng) -> str:
  return damage(one, root, place, rng, _cut_short)


def byte_flipped(one, root, place, rng) -> str:
  return damage(one, root, place, rng, _flipped)


def two_runs(one: Campaign, root, place, rng) -> str:
  one.cut(root, place)
  first = one.run(root)
  time.sleep(rng.uniform(0, one.length(place)))
  flags = ["run", "--quiet", f"--workdir={root}", *one.flags]
  second = fork(lambda: synthq(flags), one.log.with_name("second.txt"))
  codes = {first.finish(), second.finish()}
  if codes == {0}:  # one after the other
    one.compare(root)
    return "undisturbed"
  if codes != {0, 2}:
    raise Wrong(f"{FALSE}: codes {codes}: {second.text()[-400:]!r}")
  one.refused(first if first.code else second)
  one.compare(root)
  return "one line"


def moved(one: Campaign, root, place, rng) -> str:
  """Another path after a kill; a copy goes on elsewhere."""
  one.cut(root, place)
  child = one.run(root)
  one.until_running(child)
  child.wait(rng.uniform(0, one.length(place)))
  child.kill()
  begun = entries(root)
  other = root.with_name("elsewhere")
  shutil.rmtree(other, ignore_errors=True)
  move = rng.choice([shutil.copytree, shutil.move])
  move(root, other)
  one.hold(other, begun)
  outcome = one.finish(other, begun)
  shutil.rmtree(other)
  return outcome


def version_between(one: Campaign, root, place, rng) -> str:
  """An older version of the package begins over what is there, and is killed."""
  shutil.copytree(one.whole, root, dirs_exist_ok=True)
  child = one.run(root, another_version)
  one.until_running(child)
  child.wait(rng.uniform(0, 0.7 * one.seconds))
  child.kill()
  begun = entries(root)
  one.hold(root, begun, other_version=True)
  return one.finish(root, begun, other_version=True)


FAULTS = {
  killed: 4,
  killed_twice: 2,
  killed_at_a_write: 4,
  told_to_stop: 2,
  file_removed: 3,
  file_truncated: 3,
  byte_flipped: 4,
  two_runs: 1,
  moved: 1,
  version_between: 1,
}
"""How often each is taken."""
QUICK = (
  "--gin.plan.Rows.original=False",
  "--gin.plan.Rows.direct_dp=()",
  "--gin.LTR=()",
  "--gin.ADAPTED=()",
)
"""Fewer rows, whose code is that of the others."""


def table(records: Sequence[dict]) -> str:
  """Counts by kind of fault, and by stage; what came too late is no fault."""
  late = sum(record["outcome"] == LATE for record in records)
  struck = [record for record in records if record["outcome"] != LATE]
  wrong = [record for record in struck if record["outcome"] in (LOST, FALSE)]
  lines = []
  for column in ("fault", "stage"):
    counts: dict[str, collections.Counter] = {}
    for record in struck:
      row = counts.setdefault(record[column], collections.Counter())
      row[record["outcome"]] += 1
    kinds = sorted({k for row in counts.values() for k in row})
    lines.append(
      f"{column:20}" + "".join(f"{k:>15}" for k in ["faults", *kinds])
    )
    for name, row in sorted(counts.items()):
      cells = [row.total(), *(row[k] for k in kinds)]
      lines.append(f"{name:20}" + "".join(f"{cell:>15}" for cell in cells))
    lines.append("")
  seconds = sum(record["seconds"] for record in records)
  lines += [
    f"{one['fault']} in {one['stage']}: {one['words']}" for one in wrong
  ]
  lines.append(
    f"{len(struck)} faults, {late} more came too late, {seconds / 3600:.2f} h,"
    f" {len(wrong)} wrong"
  )
  return "\n".join(lines)


def small_run(folder: pathlib.Path) -> list[str]:
  """Writes what the run reads, in a process that may start JAX; returns flags."""
  code = (
    "import pathlib, random_t5, small_data\n"
    f"folder = pathlib.Path({str(folder)!r})\n"
    "small_data.write_pairs(folder / 'pairs.jsonl', 60)\n"
    "random_t5.save(folder / 't5')"
  )
  shutil.rmtree(folder / "run", ignore_errors=True)  # of a call that was killed
  paths = [str(ROOT), str(ROOT / "tests" / "shared")]
  environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
  if not (folder / "t5" / "config.json").exists():
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
  return [
    f"--gin_file={kills.RECIPE}",
    f"--gin.SOURCE=jsonl:{folder / 'pairs.jsonl'}",
    f"--gin.CHECKPOINT={folder / 't5'}",
    "--gin.SECRET_SEED=None",
    "--gin.prepare_data.Config.public_test_documents=20",
    "--gin.NUM_DOCUMENTS=24",
    "--gin.TRAIN_STEPS=4",
    "--gin.RETRIEVER_STEPS=4",
    "--gin.DIRECT_STEPS=4",
    "--gin.generate.Config.max_length=6",
    "--gin.plan.Rows.public_only=False",
    "--gin.plan.Canaries.number=0",
    "--gin.loop.Settings.save_seconds=0.0",  # a state after every step
  ]


def prepare(folder: pathlib.Path) -> None:
  """Imports what runs need, and starts nothing: children are forked."""
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
  os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"
  quick = " ".join(quick_xla.FLAGS)
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick}"
  from synthq_jax import stages
  from synthq_jax.cli import main
  from synthq_jax.generation import mauve
  from synthq_jax.stages import plan

  del main, plan
  for name in stages.SUMMARIES:
    stages.get(name)
  for name in _IMPORTED:  # later, by stages
    if name != "mauve" or mauve.is_installed():
      importlib.import_module(name)
  from synthq_jax.privacy import accounting

  for name in ("_calibrate", "_compute_epsilon", "_compute_group_epsilon"):
    known = remembered(getattr(accounting, name), folder / f"known{name}")
    setattr(accounting, name, known)


def remembered(
  function: Callable[..., float], folder: pathlib.Path
) -> Callable[..., float]:
  """Keeps numbers of the accountant for later runs: a third of their time."""
  folder.mkdir(exist_ok=True)

  def known(*args):
    path = folder / hashlib.sha256(repr(args).encode()).hexdigest()
    if not path.exists():
      own = path.with_name(f"{path.name}.{os.getpid()}")
      own.write_text(repr(function(*args)))
      own.rename(path)
    return float(path.read_text())

  return known


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--hours", type=float, default=0.08)
  parser.add_argument(
    "--faults", type=int, default=10**9, help="at most, but for those too late"
  )
  parser.add_argument("--out", default="", help="JSON lines; goes on with them")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument(
    "--only",
    default="",
    help="kinds of faults in turn, as KIND or KIND:STAGE, with commas between",
  )
  parser.add_argument(
    "--folder", default="", help="keeps the undisturbed runs for the next call"
  )
  parser.add_argument(
    "--quick",
    action="store_true",
    help="few rows, and no run before that compiles",
  )
  options = parser.parse_args(argv)
  out = pathlib.Path(options.out) if options.out else None
  records = []
  if out and out.exists():
    records = [json.loads(line) for line in out.read_text().splitlines()]
  end = time.monotonic() + 3600 * options.hours
  with contextlib.ExitStack() as stack:
    made = tempfile.TemporaryDirectory(prefix="campaign-")
    folder = pathlib.Path(
      options.folder or stack.enter_context(made)
    ).absolute()
    folder.mkdir(exist_ok=True)
    prepare(folder)
    flags = [*small_run(folder), *(QUICK if options.quick else ())]
    warm = ["run", "--quiet", f"--workdir={folder / 'warm'}", *flags]
    is_there = options.folder and (folder / "warm").exists()
    if not is_there and not options.quick:  # compiles: no kill comes too late
      fork(lambda: synthq(warm), folder / "log.txt").finish(3600)
    one = Campaign(folder, flags)
    print(f"undisturbed: {one.seconds:.1f} s, {len(one.content)} files")
    faults = dict(FAULTS)
    only = [word.partition(":") for word in options.only.split(",") if word]
    number, is_over = 0, False
    while not is_over:
      rng = random.Random(f"{options.seed} {len(records)}")
      fault = rng.choices([*faults], [*faults.values()])[0]
      stage = ""
      if only:
        name, _, stage = only[number % len(only)]
        [fault] = [f for f in faults if f.__name__ == name]
      records.append(strike(one, fault, rng, stage))
      record = records[-1]
      number += record["outcome"] != LATE
      is_over = number >= options.faults or time.monotonic() >= end
      print(" ".join(f"{v}" for v in record.values()), flush=True)
      if out:
        with out.open("a") as stream:
          stream.write(json.dumps(record) + "\n")
  print(table(records))
  return int(any(r["outcome"] in (LOST, FALSE) for r in records))


def saved(root: pathlib.Path) -> pathlib.Path:
  """Copies what must not be, for a look at it."""
  copy = pathlib.Path(tempfile.mkdtemp(prefix="wrong-"))
  if root.exists():
    shutil.copytree(
      root, copy, dirs_exist_ok=True, ignore_dangling_symlinks=True
    )
  return copy


def strike(one: Campaign, fault, rng: random.Random, stage: str = "") -> dict:
  """Has one fault happen in a fresh copy; returns what to note of it."""
  stages = sorted({name.partition("/")[0] for name in one.places})
  stage = stage or rng.choice(stages)
  root = one.folder / "run"
  place = rng.choice([n for n in one.places if n.partition("/")[0] == stage])
  began, words, one.stage = time.monotonic(), "", ""
  try:
    outcome = fault(one, root, place, rng)
  except Wrong as error:
    outcome, words = str(error).partition(":")[0], str(error)
    kept = saved(root)
    with contextlib.suppress(OSError):
      shutil.copy(one.log, kept / "campaign_log.txt")
    words = f"{words} (kept in {kept})"
  finally:
    shutil.rmtree(root, ignore_errors=True)
  return {
    "fault": fault.__name__,
    "stage": one.stage or stage,
    "outcome": outcome,
    "seconds": round(time.monotonic() - began, 1),
    "words": words,
  }


if __name__ == "__main__":
  sys.exit(main())
