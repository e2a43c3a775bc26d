"""Adaptive clipping, and noise that follows a schedule.

The clip norm follows a noisy quantile of the gradients' norms. Sums are divided
by it, so that their sensitivity is 1 whatever it is, and the claim, which pays
for the quantile too, is that of any other training.
"""

import jax
import numpy as np
import optax
import toy

from synthq_jax import optim
from synthq_jax.privacy import claim, terms

params = {"kernel": np.zeros((toy.DIM, 2), np.float32)}


def loss_fn(params, batch):
  return toy.cross_entropy(batch["x"] @ params["kernel"], batch)


grad_fn = optim.clipped_grad(
  loss_fn, l2_clip_norm=0.01, rescale_to_unit_norm=True
)
promise = toy.promise(
  grad_fn,
  words=terms.EXAMPLES.but(
    mechanism="gradients clipped to a noisy median of their norms and divided"
    " by it, summed, and the noisy count behind that median, Gaussian noise"
  ),
)
clip = optim.AdaptiveClip(
  initial=grad_fn.l2_clip_norm,
  noise_multiplier=promise.noise_multiplier,
  denominator=toy.SAMPLER.expected_batch_size,
  key=optim.secret_key(toy.SECRET, "clip norm"),
)
noise = {**toy.numbers(grad_fn), "noise_multiplier": clip.sum_noise_multiplier}
tx = optim.dp_adam(optax.cosine_decay_schedule(2e-2, toy.STEPS), **noise)


@jax.jit
def step(params, state, clip_state, batch):
  total, aux = grad_fn(params, batch, l2_clip_norm=clip_state.l2_clip_norm)
  clip_state = clip.update(
    aux.norms, clip_state, is_padding_example=batch["is_padding_example"]
  )
  updates, state = tx.update(total, state, params)
  return optax.apply_updates(params, updates), state, clip_state


state, clip_state = tx.init(params), clip.init()
for number in range(toy.STEPS):
  params, state, clip_state = step(params, state, clip_state, toy.batch(number))
accuracy = toy.accuracy(toy.x @ params["kernel"])

# A schedule of the noise goes into the claim and the optimizer alike.
schedule = optax.linear_schedule(1.5, 0.75, toy.STEPS)
scheduled = claim.Claim(
  sampler=toy.SAMPLER,
  steps=toy.STEPS,
  noise_multiplier=schedule,
  l2_clip_norm=1.0,
)
quieter_at_last = optim.privatize(**{**noise, "noise_multiplier": schedule})
