#!/bin/sh
# ml_dtypes==0.6.0, numpy==2.4.6
#
# The NumPy mean of 1,000 bfloat16 ones is 0.256, and their deviation is 0.504
# instead of 0. np.dot and np.linalg.norm of the same array are right.
#
# Why it surprises: NumPy adds float16 in float32 and in pairs, and jnp.sum of
# a bfloat16 array is right. For the dtypes of ml_dtypes NumPy adds one after
# the other in bfloat16, where 256 + 1 is 256.
#
# Whom it hurts: statistics of bfloat16 checkpoints (mean absolute weight,
# share of zeros, average of embeddings) that are read as NumPy arrays.
#
# Source: ml_dtypes, the add loop of its NumPy dtypes;
# numpy/_core/_methods.py, _mean.
#
# Seen: sum 256 mean 0.256 std 0.504 dot 1000 norm 31.6; float16 mean 1.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet ml_dtypes==0.6.0 numpy==2.4.6
cd "$work"
cat > program.py <<'END'
import ml_dtypes
import numpy as np

ones = np.ones(1000, ml_dtypes.bfloat16)
total, mean, deviation = float(ones.sum()), float(ones.mean()), float(ones.std())
product, norm = float(np.dot(ones, ones)), float(np.linalg.norm(ones))
half = float(np.ones(1000, np.float16).mean())
print("sum", total, "mean", round(mean, 3), "std", round(deviation, 3))
print("dot", product, "norm", round(norm, 1), "float16 mean", half)
if total != 256 or product != 1000 or half != 1:
  raise SystemExit("changed: sums of bfloat16 are wider")
END
"$work/env/bin/python" program.py
