"""Saves a training with orbax, and resumes it to the same last bit.

The secret and the step number determine batches and noise. So keep the secret
with the state: another secret makes another training, which costs its own
epsilon.
"""

import pathlib
import tempfile

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import toy

from synthq_jax import optim

start = {"kernel": jnp.zeros((toy.DIM, 2))}


def loss_fn(params, batch):
  return toy.cross_entropy(batch["x"] @ params["kernel"], batch)


grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=1.0)
# Its key and the batches follow from toy.SECRET, to be kept beside the states.
tx = optim.dp_adam(1e-2, **toy.numbers(grad_fn))


@jax.jit
def step(params, state, batch):
  total, _ = grad_fn(params, batch)
  updates, state = tx.update(total, state, params)
  return optax.apply_updates(params, updates), state


def train(folder, stop):
  """Trains up to a step, from whatever is saved in the folder."""
  params, state = start, tx.init(start)
  with ocp.CheckpointManager(folder) as manager:
    first = manager.latest_step() or 0
    if first:
      like = ocp.args.StandardRestore((params, state))
      params, state = manager.restore(first, args=like)
    for number in range(first, stop):
      params, state = step(params, state, toy.batch(number))
    manager.save(stop, args=ocp.args.StandardSave((params, state)))
  return params


whole, halves = (pathlib.Path(tempfile.mkdtemp()) for _ in range(2))
uninterrupted = train(whole, toy.STEPS)
train(halves, 25)
resumed = train(halves, toy.STEPS)
same = bool((uninterrupted["kernel"] == resumed["kernel"]).all())
