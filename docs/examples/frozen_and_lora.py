"""Frozen parameters, LoRA, and optimizers for groups of parameters.

What is not trained is another argument of the loss: it costs no clipping, takes
no noise, and is no part of the clip norm. Groups that are trained differently are
told apart behind the noise.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from synthq_jax import optim
from synthq_jax.privacy import claim, sampling, terms

rng = np.random.default_rng(0)
x = rng.normal(size=(4000, 8)).astype(np.float32)
records = {"x": x, "y": (x[:, 0] > x[:, 1]).astype(np.int32)}

frozen = {"kernel": rng.normal(size=(8, 32)).astype(np.float32) / 3}
trained = {
  "lora": {
    "a": rng.normal(size=(8, 2)).astype(np.float32) / 3,
    "b": np.zeros((2, 32), np.float32),
  },
  "head": np.zeros((32, 2), np.float32),
}


def scores_of(trained, x, frozen):
  hidden = x @ frozen["kernel"]
  hidden += x @ trained["lora"]["a"] @ trained["lora"]["b"]
  return jax.nn.relu(hidden) @ trained["head"]


def loss_fn(trained, batch, frozen):  # argnums=0 is what is trained
  scores, labels = scores_of(trained, batch["x"], frozen), batch["y"]
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
tx = optax.chain(  # noise first: it has to see the whole sum
  optim.privatize(
    l2_sensitivity=promise.l2_sensitivity,
    noise_multiplier=promise.noise_multiplier,
    denominator=sampler.expected_batch_size,
    key=optim.secret_key(secret, "noise"),
  ),
  optax.multi_transform(
    {"fast": optax.adam(1e-2), "slow": optax.adam(1e-3)},
    {"lora": "slow", "head": "fast"},
  ),
)


@jax.jit
def step(trained, state, batch, frozen):
  total, _ = grad_fn(trained, batch, frozen)
  updates, state = tx.update(total, state, trained)
  return optax.apply_updates(trained, updates), state


state = tx.init(trained)
for number in range(promise.steps):
  batch = sampler.take(records, sampler.batch([secret, 1], number))
  trained, state = step(trained, state, batch, frozen)

scores = scores_of(trained, x, frozen)
accuracy = jnp.mean(jnp.argmax(scores, axis=1) == records["y"])
