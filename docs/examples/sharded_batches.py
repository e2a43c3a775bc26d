"""Divides batches among the devices of a mesh: each clips its own rows.

On a CPU, run it with XLA_FLAGS=--xla_force_host_platform_device_count=4.
`training.sharded_grad.ShardedGrad` does this, and also divides parameters.
"""

import functools

import jax
import numpy as np
import optax
import toy
from jax.sharding import PartitionSpec

from synthq_jax import optim

params = {"kernel": np.zeros((toy.DIM, 2), np.float32)}


def loss_fn(params, batch):
  return toy.cross_entropy(batch["x"] @ params["kernel"], batch)


mesh = jax.sharding.Mesh(jax.devices(), ("data",))  # divides a batch's rows
grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=1.0)


@jax.jit
@functools.partial(
  jax.shard_map,
  mesh=mesh,
  in_specs=(PartitionSpec(), PartitionSpec("data")),
  out_specs=PartitionSpec(),
)
def summed(params, rows):  # on each device, with its rows
  total, _ = grad_fn(params, rows)
  return jax.lax.psum(total, "data")


def sharded_grad(params, batch, key=None):  # noise comes once, outside
  return summed(params, batch), None


tx = optim.dp_adam(1e-2, **toy.numbers(grad_fn))
params = toy.train(sharded_grad, tx, params)
accuracy = toy.accuracy(toy.x @ params["kernel"])

alone, _ = jax.jit(grad_fn)(params, toy.batch(0))
apart = optax.tree.sub(alone, summed(params, toy.batch(0)))
difference = float(optax.tree.norm(apart) / optax.tree.norm(alone))
