#!/bin/sh
# jax==0.10.2, jax-privacy==2.0.0
#
# jax.random.normal in bfloat16 has 128 values. The largest of ten million is
# 2.890625, the mean is -0.012. Noise of jax-privacy takes the dtype of the
# gradient unless it is told another, so noise for bfloat16 gradients is this.
#
# Why it surprises: rounding a Gaussian to bfloat16 leaves thousands of values
# and tails beyond 5. The draw is not rounded: a uniform number of eight bits
# goes through the inverse error function.
#
# Whom it hurts: whoever adds Gaussian noise to bfloat16 gradients and
# accounts for a Gaussian.
#
# Source: jax/_src/random/core.py, _normal_real;
# jax_privacy/noise_addition.py, _iid_normal_noise.
#
# Seen: jax bfloat16 128 2.890625 -0.012, float32 beyond 5; jax-privacy 128
# 2.890625
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet jax==0.10.2 jax-privacy==2.0.0
cd "$work"
cat > program.py <<'END'
import jax
import jax.numpy as jnp
import numpy as np
from jax_privacy import noise_addition

key = jax.random.key(0)


def describe(draws):
  wide = np.asarray(draws).astype(np.float64)
  return len(np.unique(wide)), float(np.abs(wide).max()), round(wide.mean(), 3)


half = describe(jax.random.normal(key, (10**7,), jnp.bfloat16))
full = describe(jax.random.normal(key, (10**7,), jnp.float32))
privatizer = noise_addition.gaussian_privatizer(stddev=1.0, prng_key=key)
gradient = jnp.zeros(10**6, jnp.bfloat16)
noisy, _ = privatizer.update(gradient, privatizer.init(gradient))
private = describe(noisy)
print("jax", "bfloat16", *half, "float32", *full, "jax-privacy", *private)
if not (half[0] == private[0] == 128 and half[1] < 3 > private[1]):
  raise SystemExit("changed: bfloat16 noise reaches farther, or has other values")
if full[1] < 5:
  raise SystemExit("changed: float32 noise ends earlier")
END
"$work/env/bin/python" program.py
