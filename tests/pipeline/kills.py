"""kill -9 at random moments, started again each time: is the end the same?

Runs a recipe once without disturbance and once killed again and again, then
compares everything the two left behind: checkpoints, queries, run files, the
numbers of the report, the ledger. Times are the only thing that may differ.

  python tests/pipeline/kills.py --kills=20

prints one line per kill (when, and in which stage) and the count; exit code 1
and the names of the files if anything differs. Give a `--delay` above the time
of prepare_data, which starts over, or no run gets past it.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

RECIPE = pathlib.Path(__file__).with_suffix(".gin")
ROOT = pathlib.Path(__file__).resolve().parents[2]
TIMES = re.compile(r"\b(\d+ h )?(\d+ min )?\d+(\.\d+)? (s|min|h)\b")
NO_RESULT = {".lock"}
"""Files that say who is running."""


@dataclasses.dataclass(frozen=True)
class Kill:
  """One kill."""

  seconds: float
  """After the start of the process."""
  stage: str
  """What was running; empty: nothing yet."""


def start(workdir: pathlib.Path, flags: Sequence[str]) -> subprocess.Popen:
  """Starts a run as a process of its own."""
  command = [sys.executable, "-m", "synthq_jax.cli.main", "run", "--quiet"]
  command += [f"--workdir={workdir}", *flags]
  environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
  log = open(workdir.with_suffix(".log"), "w+")
  return subprocess.Popen(
    command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT
  )


def log_of(workdir: pathlib.Path) -> str:
  return workdir.with_suffix(".log").read_text()


def finish(workdir: pathlib.Path, flags: Sequence[str]) -> float:
  """Runs to the end; returns the seconds it took."""
  began = time.monotonic()
  if start(workdir, flags).wait():
    raise RuntimeError(f"the run failed:\n{log_of(workdir)}")
  return time.monotonic() - began


def kill_again_and_again(
  workdir: pathlib.Path,
  flags: Sequence[str],
  *,
  kills: int,
  delay: float,
  rng: random.Random,
) -> list[Kill]:
  """Starts a run `kills` times and kills it, at the latest after `delay`.

  A run that finishes before it is killed starts from an empty directory again,
  so that every kill interrupts something; the caller finishes the last one.
  """
  done: list[Kill] = []
  while len(done) < kills:
    # Once a stage runs: before that a kill only interrupts imports.
    process, began = start(workdir, flags), time.monotonic()
    wait = rng.uniform(0, delay)
    while "running" not in log_of(workdir) and process.poll() is None:
      time.sleep(0.02)
    try:
      process.wait(wait)
    except subprocess.TimeoutExpired:
      process.send_signal(signal.SIGKILL)
      process.wait()
      stages = re.findall(r"\[(\S+)\] running", log_of(workdir))
      killed = Kill(time.monotonic() - began, stages[-1] if stages else "")
      done.append(killed)
      print(f"kill {len(done)}: {killed.seconds:.1f} s, {killed.stage}")
      continue
    if process.returncode:
      raise RuntimeError(f"the run failed:\n{log_of(workdir)}")
    workdir.rename(workdir.with_name(f"{workdir.name}_done{len(done)}"))
  return done


def content(path: pathlib.Path) -> bytes:
  """What has to be equal: everything but times."""
  data = path.read_bytes()
  try:
    return _timeless(path, data)
  except Exception:  # damaged: as it is
    return data


def _timeless(path: pathlib.Path, data: bytes) -> bytes:
  if path.name == "result.json":
    return json.dumps(_without_times(json.loads(data))).encode()
  if path.name == "files.json":  # digests of files that hold times
    return json.dumps(sorted(json.loads(data)["files"])).encode()
  if path.suffix in (".html", ".md"):
    return TIMES.sub("TIME", data.decode()).encode()
  if path.suffix == ".npz":
    return _arrays(path)  # the archive holds the time of writing
  return data


def _without_times(value):
  if isinstance(value, dict):
    timed = ("seconds", "checksum")
    return {k: _without_times(v) for k, v in value.items() if k not in timed}
  if isinstance(value, list):
    return [_without_times(v) for v in value]
  return value


def _arrays(path: pathlib.Path) -> bytes:
  import numpy as np

  with np.load(path) as arrays:
    parts = [
      f"{k} {v.dtype} {v.shape}".encode() + v.tobytes()
      for k, v in arrays.items()
    ]
  return b"".join(parts)


def files(workdir: pathlib.Path) -> dict[str, bytes]:
  """The contents of everything that a run left behind, by path."""
  return {
    path.relative_to(workdir).as_posix(): content(path)
    for path in sorted(workdir.rglob("*"))
    if path.is_file() and path.name not in NO_RESULT
  }


def differences(one: pathlib.Path, other: pathlib.Path) -> list[str]:
  """Names the files that are not equal, or are only in one of the two."""
  ours, theirs = files(one), files(other)
  names = sorted(ours.keys() | theirs.keys())
  return [name for name in names if ours.get(name) != theirs.get(name)]


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--kills", type=int, default=20)
  parser.add_argument("--delay", type=float, default=45.0)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--gin_file", default=str(RECIPE))
  options = parser.parse_args(argv)
  flags = [f"--gin_file={options.gin_file}"]
  with tempfile.TemporaryDirectory() as place:
    whole, cut = pathlib.Path(place, "whole"), pathlib.Path(place, "cut")
    print(f"without a kill: {finish(whole, flags):.0f} s")
    kills = kill_again_and_again(
      cut,
      flags,
      kills=options.kills,
      delay=options.delay,
      rng=random.Random(options.seed),
    )
    finish(cut, flags)
    ends = [cut, *sorted(cut.parent.glob("cut_done*/"))]
    wrong = [f"{e.name}/{n}" for e in ends for n in differences(whole, e)]
    stages = sorted({kill.stage for kill in kills})
    print(f"{len(kills)} kills in {len(stages)} stages: {', '.join(stages)}")
    print(f"{len(files(whole))} files, {len(wrong)} differ {wrong or ''}")
  return 1 if wrong else 0


if __name__ == "__main__":
  sys.exit(main())
