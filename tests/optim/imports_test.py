"""What importing the package loads, in a process of its own."""

import json
import subprocess
import sys

LATE = {
  *("tensorflow", "seqio", "flax", "gin", "orbax", "faiss", "matplotlib"),
  *("scipy.stats", "scipy.signal", "dp_accounting", "jax_privacy"),
}
"""Slow or optional: loaded where they are used."""

_SCRIPT = """
import importlib, json, sys
loaded = []
for line in sys.argv[1:]:
  before = set(sys.modules)
  for name in line.split():
    importlib.import_module(name)
  loaded.append(sorted(set(sys.modules) - before))
print(json.dumps(loaded))
"""


def loaded_by(*lines):
  """The modules that each line of names adds, in one process."""
  command = [sys.executable, "-c", _SCRIPT, *lines]
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  return map(set, json.loads(done.stdout))


def roots(names):
  return {name.split(".")[0] for name in names}


def test_claims_are_made_without_jax_and_scipy():
  claims, losses = loaded_by("synthq_jax.privacy", "synthq_jax.losses")
  assert not roots(claims) & {"jax", "scipy"}
  assert not (claims | losses) & LATE


def test_optim_needs_jax_optax_and_numpy_alone():
  theirs, ours = loaded_by("jax optax numpy jaxtyping", "synthq_jax.optim")
  assert not ours & LATE
  standard = {*sys.stdlib_module_names, *sys.builtin_module_names}
  others = roots(ours) - roots(theirs) - standard
  assert {name for name in others if name[0] != "_"} == {"synthq_jax"}
