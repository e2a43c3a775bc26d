"""Plants bugs that break privacy, one at a time, and looks which tests see them.

planted_bugs.toml lists them. Each is planted into a copy of what git tracks, the
working tree stays as it is; the tests that have to notice are run there. A bug is
caught if one of them fails by an assertion: a program that no longer imports, or
that raises, says of itself that something is wrong. Before that the same tests
have to pass without any bug. Ends with 1 unless all are caught.

  python tests/benchmarks/planted_bugs.py [--list] [--only="noise key"] [--json]
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]

_SEEN = ("AssertionError", "assert ", "Failed: DID NOT RAISE", "Failed: Regex")
"""How the message of a test begins that compared and found a difference."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bug:
  """A slip, and the tests that have to notice it.

  Attributes:
    name: what is broken.
    file: that is edited, below synthq_jax.
    right: text that stands exactly once in it.
    wrong: what stands there instead.
    tests: of which at least one has to fail, below tests.
  """

  name: str
  file: str
  right: str
  wrong: str
  tests: tuple[str, ...]

  def path(self, root: pathlib.Path) -> pathlib.Path:
    """Returns the file that is edited."""
    return root / "synthq_jax" / self.file

  def planted(self, root: pathlib.Path) -> str:
    """Returns the text of the file with the bug.

    Raises:
      ValueError: if what the bug replaces does not stand there exactly once.
    """
    text = self.path(root).read_text()
    if (count := text.count(self.right)) != 1:
      raise ValueError(
        f"expected exactly one place for {self.name!r} in {self.file}, got"
        f" {count}: the code was changed, so change planted_bugs.toml"
      )
    return text.replace(self.right, self.wrong)


@dataclasses.dataclass(frozen=True)
class Run:
  """What a run of some tests ended with; `failed`: the first red test."""

  outcome: str  # "passed", "failed", or what else went wrong
  failed: str
  seconds: float


@dataclasses.dataclass(frozen=True)
class Row:
  """A line of the table."""

  name: str
  caught: bool
  seconds: float
  by: str


def read() -> list[Bug]:
  """Returns all bugs, in their order."""
  with open(HERE / "planted_bugs.toml", "rb") as stream:
    rows = tomllib.load(stream)["bug"]
  return [Bug(**{**row, "tests": tuple(row["tests"])}) for row in rows]


@contextlib.contextmanager
def copied() -> Iterator[pathlib.Path]:
  """Yields a copy of all files that git tracks, as they are now."""
  listed = subprocess.run(
    ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True
  )
  with tempfile.TemporaryDirectory(prefix="planted-") as place:
    for name in filter(None, listed.stdout.decode().split("\0")):
      if (ROOT / name).exists():
        target = pathlib.Path(place) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    yield pathlib.Path(place)


@contextlib.contextmanager
def with_bug(bug: Bug, root: pathlib.Path) -> Iterator[None]:
  """Plants a bug, and takes it out again."""
  path = bug.path(root)
  text, times = path.read_bytes(), path.stat()
  path.write_text(bug.planted(root))
  try:
    yield
  finally:
    path.write_bytes(text)
    # The time by which Python knows that its compiled file is still right.
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def run(
  root: pathlib.Path, tests: Sequence[str], timeout: float, *, stop: bool = True
) -> Run:
  """Runs tests of a copy, with its package."""
  report = root / "report.xml"
  report.unlink(missing_ok=True)
  command = [sys.executable, "-m", "pytest", "-n", "0", f"--junitxml={report}"]
  command += ["-x"] if stop else []
  environment = {
    "JAX_COMPILATION_CACHE_DIR": str(root / "compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    **os.environ,
    "PYTHONPATH": str(root),
    # Compiled files of a bug would be younger than the right source.
    "PYTHONDONTWRITEBYTECODE": "1" if stop else "",
  }
  environment.pop("SYNTHQ_TESTS_FOLDER", "")  # a run that was made without
  began = time.monotonic()
  try:
    done = subprocess.run(
      [*command, *(f"tests/{test}" for test in tests)],
      cwd=root,
      env=environment,
      timeout=timeout,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
      check=False,
    )
  except subprocess.TimeoutExpired:
    return Run("took too long", "", time.monotonic() - began)
  seconds = time.monotonic() - began
  if done.returncode == 0:
    return Run("passed", "", seconds)
  if not report.exists():
    return Run("did not run", "", seconds)
  return Run(*_first_failure(report), seconds)


def _first_failure(report: pathlib.Path) -> tuple[str, str]:
  """Returns how the first red test ended, and its name."""
  for case in ElementTree.parse(report).getroot().iter("testcase"):
    for kind in ("failure", "error"):
      if (found := case.find(kind)) is not None:
        message = found.get("message", "")
        is_seen = kind == "failure" and message.startswith(_SEEN)
        first = message.splitlines()[0] if message else kind
        return "failed" if is_seen else f"broke: {first}", case.get("name", "")
  return "did not run", ""


def caught(bug: Bug, root: pathlib.Path, timeout: float = 300.0) -> Row:
  """Plants a bug in a copy and says whether its tests notice."""
  with with_bug(bug, root):
    found = run(root, bug.tests, timeout)
  by = found.failed if found.outcome == "failed" else found.outcome
  if found.outcome.startswith("broke") and found.failed:
    by = f"{found.failed} {found.outcome}"
  return Row(bug.name, found.outcome == "failed", round(found.seconds, 1), by)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--only", default="", help="part of the bugs' names")
  parser.add_argument("--list", action="store_true", help="name them and end")
  parser.add_argument("--json", action="store_true", help="print one document")
  parser.add_argument("--timeout", type=float, default=300.0, help="of a bug")
  options = parser.parse_args()
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and leave no copy
  bugs = [bug for bug in read() if options.only in bug.name]
  if options.list:
    print("\n".join(f"{bug.name} ({bug.file})" for bug in bugs))
    return 0
  tests = sorted({test for bug in bugs for test in bug.tests})
  with copied() as root:
    for bug in bugs:
      bug.planted(root)  # all of them fit, before any is run
    right = run(root, tests, options.timeout * len(bugs), stop=False)
    if right.outcome != "passed":
      print(f"Without a bug: {right.failed} {right.outcome}", file=sys.stderr)
      return 1
    print(
      f"{len(tests)} tests pass without a bug ({right.seconds:.0f} s)",
      file=sys.stderr,
    )
    rows = []
    for bug in bugs:
      rows.append(caught(bug, root, options.timeout))
      if not options.json:
        print(line(rows[-1]), flush=True)
  number = sum(row.caught for row in rows)
  if options.json:
    print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
  else:
    print(f"{number} of {len(rows)} caught")
  return 0 if rows and number == len(rows) else 1


def line(row: Row) -> str:
  """Returns a row of the table as text."""
  verdict = "caught" if row.caught else "NOT CAUGHT"
  return f"{verdict:10}  {row.seconds:5.1f} s  {row.name}\n{'':21}{row.by}"


if __name__ == "__main__":
  raise SystemExit(main())
