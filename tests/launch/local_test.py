"""launch/local.sh with a stand-in for Python: what is installed, and what runs."""

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PYTHON = """#!/bin/sh
echo "$0 $*" >>"$(dirname "$0")/calls"
"""


@pytest.fixture(name="clone")
def _clone(tmp_path):
  """A checkout, installed, whose Python writes down what it is told."""
  clone = tmp_path / "my clone"
  for folder in ("launch", "synthq_jax", "gin_configs", ".venv/bin"):
    (clone / folder).mkdir(parents=True)
  shutil.copy(ROOT / "launch/local.sh", clone / "launch")
  (clone / "synthq_jax/code.py").write_text("first = 1\n")
  (clone / "pyproject.toml").touch()
  for name in ("python", "synthq"):
    (clone / ".venv/bin" / name).write_text(PYTHON)
    (clone / ".venv/bin" / name).chmod(0o755)
  _start(clone)
  return clone


def _start(clone) -> list[str]:
  """Runs the script, and returns what it told Python."""
  calls = clone / ".venv/bin/calls"
  calls.unlink(missing_ok=True)
  command = ["bash", str(clone / "launch/local.sh")]
  subprocess.run(command, check=True, capture_output=True, env=os.environ)
  return calls.read_text().splitlines()


def _installs(calls) -> bool:
  return any(" -m pip install " in call for call in calls)


def test_what_is_installed_is_not_installed_again(clone):
  assert not _installs(_start(clone))


def test_an_edit_that_rsync_or_tar_brings_is_installed(clone):
  """They keep the time of the edit, before the install: older code ran."""
  code = clone / "synthq_jax/code.py"
  before = code.stat().st_mtime - 100
  code.write_text("second = 2\n")
  os.utime(code, (before, before))
  assert _installs(_start(clone))


def test_a_moved_clone_runs_its_own_code(clone):
  """bin/synthq begins with the path of the Python that installed it."""
  last = _start(clone)[-1]
  assert last.startswith(f"{clone}/.venv/bin/python -P -m synthq_jax run ")
