#!/bin/sh
# jax==0.10.2
#
# jax.random.categorical on 32,000 equal bfloat16 logits draws ids below 1,000
# alone. In float32 the mean id is near 16,000, as it should be.
#
# Why it surprises: equal logits are exact in bfloat16, so nothing is rounded
# that the caller gave. The Gumbel noise is drawn in bfloat16 too and has few
# values; hundreds of ids share the largest, and argmax takes the first.
#
# Whom it hurts: sampling from the logits of a bfloat16 model. Nucleus or
# top-k sampling hides it, since few ids are left.
#
# Source: jax/_src/random/core.py, categorical and gumbel.
#
# Seen: bfloat16 mean 123 largest 853; float32 mean 15251 largest 31987
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet jax==0.10.2
cd "$work"
cat > program.py <<'END'
import jax
import jax.numpy as jnp

keys = jax.random.split(jax.random.key(0), 500)


def draw(dtype):
  logits = jnp.zeros(32_000, dtype)
  return jax.vmap(lambda key: jax.random.categorical(key, logits))(keys)


half, full = draw(jnp.bfloat16), draw(jnp.float32)
for name, ids in (("bfloat16", half), ("float32", full)):
  print(name, "mean", int(ids.mean()), "largest", int(ids.max()))
if not half.max() < 2_000 or not 14_000 < full.mean() < 18_000:
  raise SystemExit("changed: bfloat16 logits are sampled otherwise")
END
"$work/env/bin/python" program.py
