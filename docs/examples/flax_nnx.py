"""Trains a Flax NNX model: split it, and merge its parameters in the loss."""

import jax
import toy
from flax import nnx

from synthq_jax import optim

rngs = nnx.Rngs(0)
model = nnx.Sequential(
  nnx.Linear(toy.DIM, 32, rngs=rngs), jax.nn.gelu, nnx.Linear(32, 2, rngs=rngs)
)
graph, params, rest = nnx.split(model, nnx.Param, ...)


def loss_fn(params, batch):
  scores = nnx.merge(graph, params, rest)(batch["x"])
  return toy.cross_entropy(scores, batch)


grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=1.0)
tx = optim.dp_adam(3e-3, **toy.numbers(grad_fn))
nnx.update(model, toy.train(grad_fn, tx, params))
accuracy = toy.accuracy(model(toy.x))
