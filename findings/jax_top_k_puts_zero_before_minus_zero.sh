#!/bin/sh
# jax==0.10.2
#
# lax.top_k orders by bits: 0.0 stands before -0.0, although they are equal.
# jnp.argsort(descending=True), a stable sort, keeps their order; and nan
# stands first in both.
#
# Why it surprises: top_k promises the lower index among equal values, and 0.0
# == -0.0.
#
# Whom it hurts: rankings whose ties should stand in the order of the
# documents. A product with a zero vector, or -1 times a distance of zero,
# gives both zeros.
#
# Source: jax/_src/lax/lax.py, top_k.
#
# Seen: top_k [1, 0], argsort [0, 1]; argmax 0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet jax==0.10.2
cd "$work"
cat > program.py <<'END'
import jax
import jax.numpy as jnp

zeros = jnp.array([-0.0, 0.0])
by_top_k = jax.lax.top_k(zeros, 2)[1].tolist()
by_argsort = jnp.argsort(zeros, descending=True).tolist()
first = int(jnp.argmax(zeros))
print("top_k", by_top_k, "argsort", by_argsort, "argmax", first)
if by_top_k != [1, 0] or by_argsort != [0, 1]:
  raise SystemExit("changed: the two orders of zeros are others")
END
"$work/env/bin/python" program.py
