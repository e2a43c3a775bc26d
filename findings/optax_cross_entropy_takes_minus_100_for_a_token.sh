#!/bin/sh
# optax==0.2.8
#
# optax.softmax_cross_entropy_with_integer_labels at label -100 is the loss of
# the 100th class from the end, finite and differentiable. A label past the
# last class gives nan.
#
# Why it surprises: -100 is what the data collators of transformers write for
# positions that do not count. One out-of-range side is loud (nan), the other
# is silent.
#
# Whom it hurts: T5 or BERT training in JAX on batches made for PyTorch: all
# padding is trained to be one rare token.
#
# Source: optax/losses/_classification.py,
# softmax_cross_entropy_with_integer_labels.
#
# Seen: -100 equals class 32028: True; -1 equals class 32127: True; 32128 is
# nan: True
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet jax==0.10.2 optax==0.2.8
cd "$work"
cat > program.py <<'END'
import jax
import jax.numpy as jnp
import optax

logits = jax.random.normal(jax.random.key(0), (32_128,))


def loss(label):
  return float(
    optax.softmax_cross_entropy_with_integer_labels(logits, jnp.array(label))
  )


ignored = loss(-100) == loss(32_028)
last = loss(-1) == loss(32_127)
past = loss(32_128) != loss(32_128)
print("-100 equals class 32028:", ignored, "-1 equals class 32127:", last)
print("32128 is nan:", past)
if not (ignored and last and past):
  raise SystemExit("changed: labels out of range are treated otherwise")
END
"$work/env/bin/python" program.py
