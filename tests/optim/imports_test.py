"""What importing the package loads, in a process of its own."""

import subprocess
import sys

import pytest

LATE = {
  *("tensorflow", "seqio", "flax", "gin", "orbax", "faiss", "matplotlib"),
  *("scipy.stats", "scipy.signal", "dp_accounting", "jax_privacy"),
}
"""Slow or optional: loaded where they are used."""


def loaded_after(statement):
  script = f"import sys; {statement}; print(*sys.modules)"
  run = subprocess.run(
    [sys.executable, "-c", script], capture_output=True, text=True, check=True
  )
  return set(run.stdout.split())


@pytest.mark.parametrize("part", ["privacy", "losses", "optim"])
def test_the_core_loads_nothing_slow(part):
  assert not loaded_after(f"import synthq_jax.{part}") & LATE


def roots_after(statement):
  return {name.split(".")[0] for name in loaded_after(statement)}


def test_optim_needs_jax_optax_and_numpy_alone():
  theirs = roots_after("import jax, optax, numpy, jaxtyping")
  others = roots_after("from synthq_jax import optim") - theirs
  others -= {*sys.stdlib_module_names, *sys.builtin_module_names}
  assert {name for name in others if name[0] != "_"} == {"synthq_jax"}
