"""Trains an Equinox module: partition it, and combine its arrays in the loss."""

import equinox as eqx
import jax
import toy

from synthq_jax import optim

model = eqx.nn.MLP(toy.DIM, 2, width_size=32, depth=1, key=jax.random.key(0))
# Activations and other leaves without a gradient stay out of params.
params, static = eqx.partition(model, eqx.is_inexact_array)


def loss_fn(params, batch):
  scores = jax.vmap(eqx.combine(params, static))(batch["x"])
  return toy.cross_entropy(scores, batch)


grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=1.0)
tx = optim.dp_adam(3e-3, **toy.numbers(grad_fn))
model = eqx.combine(toy.train(grad_fn, tx, params), static)
accuracy = toy.accuracy(jax.vmap(model)(toy.x))
