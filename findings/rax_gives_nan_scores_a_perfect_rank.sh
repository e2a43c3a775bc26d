#!/bin/sh
# rax==0.4.0, jax==0.10.2
#
# Rax's metrics give scores that are all nan, or all equal, the order in which
# the items stand. Where the relevant item stands first, as in lists of a
# positive and its negatives, MRR and nDCG are 1.
#
# Why it surprises: a model that diverged, or whose vectors collapsed, looks
# perfect, while the loss of the same scores is nan. Ties are drawn at random
# only if a `key` is given, which the examples of the documentation do not do.
#
# Whom it hurts: retrievers and rerankers that are watched by a metric during
# training, and whose best step by that metric is kept.
#
# Source: rax/_src/utils.py, ranks and sort_by.
#
# Seen: nan scores: MRR 1.00, nDCG 1.00, with a key 0.13; loss nan; equal
#   scores: MRR 1.00, with a key 0.13
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet rax==0.4.0 jax==0.10.2
cd "$work"
cat > program.py <<'END'
import jax
import jax.numpy as jnp
import rax

# A positive and 31 negatives for each of 64 queries.
labels = jnp.zeros((64, 32)).at[:, 0].set(1)
nan = jnp.full((64, 32), jnp.nan)
equal = jnp.zeros((64, 32))
key = jax.random.key(0)
mrr, ndcg = rax.mrr_metric(nan, labels), rax.ndcg_metric(nan, labels)
drawn = rax.mrr_metric(nan, labels, key=key)
loss = rax.softmax_loss(nan, labels)
tied = rax.mrr_metric(equal, labels)
shuffled = rax.mrr_metric(equal, labels, key=key)
print(
  f"nan scores: MRR {mrr:.2f}, nDCG {ndcg:.2f}, with a key {drawn:.2f};"
  f" loss {loss:.2f}; equal scores: MRR {tied:.2f}, with a key {shuffled:.2f}"
)
if mrr != 1 or ndcg != 1 or tied != 1:
  raise SystemExit("changed: nan or equal scores have another rank")
END
"$work/env/bin/python" program.py
