"""Batches over the devices of a mesh: each clips its own rows, then one sum.

Run it on a CPU with XLA_FLAGS=--xla_force_host_platform_device_count=4.
`training.sharded_grad.ShardedGrad` does this, and divides parameters, too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from synthq_jax import optim
from synthq_jax.privacy import claim, sampling, terms

rng = np.random.default_rng(0)
x = rng.normal(size=(4000, 8)).astype(np.float32)
records = {"x": x, "y": (x[:, 0] > x[:, 1]).astype(np.int32)}
params = {"kernel": np.zeros((8, 2), np.float32)}


def loss_fn(params, batch):
  scores, labels = batch["x"] @ params["kernel"], batch["y"]
  return optax.softmax_cross_entropy_with_integer_labels(scores, labels)


mesh = jax.make_mesh((jax.device_count(),), ("data",))
secret = np.random.SeedSequence().entropy
sampler = sampling.Poisson.with_margin(
  num_examples=4000, expected_batch_size=256, multiple_of=mesh.size
)
grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=1.0)
promise = claim.calibrated(
  epsilon=8.0,
  sampler=sampler,
  steps=60,
  l2_clip_norm=grad_fn.l2_clip_norm,
  words=terms.EXAMPLES,
)
tx = optim.dp_adam(
  1e-2,
  l2_sensitivity=promise.l2_sensitivity,
  noise_multiplier=promise.noise_multiplier,
  denominator=sampler.expected_batch_size,
  key=optim.secret_key(secret, "noise"),
)


@functools.partial(
  jax.shard_map,
  mesh=mesh,
  in_specs=(PartitionSpec(), PartitionSpec("data")),
  out_specs=PartitionSpec(),
)
def summed(params, rows):  # on each device, with its rows
  total, _ = grad_fn(params, rows)
  return jax.lax.psum(total, "data")


@jax.jit
def step(params, state, batch):  # noise once, outside of shard_map
  updates, state = tx.update(summed(params, batch), state, params)
  return optax.apply_updates(params, updates), state


state = tx.init(params)
for number in range(promise.steps):
  batch = sampler.take(records, sampler.batch([secret, 1], number))
  params, state = step(params, state, batch)

alone, _ = grad_fn(params, batch)
apart = optax.tree.sub(alone, summed(params, batch))
difference = float(optax.tree.norm(apart) / optax.tree.norm(alone))
accuracy = jnp.mean(jnp.argmax(x @ params["kernel"], axis=1) == records["y"])
