#!/bin/sh
# orbax-checkpoint==0.12.8
#
# Restoring float32 numbers 1.7, -2.5, 3e10 into a target of dtype int8 gives
# 1, -2, 0, into bool True, True, True, and into float16 1e6 comes back as
# infinity: no error, no warning. A target of another shape is refused if it
# is a jax.ShapeDtypeStruct, and ignored if it is a NumPy array.
#
# Why it surprises: the target is there to check that the checkpoint is the
# expected one, and StandardCheckpointer refuses a missing key and another
# shape.
#
# Whom it hurts: restoring with the abstract state of another precision, or
# with a step counter where a scale stands.
#
# Source: orbax/checkpoint/_src/serialization/serialization.py, the cast on
# reading; numpy handler of type_handlers.
#
# Seen: int8 [1, -2, 0], bool [True, True, True], float16 inf; shape (3,) for
# a NumPy target of (2,)
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet jax==0.10.2 orbax-checkpoint==0.12.8 numpy==2.4.6
cd "$work"
cat > program.py <<'END'
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

checkpointer = ocp.StandardCheckpointer()


def restored(values, target):
  with tempfile.TemporaryDirectory() as folder:
    checkpointer.save(f"{folder}/state", {"a": jnp.array(values)})
    checkpointer.wait_until_finished()
    return checkpointer.restore(f"{folder}/state", {"a": target})["a"]


of = jax.ShapeDtypeStruct
numbers = [1.7, -2.5, 3e10]
small = restored(numbers, of((3,), jnp.int8)).tolist()
flags = restored(numbers, of((3,), jnp.bool_)).tolist()
half = float(restored([1e6], of((1,), jnp.float16))[0])
shape = restored(numbers, np.zeros(2, np.float32)).shape
print("int8", small, "bool", flags, "float16", half, "shape", shape)
if (small, flags, half, shape) != ([1, -2, 0], [True] * 3, np.inf, (3,)):
  raise SystemExit("changed: other dtypes or shapes are refused")
END
"$work/env/bin/python" program.py
