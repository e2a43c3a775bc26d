#!/bin/sh
# orbax-checkpoint==0.12.8
#
# A CheckpointManager with save_interval_steps=10 saves step 3 if that is the
# first it is offered, then 10 and 20. A run that starts again in an empty
# folder at step 13 has 13, 20, ... and one that does not has 10, 20, ...
#
# Why it surprises: the interval reads as "only multiples of ten", and step 5
# is refused just after. The policy for the first step is an addition of its
# own.
#
# Whom it hurts: whoever averages or compares checkpoints by step, or counts
# on all runs having the same steps; max_to_keep counts the odd one, too.
#
# Source: orbax/checkpoint/checkpoint_manager.py, the policies made from
# options; save_decision_policy.py, InitialSavePolicy.
#
# Seen: offered 3 5 10 15 20, saved 3 10 20
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet jax==0.10.2 orbax-checkpoint==0.12.8
cd "$work"
cat > program.py <<'END'
import tempfile

import jax.numpy as jnp
import orbax.checkpoint as ocp

options = ocp.CheckpointManagerOptions(save_interval_steps=10)
with tempfile.TemporaryDirectory() as folder:
  manager = ocp.CheckpointManager(folder, options=options)
  for step in (3, 5, 10, 15, 20):
    manager.save(step, args=ocp.args.StandardSave({"a": jnp.ones(2)}))
  manager.wait_until_finished()
  saved = sorted(manager.all_steps())
  manager.close()
print("offered 3 5 10 15 20, saved", *saved)
if saved != [3, 10, 20]:
  raise SystemExit("changed: other steps are saved")
END
"$work/env/bin/python" program.py
