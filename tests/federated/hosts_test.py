"""Three real processes make the same global model as one."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "federated" / "hosts_script.py"


def load_script():
  spec = importlib.util.spec_from_file_location("federated_hosts", SCRIPT)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def environment():
  flags = os.environ.get("XLA_FLAGS", "")
  flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags)
  own = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
  return {**os.environ, **own}


def in_three(folder):
  launcher = ROOT / "launch" / "processes.py"
  flags = "--num_processes=3 --devices_per_process=1 --max_restarts=0".split()
  child = ["--", sys.executable, SCRIPT, folder]
  done = subprocess.run(
    [sys.executable, *map(str, [launcher, *flags, *child])],
    env=environment(),
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return {
    name: dict(np.load(folder / f"{name}.npz")) for name in ("plain", "private")
  }


def test_three_processes_make_the_global_model_of_one(tmp_path):
  found, expected = in_three(tmp_path), load_script().models()
  for name, params in expected.items():
    for leaf, values in params.items():
      np.testing.assert_allclose(
        found[name][leaf], values, rtol=1e-5, atol=1e-5
      )
  # The two rounds differ, and from each other by more than that.
  gap = np.abs(expected["plain"]["first"] - expected["private"]["first"])
  assert gap.max() > 1e-2
