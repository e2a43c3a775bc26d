"""Trains a Flax Linen model; dropout gets a key for each example."""

import jax
import jax.numpy as jnp
import toy
from flax import linen as nn

from synthq_jax import optim


class Classifier(nn.Module):
  @nn.compact
  def __call__(self, x, *, train=False):
    x = nn.LayerNorm()(nn.gelu(nn.Dense(32)(x)))  # and never batch norm
    return nn.Dense(2)(nn.Dropout(0.1, deterministic=not train)(x))


model = Classifier()
params = model.init(jax.random.key(0), jnp.zeros((1, toy.DIM)))["params"]


def loss_fn(params, batch, key):  # of one example, and so is the key
  scores = model.apply(
    {"params": params}, batch["x"], train=True, rngs={"dropout": key}
  )
  return toy.cross_entropy(scores, batch)


grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=1.0)
tx = optim.dp_adam(3e-3, **toy.numbers(grad_fn))
params = toy.train(grad_fn, tx, params, dropout=True)  # grad_fn(..., key=key)
accuracy = toy.accuracy(model.apply({"params": params}, toy.x))
