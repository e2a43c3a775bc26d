"""Defines the data, batches, claim and training loop that the examples share.

The loop takes any clipped gradient and any private optimizer. plain_jax.py has
the whole script without this module.
"""

import jax
import numpy as np
import optax

from synthq_jax import optim
from synthq_jax.privacy import claim, sampling

SECRET = np.random.SeedSequence().entropy  # a new one for each training
NUM, DIM, STEPS = 4000, 8, 60

rng = np.random.default_rng(0)
x = rng.normal(size=(NUM, DIM)).astype(np.float32)
RECORDS = {"x": x, "y": (x[:, 0] > x[:, 1]).astype(np.int32)}
SAMPLER = sampling.Poisson.with_margin(
  num_examples=NUM, expected_batch_size=256, multiple_of=8
)


def cross_entropy(scores, batch):
  return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"])


def promise(grad_fn):
  """Returns the claim of epsilon 8 for 60 noisy sums."""
  return claim.calibrated(
    epsilon=8.0,
    sampler=SAMPLER,
    steps=STEPS,
    l2_clip_norm=grad_fn.l2_clip_norm,
    l2_sensitivity=grad_fn.sensitivity("ADD_OR_REMOVE_ONE"),
  )


def numbers(grad_fn):
  """Returns the arguments of `privatize` and the DP optimizers for the claim."""
  promised = promise(grad_fn)
  return {
    "l2_sensitivity": promised.l2_sensitivity,
    "noise_multiplier": promised.noise_multiplier,
    "denominator": SAMPLER.expected_batch_size,
    "key": optim.secret_key(SECRET, "noise"),
  }


def batch(number, records=RECORDS):
  return SAMPLER.take(records, SAMPLER.batch([SECRET, 1], number))


def train(grad_fn, tx, params, *others, records=RECORDS, dropout=False):
  """Returns parameters after all steps; `others` go to the loss as they are."""
  dropout_key = optim.secret_key(SECRET, "dropout")

  @jax.jit
  def step(params, state, batch, number):
    key = jax.random.fold_in(dropout_key, number) if dropout else None
    total, _ = grad_fn(params, batch, *others, key=key)
    updates, state = tx.update(total, state, params)
    return optax.apply_updates(params, updates), state

  state = tx.init(params)
  for number in range(STEPS):
    params, state = step(params, state, batch(number, records), number)
    # Steps that run ahead can lock up several virtual CPU devices.
    jax.block_until_ready(params)
  return params


def accuracy(scores):
  return float(np.mean(np.argmax(scores, axis=1) == RECORDS["y"]))
