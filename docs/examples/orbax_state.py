"""Saving with orbax, stopping, and going on to the same last bit.

Batches and noise are functions of the secret and the number of the step. So the
secret is saved with the state, or the rest is another training: as private as the
data, as long as anybody may not know what noise was added.
"""

import json
import pathlib
import tempfile

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

from synthq_jax import optim
from synthq_jax.privacy import claim, sampling, terms

rng = np.random.default_rng(0)
x = rng.normal(size=(4000, 8)).astype(np.float32)
records = {"x": x, "y": (x[:, 0] > x[:, 1]).astype(np.int32)}
start = {"kernel": np.zeros((8, 2), np.float32)}


def loss_fn(params, batch):
  scores, labels = batch["x"] @ params["kernel"], batch["y"]
  return optax.softmax_cross_entropy_with_integer_labels(scores, labels)


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


def train(folder, stop):
  """Trains up to a step, from whatever is saved in the folder."""
  secret_file = folder / "secret.json"
  if not secret_file.exists():
    secret_file.write_text(json.dumps(np.random.SeedSequence().entropy))
  secret = json.loads(secret_file.read_text())
  tx = optim.dp_adam(
    1e-2,
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

  with ocp.CheckpointManager(folder / "states") as manager:
    params, state = jax.tree.map(jax.numpy.asarray, (start, tx.init(start)))
    first = manager.latest_step() or 0
    if first:
      like = ocp.args.StandardRestore((params, state))
      params, state = manager.restore(first, args=like)
    for number in range(first, stop):
      batch = sampler.take(records, sampler.batch([secret, 1], number))
      params, state = step(params, state, batch)
    manager.save(stop, args=ocp.args.StandardSave((params, state)))
  return params


whole, halves = (pathlib.Path(tempfile.mkdtemp()) for _ in range(2))
uninterrupted = train(whole, 60)
(halves / "secret.json").write_text((whole / "secret.json").read_text())
train(halves, 25)
resumed = train(halves, 60)
same = bool((uninterrupted["kernel"] == resumed["kernel"]).all())
