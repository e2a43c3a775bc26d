"""Flax Linen: parameters are a dict, and dropout gets a key for each example."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from synthq_jax import optim
from synthq_jax.privacy import claim, sampling, terms

rng = np.random.default_rng(0)
x = rng.normal(size=(4000, 8)).astype(np.float32)
records = {"x": x, "y": (x[:, 0] > x[:, 1]).astype(np.int32)}


class Classifier(nn.Module):
  @nn.compact
  def __call__(self, x, *, train=False):
    x = nn.LayerNorm()(nn.gelu(nn.Dense(32)(x)))  # and never batch norm
    return nn.Dense(2)(nn.Dropout(0.1, deterministic=not train)(x))


model = Classifier()
params = model.init(jax.random.key(0), jnp.zeros((1, 8)))["params"]


def loss_fn(params, batch, key):
  scores = model.apply(
    {"params": params}, batch["x"], train=True, rngs={"dropout": key}
  )
  labels = batch["y"]
  return optax.softmax_cross_entropy_with_integer_labels(scores, labels)


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
  words=terms.EXAMPLES,
)
tx = optim.dp_adam(
  3e-3,
  l2_sensitivity=promise.l2_sensitivity,
  noise_multiplier=promise.noise_multiplier,
  denominator=sampler.expected_batch_size,
  key=optim.secret_key(secret, "noise"),
)
dropout_key = optim.secret_key(secret, "dropout")


@jax.jit
def step(params, state, batch, number):
  key = jax.random.fold_in(dropout_key, number)
  total, _ = grad_fn(params, batch, key=key)
  updates, state = tx.update(total, state, params)
  return optax.apply_updates(params, updates), state


state = tx.init(params)
for number in range(promise.steps):
  batch = sampler.take(records, sampler.batch([secret, 1], number))
  params, state = step(params, state, batch, number)

scores = model.apply({"params": params}, x)
accuracy = np.mean(np.argmax(scores, axis=1) == records["y"])
