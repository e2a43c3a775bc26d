"""Processes that tests start, alone or several that train together."""

import os
import pathlib
import re
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "launch" / "processes.py"


def environment() -> dict[str, str]:
  """Returns the environment of the tests, but for the numbers of devices and of
  their threads."""
  flags = os.environ.get("XLA_FLAGS", "")
  flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags)
  path = f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'shared'}"
  own = {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
  rest = {name: value for name, value in os.environ.items() if name != "NPROC"}
  return {**rest, **own}


def start(*command: Any, **variables: str) -> subprocess.Popen:
  """Starts Python with a script and its arguments, and variables besides."""
  return subprocess.Popen(
    [sys.executable, *map(str, command)],
    env={**environment(), **variables},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def launch(
  *command: Any, processes: int = 2, devices: int = 2, max_restarts: int = 0
) -> subprocess.Popen:
  """Starts a script in several processes that find each other."""
  return start(
    LAUNCHER,
    f"--num_processes={processes}",
    f"--devices_per_process={devices}",
    f"--max_restarts={max_restarts}",
    *("--", sys.executable, *command),
  )


def ended(process: subprocess.Popen, code: int = 0) -> str:
  """Waits for a process that ends with a code; returns what it printed."""
  output, _ = process.communicate(timeout=300)
  assert process.returncode == code, output
  return output
