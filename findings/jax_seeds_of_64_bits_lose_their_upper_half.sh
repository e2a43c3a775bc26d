#!/bin/sh
# jax==0.10.2
#
# jax.random.key(2**32 + 5) is jax.random.key(5), and every seed of 64 bits is
# its lower half, without a warning. So are np.int64 seeds. fold_in raises for
# a Python number of more than 32 bits, and takes the lower half of a NumPy
# number, too.
#
# Why it surprises: the key holds two words of 32 bits, the documentation
# speaks of 64-bit seeds, and the other key function refuses the same number.
# With jax_enable_x64 the upper half counts, so the same seed gives another
# stream.
#
# Whom it hurts: seeds made from a hash, a time in nanoseconds or 64 random
# bits.
#
# Source: jax/_src/random/prng.py, random_seed;
# jax/_src/random/threefry2x32.py, threefry_seed.
#
# Seen: [0, 5] [0, 5] [0, 4294967295]; fold_in OverflowError; with x64 [1, 5]
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet jax==0.10.2
cd "$work"
cat > program.py <<'END'
import jax
import numpy as np


def words(seed):
  return jax.random.key_data(jax.random.key(seed)).tolist()


small, wide, array = words(5), words(2**32 + 5), words(np.int64(2**32 + 5))
largest = words(2**63 - 1)
try:
  jax.random.fold_in(jax.random.key(0), 2**32)
  folded = "no error"
except OverflowError:
  folded = "OverflowError"
jax.config.update("jax_enable_x64", True)
double = words(2**32 + 5)
print(small, wide, array, largest, "fold_in", folded, "with x64", double)
if not (small == wide == array == [0, 5] and double == [1, 5]):
  raise SystemExit("changed: seeds of 64 bits count, or are refused")
END
"$work/env/bin/python" program.py
