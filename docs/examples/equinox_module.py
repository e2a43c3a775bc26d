"""Equinox: partition the module, train its arrays, combine them in the loss."""

import equinox as eqx
import jax
import numpy as np
import optax

from synthq_jax import optim
from synthq_jax.privacy import claim, sampling, terms

rng = np.random.default_rng(0)
x = rng.normal(size=(4000, 8)).astype(np.float32)
records = {"x": x, "y": (x[:, 0] > x[:, 1]).astype(np.int32)}

model = eqx.nn.MLP(8, 2, width_size=32, depth=1, key=jax.random.key(0))
# Activations and other leaves without a gradient stay out of params.
params, static = eqx.partition(model, eqx.is_inexact_array)


def loss_fn(params, batch):
  scores = jax.vmap(eqx.combine(params, static))(batch["x"])
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


@jax.jit
def step(params, state, batch):
  total, _ = grad_fn(params, batch)
  updates, state = tx.update(total, state, params)
  return optax.apply_updates(params, updates), state


state = tx.init(params)
for number in range(promise.steps):
  batch = sampler.take(records, sampler.batch([secret, 1], number))
  params, state = step(params, state, batch)

trained = eqx.combine(params, static)
accuracy = np.mean(np.argmax(jax.vmap(trained)(x), axis=1) == records["y"])
