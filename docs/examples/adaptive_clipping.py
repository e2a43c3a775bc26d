"""Adaptive clipping, and noise and learning rates that follow schedules.

The clip norm follows a noisy quantile of the gradients' norms. Sums are divided
by it, so that their sensitivity is 1 whatever it is, and the claim, which pays
for the quantile too, is that of any other training.
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
params = {"kernel": np.zeros((8, 2), np.float32)}


def loss_fn(params, batch):
  scores, labels = batch["x"] @ params["kernel"], batch["y"]
  return optax.softmax_cross_entropy_with_integer_labels(scores, labels)


secret = np.random.SeedSequence().entropy
sampler = sampling.Poisson.with_margin(
  num_examples=4000, expected_batch_size=256
)
grad_fn = optim.clipped_grad(
  loss_fn, l2_clip_norm=0.01, rescale_to_unit_norm=True
)
promise = claim.calibrated(
  epsilon=8.0,
  sampler=sampler,
  steps=60,
  l2_clip_norm=grad_fn.l2_clip_norm,
  l2_sensitivity=grad_fn.sensitivity("ADD_OR_REMOVE_ONE"),  # 1
  words=terms.EXAMPLES.but(
    mechanism="gradients clipped to a noisy median of their norms and divided"
    " by it, summed, and the noisy count behind that median, Gaussian noise"
  ),
)
clip = optim.AdaptiveClip(
  initial=grad_fn.l2_clip_norm,
  noise_multiplier=promise.noise_multiplier,
  denominator=sampler.expected_batch_size,
  key=optim.secret_key(secret, "clip norm"),
)
tx = optim.dp_adam(
  optax.cosine_decay_schedule(2e-2, 60),
  l2_sensitivity=promise.l2_sensitivity,
  noise_multiplier=clip.sum_noise_multiplier,  # a little more than promised
  denominator=sampler.expected_batch_size,
  key=optim.secret_key(secret, "noise"),
)


@jax.jit
def step(params, state, clip_state, batch):
  total, aux = grad_fn(params, batch, l2_clip_norm=clip_state.l2_clip_norm)
  clip_state = clip.update(
    aux.norms, clip_state, is_padding_example=batch["is_padding_example"]
  )
  updates, state = tx.update(total, state, params)
  return optax.apply_updates(params, updates), state, clip_state


state, clip_state = tx.init(params), clip.init()
for number in range(promise.steps):
  batch = sampler.take(records, sampler.batch([secret, 1], number))
  params, state, clip_state = step(params, state, clip_state, batch)

accuracy = jnp.mean(jnp.argmax(x @ params["kernel"], axis=1) == records["y"])

# A schedule of the noise goes into the claim and the optimizer alike.
schedule = optax.linear_schedule(1.5, 0.75, 60)
scheduled = claim.Claim(
  sampler=sampler, steps=60, noise_multiplier=schedule, l2_clip_norm=1.0
)
quiet_last = optim.privatize(
  l2_sensitivity=1.0,
  noise_multiplier=schedule,
  denominator=sampler.expected_batch_size,
  key=optim.secret_key(secret, "schedule"),
)
