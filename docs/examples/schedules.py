"""Trains with public schedules of the clip norm and the noise.

Sums are divided by the clip norm, so that their sensitivity is always 1. Give the
schedule of the noise to both the claim and the optimizer.
"""

import jax
import numpy as np
import optax
import toy

from synthq_jax import optim
from synthq_jax.privacy import claim

params = {"kernel": np.zeros((toy.DIM, 2), np.float32)}


def loss_fn(params, batch):
  return toy.cross_entropy(batch["x"] @ params["kernel"], batch)


clip_norm = optax.linear_schedule(1.0, 0.3, toy.STEPS)
noise_multiplier = optax.linear_schedule(1.5, 0.75, toy.STEPS)
grad_fn = optim.clipped_grad(
  loss_fn, l2_clip_norm=clip_norm(0), rescale_to_unit_norm=True
)
promise = claim.Claim(
  sampler=toy.SAMPLER,
  steps=toy.STEPS,
  noise_multiplier=noise_multiplier,
  l2_clip_norm=grad_fn.l2_clip_norm,
  l2_sensitivity=grad_fn.sensitivity("ADD_OR_REMOVE_ONE"),
)
numbers = toy.numbers(grad_fn) | {"noise_multiplier": noise_multiplier}
tx = optim.dp_adam(optax.cosine_decay_schedule(2e-2, toy.STEPS), **numbers)


@jax.jit
def step(params, state, number, batch):
  total, _ = grad_fn(params, batch, l2_clip_norm=clip_norm(number))
  updates, state = tx.update(total, state, params)
  return optax.apply_updates(params, updates), state


state = tx.init(params)
for number in range(toy.STEPS):
  params, state = step(params, state, number, toy.batch(number))
accuracy = toy.accuracy(toy.x @ params["kernel"])
