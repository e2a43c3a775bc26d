#!/bin/sh
# jax==0.10.2, numpy==2.4.6
#
# jax.random.choice(replace=False) with probabilities .5, .5, 0, 0, 0 and four
# items to draw returns items of probability zero. NumPy refuses the same
# call.
#
# Why it surprises: probability zero is how rows are masked out, and with
# replacement such an item is never drawn. The shape is static, so the draw
# fills up from the masked items.
#
# Whom it hurts: hard negatives or batches drawn from a masked pool that is
# smaller than asked for: the masked rows (the positives, the padding) come
# in.
#
# Source: jax/_src/random/core.py, choice.
#
# Seen: jax draws 2 items of probability zero; numpy ValueError
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet jax==0.10.2 numpy==2.4.6
cd "$work"
cat > program.py <<'END'
import jax
import jax.numpy as jnp
import numpy as np

shares = [0.5, 0.5, 0.0, 0.0, 0.0]
drawn = jax.random.choice(
  jax.random.key(0), 5, (4,), replace=False, p=jnp.array(shares)
)
impossible = int((drawn > 1).sum())
try:
  np.random.default_rng(0).choice(5, 4, replace=False, p=shares)
  refused = "no error"
except ValueError:
  refused = "ValueError"
print("jax draws", impossible, "items of probability zero; numpy", refused)
if impossible != 2 or refused != "ValueError":
  raise SystemExit("changed: items of probability zero are treated otherwise")
END
"$work/env/bin/python" program.py
