"""Accumulates the gradients of ONE drawn batch in parts, with one noise for all.

If only activations and gradients do not fit in memory, pass
`microbatch_size=64` to `clipped_grad` instead.
"""

import jax
import numpy as np
import optax
import toy

from synthq_jax import optim
from synthq_jax.privacy import sampling

PARTS = 4  # divide the batch's rows: with_margin(..., multiple_of=...)
params = {"kernel": np.zeros((toy.DIM, 2), np.float32)}


def loss_fn(params, batch):
  return toy.cross_entropy(batch["x"] @ params["kernel"], batch)


grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=1.0)
# The denominator is that of the whole batch.
private_adam = optim.dp_adam(1e-2, **toy.numbers(grad_fn))
tx = optim.accumulate(private_adam, parts=PARTS)
# With optax: optax.MultiSteps(private_adam, PARTS, use_grad_mean=False). Its
# default divides the sum by PARTS, before noise that is made for the sum.


@jax.jit
def add(params, state, part):
  total, _ = grad_fn(params, part)
  updates, state = tx.update(total, state, params)
  return optax.apply_updates(params, updates), state


state = tx.init(params)
for number in range(toy.STEPS):
  drawn = toy.SAMPLER.batch([toy.SECRET, 1], number)  # one draw for all parts
  for part in sampling.split(drawn, PARTS):
    params, state = add(params, state, toy.SAMPLER.take(toy.RECORDS, part))
accuracy = toy.accuracy(toy.x @ params["kernel"])
