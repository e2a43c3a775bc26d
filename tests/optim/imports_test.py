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
