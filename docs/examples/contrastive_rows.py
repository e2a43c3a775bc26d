"""A contrastive loss of one's own: learnt temperature, dropout, hard negatives.

Its negatives are a record's own hard ones and public ones. So a row looks at no
other record, the loss is one of single examples, and `clipped_grad` takes it: the
sensitivity is the clip norm, whatever is learnt. In-batch negatives couple rows:
for these see docs/tutorials/contrastive_dp.md.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from synthq_jax import optim
from synthq_jax.privacy import claim, sampling, terms

rng = np.random.default_rng(0)
documents = rng.normal(size=(4000, 16)).astype(np.float32)
hard = documents[:, None] + rng.normal(size=(4000, 2, 16))  # of one's own
scale = np.geomspace(0.1, 8, 16)  # queries are noisy where this is large
records = {
  "query": (documents + scale * rng.normal(size=(4000, 16))).astype(np.float32),
  "document": documents,
  "hard": hard.astype(np.float32),
}
public = rng.normal(size=(32, 16)).astype(np.float32)  # negatives for all rows
params = {"kernel": np.eye(16, dtype=np.float32), "log_temperature": -1.0}


def encode(kernel, x):
  x = x @ kernel
  return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def loss_fn(params, batch, public, key):  # the key comes last
  keep = jax.random.bernoulli(key, 0.9, batch["query"].shape)
  query = encode(params["kernel"], jnp.where(keep, batch["query"], 0.0))
  own = jnp.concatenate([batch["document"][:, None], batch["hard"]], axis=1)
  scores = jnp.concatenate(
    [
      jnp.einsum("bd,bcd->bc", query, encode(params["kernel"], own)),
      query @ encode(params["kernel"], public).T,
    ],
    axis=1,
  )
  scores /= jnp.exp(params["log_temperature"])
  return jax.nn.logsumexp(scores, axis=1) - scores[:, 0]


secret = np.random.SeedSequence().entropy
sampler = sampling.Poisson.with_margin(
  num_examples=4000, expected_batch_size=256
)
grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=1.0)
promise = claim.calibrated(
  epsilon=8.0,
  sampler=sampler,
  steps=60,
  l2_clip_norm=grad_fn.l2_clip_norm,
  words=terms.EXAMPLES.but(unit="query with its document and negatives"),
)
tx = optim.dp_adam(
  1e-2,
  l2_sensitivity=promise.l2_sensitivity,
  noise_multiplier=promise.noise_multiplier,
  denominator=sampler.expected_batch_size,
  key=optim.secret_key(secret, "noise"),
)
dropout_key = optim.secret_key(secret, "dropout")


@jax.jit
def step(params, state, batch, number):
  key = jax.random.fold_in(dropout_key, number)
  total, _ = grad_fn(params, batch, public, key=key)
  updates, state = tx.update(total, state, params)
  return optax.apply_updates(params, updates), state


start, state = params, tx.init(params)
for number in range(promise.steps):
  batch = sampler.take(records, sampler.batch([secret, 1], number))
  params, state = step(params, state, batch, number)

before, after = (
  float(loss_fn(p, records, public, dropout_key).mean())
  for p in (start, params)
)
