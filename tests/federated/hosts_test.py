"""Three real processes make the same global model as one."""

import importlib.util
import pathlib

import hosts
import numpy as np

SCRIPT = pathlib.Path(__file__).with_name("hosts_script.py")


def load_script():
  spec = importlib.util.spec_from_file_location("federated_hosts", SCRIPT)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def in_three(folder):
  hosts.ended(hosts.launch(SCRIPT, folder, processes=3, devices=1))
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
