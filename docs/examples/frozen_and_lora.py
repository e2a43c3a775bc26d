"""Trains LoRA and a head on frozen parameters, each with its own optimizer.

Frozen parameters are another argument of the loss: they are neither clipped nor
noised, and do not count in the gradient's norm. Separate the groups of trained
parameters after the noise.
"""

import jax
import numpy as np
import optax
import toy

from synthq_jax import optim

rng = np.random.default_rng(1)
frozen = {"kernel": rng.normal(size=(toy.DIM, 32)).astype(np.float32) / 3}
trained = {
  "lora": {
    "a": rng.normal(size=(toy.DIM, 2)).astype(np.float32) / 3,
    "b": np.zeros((2, 32), np.float32),
  },
  "head": np.zeros((32, 2), np.float32),
}


def scores_of(trained, x, frozen):
  hidden = x @ frozen["kernel"]
  hidden += x @ trained["lora"]["a"] @ trained["lora"]["b"]
  return jax.nn.relu(hidden) @ trained["head"]


def loss_fn(trained, batch, frozen):  # argnums=0 is what is trained
  return toy.cross_entropy(scores_of(trained, batch["x"], frozen), batch)


grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=1.0)
tx = optax.chain(  # noise first: it has to see the whole sum
  optim.privatize(**toy.numbers(grad_fn)),
  optax.multi_transform(
    {"fast": optax.adam(1e-2), "slow": optax.adam(1e-3)},
    {"lora": "slow", "head": "fast"},
  ),
)
trained = toy.train(grad_fn, tx, trained, frozen)
accuracy = toy.accuracy(scores_of(trained, toy.x, frozen))
