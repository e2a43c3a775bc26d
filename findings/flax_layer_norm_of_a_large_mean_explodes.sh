#!/bin/sh
# flax==0.12.8
#
# flax.linen.LayerNorm on float32 rows of mean 10,000 and deviation 1 returns
# values of deviation 860 instead of 1. At mean 1,000 it is off by 3%.
#
# Why it surprises: normalising takes the mean away, so a large mean should be
# harmless, and is in PyTorch. By default the variance is E[x^2] - E[x]^2,
# which cancels in float32, is cut at zero, and leaves epsilon alone.
#
# Whom it hurts: encoders ported from PyTorch whose residual stream has a
# large offset.
#
# Source: flax/linen/normalization.py, _compute_stats, use_fast_variance.
#
# Seen: mean 100: 1.00, mean 1000: 0.97, mean 10000: 862; without fast
# variance 1.00
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet jax==0.10.2 flax==0.12.8 numpy==2.4.6
cd "$work"
cat > program.py <<'END'
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


def deviation(mean, fast):
  rows = np.random.default_rng(0).normal(mean, 1, (4, 512))
  layer, rows = nn.LayerNorm(use_fast_variance=fast), jnp.asarray(rows, jnp.float32)
  return float(layer.apply(layer.init(jax.random.key(0), rows), rows).std())


fast = [deviation(mean, True) for mean in (1e2, 1e3, 1e4)]
slow = [deviation(mean, False) for mean in (1e2, 1e3, 1e4)]
print("fast", *(f"{x:.3g}" for x in fast), "slow", *(f"{x:.3g}" for x in slow))
if not fast[2] > 10 or any(abs(x - 1) > 0.01 for x in slow):
  raise SystemExit("changed: the default variance is another")
END
"$work/env/bin/python" program.py
