#!/bin/sh
# jax==0.10.2
#
# Under vmap over a batch of rbg keys, jax.random.normal depends on the first
# key alone: with all the others replaced, every row is the same as before.
# Each row but the first differs from what its own key gives without vmap.
#
# Why it surprises: with threefry keys, vmap of a draw is the loop over keys,
# and a key's type is nowhere in the call. The key of an example is commonly
# made from its id, so that its dropout does not depend on its batch; here it
# does.
#
# Whom it hurts: per-example gradients with a key for each example on TPUs,
# where rbg is chosen for its speed.
#
# Source: jax/_src/lax/control_flow/loops.py,
# _rng_bit_generator_batching_rule.
#
# Seen: rows kept when the other keys change: True; rows as without vmap: 1 of
# 4; threefry: False, 4 of 4
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet jax==0.10.2
cd "$work"
cat > program.py <<'END'
import jax
import jax.numpy as jnp


def describe(impl):
  keys = jax.random.split(jax.random.key(1, impl=impl), 4)
  data = jax.random.key_data(keys)
  others = jax.random.wrap_key_data(data.at[1:].set(7), impl=impl)
  draw = lambda key: jax.random.normal(key, (2,))
  together, replaced = jax.vmap(draw)(keys), jax.vmap(draw)(others)
  alone = jnp.stack([draw(key) for key in keys])
  return bool((together == replaced).all()), int((together == alone).all(1).sum())


rbg, threefry = describe("rbg"), describe("threefry2x32")
print("rbg", *rbg, "threefry", *threefry)
if rbg != (True, 1) or threefry != (False, 4):
  raise SystemExit("changed: vmapped draws depend on other keys")
END
"$work/env/bin/python" program.py
