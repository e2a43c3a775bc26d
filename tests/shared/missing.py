"""Processes to which packages are missing that are installed."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Collection

ROOT = pathlib.Path(__file__).resolve().parents[2]
TENSORFLOW = frozenset(
  "tensorflow tensorflow_text tensorflow_datasets seqio keras pyarrow".split()
)
"""TensorFlow, and what nothing needs but what needs TensorFlow."""
_SCRIPT = """
import importlib.machinery

class Missing(importlib.machinery.PathFinder):
  \"\"\"Finds packages as usual, but for these.\"\"\"
  names = {names!r}

  @classmethod
  def find_spec(cls, name, path=None, target=None):
    if name.split(".")[0] not in cls.names:
      return super().find_spec(name, path, target)

import sys
place = sys.meta_path.index(importlib.machinery.PathFinder)
sys.meta_path[place] = Missing
"""


def script(names: Collection[str]) -> str:
  """Returns code after which packages are as if they were not there."""
  return _SCRIPT.format(names=set(names))


def run(*command: object, cwd: pathlib.Path, **settings: object) -> str:
  """Returns what a command that has to succeed writes."""
  done = subprocess.run(
    [str(part) for part in command],
    cwd=cwd,
    capture_output=True,
    text=True,
    **settings,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return done.stdout


def call(code: str, names: Collection[str] = TENSORFLOW) -> None:
  """Runs code of the tests in a process to which packages are missing."""
  check = "\nassert not Missing.names & set(sys.modules)\n"
  path = f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'shared'}"
  run(
    *(sys.executable, "-c", script(names) + code + check),
    cwd=ROOT,
    env={**os.environ, "PYTHONPATH": path},
  )
