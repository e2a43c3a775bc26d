#!/bin/sh
# optax==0.2.8, jax-privacy==2.0.0
#
# The norm of 1,000 bfloat16 leaves of one 1.0 each is 16, not 31.6. What is
# clipped to norm 1 by optax, or by jax_privacy.clipped_grad, then has norm
# 1.976.
#
# Why it surprises: JAX sums a bfloat16 array in float32, so one array of
# 1,000 ones has the right norm. The squares of leaves are added one after the
# other in bfloat16, where 256 + 1 is 256.
#
# Whom it hurts: DP training whose parameters are bfloat16 and many: the
# sensitivity is nearly twice the clip norm.
#
# Source: optax/tree_utils/_tree_math.py, norm; jax_privacy/clipping.py,
# clip_pytree.
#
# Seen: norm 16.0 optax 1.976 jax-privacy 1.976, one leaf 31.6
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet jax==0.10.2 optax==0.2.8 jax-privacy==2.0.0
cd "$work"
cat > program.py <<'END'
import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax

leaves = {f"layer_{i}": jnp.ones(1, jnp.bfloat16) for i in range(1000)}


def norm(tree):
  wide = [np.asarray(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)]
  return float(np.sqrt(sum(np.square(leaf).sum() for leaf in wide)))


def loss(params, scale):
  return sum(leaf.sum() for leaf in params.values()) * scale.astype(jnp.bfloat16)


claimed = float(optax.tree.norm(leaves))
single = float(optax.tree.norm(jnp.ones(1000, jnp.bfloat16)))
clip = optax.clip_by_global_norm(1.0)
by_optax = norm(clip.update(leaves, clip.init(leaves))[0])
grad_fn = jax_privacy.clipped_grad(
  loss, l2_clip_norm=1.0, batch_argnums=1, keep_batch_dim=False
)
by_privacy = norm(grad_fn(leaves, jnp.ones(1)))
print(f"norm {claimed} optax {by_optax:.3f} jax-privacy {by_privacy:.3f}")
print(f"one leaf {single:.1f}, true {norm(leaves):.1f}")
if claimed != 16 or by_optax < 1.9 or by_privacy < 1.9:
  raise SystemExit("changed: norms of bfloat16 leaves are summed more widely")
END
"$work/env/bin/python" program.py
