"""Trains a contrastive loss with learned temperature, dropout and hard negatives.

Negatives are a record's own hard ones and public ones, so no row depends on
another record. The loss is per-example: use `clipped_grad`, whose sensitivity is
the clip norm. In-batch negatives couple rows: see
docs/tutorials/contrastive_dp.md.
"""

import jax
import jax.numpy as jnp
import numpy as np
import toy

from synthq_jax import optim

rng = np.random.default_rng(0)
documents = rng.normal(size=(toy.NUM, 16))
scale = np.geomspace(0.1, 8, 16)  # queries are noisy where this is large
records = {
  "query": documents + scale * rng.normal(size=(toy.NUM, 16)),
  "document": documents,
  "hard": documents[:, None] + rng.normal(size=(toy.NUM, 2, 16)),
}
records = {name: value.astype(np.float32) for name, value in records.items()}
public = rng.normal(size=(32, 16)).astype(np.float32)  # negatives of all rows
start = {"kernel": jnp.eye(16), "log_temperature": jnp.array(-1.0)}


def encode(kernel, x):
  x = x @ kernel
  return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def loss_fn(params, batch, public, key):  # the key comes last
  keep = jax.random.bernoulli(key, 0.9, batch["query"].shape)
  query = encode(params["kernel"], jnp.where(keep, batch["query"], 0.0))
  own = jnp.concatenate([batch["document"][:, None], batch["hard"]], axis=1)
  own = encode(params["kernel"], own)  # [batch, 1 + hard, dim]
  others = query @ encode(params["kernel"], public).T
  scores = jnp.concatenate([jnp.einsum("bd,bcd->bc", query, own), others], 1)
  scores /= jnp.exp(params["log_temperature"])
  return jax.nn.logsumexp(scores, axis=1) - scores[:, 0]


grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=1.0)
tx = optim.dp_adam(1e-2, **toy.numbers(grad_fn))
params = toy.train(grad_fn, tx, start, public, records=records, dropout=True)

key = jax.random.key(0)
before, after = (
  float(loss_fn(p, records, public, key).mean()) for p in (start, params)
)
