"""Gradient accumulation: the parts of ONE drawn batch, and one noise for all.

Where the examples fit on the device, and only what is computed from them does
not, `clipped_grad(..., microbatch_size=64)` is all it takes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from synthq_jax import optim
from synthq_jax.privacy import claim, sampling, terms

PARTS = 4
rng = np.random.default_rng(0)
x = rng.normal(size=(4000, 8)).astype(np.float32)
records = {"x": x, "y": (x[:, 0] > x[:, 1]).astype(np.int32)}
params = {"kernel": np.zeros((8, 2), np.float32)}


def loss_fn(params, batch):
  scores, labels = batch["x"] @ params["kernel"], batch["y"]
  return optax.softmax_cross_entropy_with_integer_labels(scores, labels)


secret = np.random.SeedSequence().entropy
sampler = sampling.Poisson.with_margin(
  num_examples=4000, expected_batch_size=256, multiple_of=PARTS
)
grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=1.0)
promise = claim.calibrated(
  epsilon=8.0,
  sampler=sampler,
  steps=60,
  l2_clip_norm=grad_fn.l2_clip_norm,
  words=terms.EXAMPLES,
)
private_adam = optim.dp_adam(
  1e-2,
  l2_sensitivity=promise.l2_sensitivity,
  noise_multiplier=promise.noise_multiplier,
  denominator=sampler.expected_batch_size,  # of the whole batch
  key=optim.secret_key(secret, "noise"),
)
tx = optim.accumulate(private_adam, parts=PARTS)
# With optax: optax.MultiSteps(private_adam, PARTS, use_grad_mean=False). Its
# default divides the sum by PARTS, before noise that is made for the sum.


@jax.jit
def add(params, state, part):
  total, _ = grad_fn(params, part)
  updates, state = tx.update(total, state, params)
  return optax.apply_updates(params, updates), state


state = tx.init(params)
for number in range(promise.steps):
  drawn = sampler.batch([secret, 1], number)  # one draw for all parts
  for part in sampling.split(drawn, PARTS):
    params, state = add(params, state, sampler.take(records, part))

accuracy = jnp.mean(jnp.argmax(x @ params["kernel"], axis=1) == records["y"])
