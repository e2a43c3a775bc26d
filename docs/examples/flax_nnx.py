"""Flax NNX: split the model, train its parameters, merge them in the loss."""

import jax
import numpy as np
import optax
from flax import nnx

from synthq_jax import optim
from synthq_jax.privacy import claim, sampling, terms

rng = np.random.default_rng(0)
x = rng.normal(size=(4000, 8)).astype(np.float32)
records = {"x": x, "y": (x[:, 0] > x[:, 1]).astype(np.int32)}

rngs = nnx.Rngs(0)
model = nnx.Sequential(
  nnx.Linear(8, 32, rngs=rngs), jax.nn.gelu, nnx.Linear(32, 2, rngs=rngs)
)
graph, params, rest = nnx.split(model, nnx.Param, ...)


def loss_fn(params, batch):
  scores = nnx.merge(graph, params, rest)(batch["x"])
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

nnx.update(model, params)
accuracy = np.mean(np.argmax(model(x), axis=1) == records["y"])
