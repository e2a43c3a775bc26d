"""What importing the package loads, in a process of its own."""

import subprocess
import sys

HEAVY = ("tensorflow", "seqio", "flax", "gin", "orbax", "faiss", "matplotlib")


def loaded_after(statement):
  script = f"import sys; {statement}; print(*sys.modules)"
  run = subprocess.run(
    [sys.executable, "-c", script], capture_output=True, text=True, check=True
  )
  return {name.split(".")[0] for name in run.stdout.split()}


def test_optim_and_losses_load_no_tensorflow_flax_or_gin():
  loaded = loaded_after("import synthq_jax.optim, synthq_jax.losses")
  assert "jax_privacy" in loaded
  assert not loaded & set(HEAVY)


def test_optim_needs_jax_optax_jax_privacy_and_numpy_alone():
  theirs = loaded_after("import jax, optax, jax_privacy, numpy, dp_accounting")
  ours = loaded_after("from synthq_jax import optim") - {"synthq_jax"}
  standard = {*sys.stdlib_module_names, *sys.builtin_module_names}
  assert {name for name in ours - theirs - standard if name[0] != "_"} == set()
