"""Trains in plain JAX with any optax optimizer after the noise, here Lion."""

import jax
import numpy as np
import optax

from synthq_jax import optim
from synthq_jax.privacy import claim, sampling, statement, terms

rng = np.random.default_rng(0)
x = rng.normal(size=(4000, 8)).astype(np.float32)
records = {"x": x, "y": (x[:, 0] > x[:, 1]).astype(np.int32)}

params = {
  "in": rng.normal(size=(8, 32)).astype(np.float32) / 3,
  "out": np.zeros((32, 2), np.float32),
}


def scores(params, x):
  return jax.nn.relu(x @ params["in"]) @ params["out"]


def loss_fn(params, batch):  # one number for each example
  return optax.softmax_cross_entropy_with_integer_labels(
    scores(params, batch["x"]), batch["y"]
  )


secret = np.random.SeedSequence().entropy  # a new one for each training
sampler = sampling.Poisson.with_margin(
  num_examples=4000, expected_batch_size=256
)
grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=1.0)
promise = claim.calibrated(
  epsilon=8.0,
  sampler=sampler,
  steps=60,
  l2_clip_norm=grad_fn.l2_clip_norm,
  l2_sensitivity=grad_fn.sensitivity("ADD_OR_REMOVE_ONE"),
  words=terms.EXAMPLES,
)
tx = optax.chain(
  optim.privatize(
    l2_sensitivity=promise.l2_sensitivity,
    noise_multiplier=promise.noise_multiplier,
    denominator=sampler.expected_batch_size,
    key=optim.secret_key(secret, "noise"),
  ),
  optax.lion(1e-2),
)


@jax.jit
def step(params, state, batch):
  total, _ = grad_fn(params, batch)
  updates, state = tx.update(total, state, params)
  return optax.apply_updates(params, updates), state


state = tx.init(params)
for number in range(promise.steps):
  drawn = sampler.batch([secret, 1], number)
  params, state = step(params, state, sampler.take(records, drawn))

accuracy = np.mean(np.argmax(scores(params, x), axis=1) == records["y"])
print(f"accuracy on the training examples (private): {accuracy:.2f}")
print(statement.in_words(promise.statement("plain_jax")))
