"""Classifiers on vectors that nothing trains any more: linear, or with layers.

There is no privacy in them: give them public vectors and labels.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, Int

__all__ = ["Head", "fit", "fit_layers", "predict"]

Head = tuple[Float[np.ndarray, "inputs_and_bias outputs"], ...]
"""The weights of each layer, the biases in the last row; ReLU between two."""


def fit(
  vectors: Float[np.ndarray, "image dim"],
  labels: Int[np.ndarray, " image"],
  *,
  num_classes: int,
  weight_decay: float = 1e-4,
) -> Head:
  """Fits a linear softmax classifier to the end; it is convex.

  >>> head = fit(np.array([[1.0], [-1.0]]), np.array([0, 1]), num_classes=2)
  >>> predict(head, np.array([[3.0], [-0.5]])).tolist()
  [0, 1]

  Args:
    vectors: of a frozen encoder.
    labels: in [0, num_classes).
    num_classes: how many classes there are, at least 2.
    weight_decay: times half of the squared weights, beside the mean loss.
  """
  from scipy import optimize, special

  inputs = _with_ones(vectors)
  wanted = np.eye(num_classes)[labels]
  shape = (inputs.shape[1], num_classes)

  def loss_and_gradient(flat: np.ndarray) -> tuple[float, np.ndarray]:
    weights = flat.reshape(shape)
    logits = inputs @ weights
    log_shares = special.log_softmax(logits, axis=1)
    loss = -np.sum(wanted * log_shares) / len(inputs)
    slope = inputs.T @ (np.exp(log_shares) - wanted) / len(inputs)
    loss += weight_decay / 2 * np.sum(weights**2)
    return loss, (slope + weight_decay * weights).reshape(-1)

  found = optimize.minimize(
    loss_and_gradient, np.zeros(shape).reshape(-1), jac=True, method="L-BFGS-B"
  )
  return (found.x.reshape(shape),)


def fit_layers(
  vectors: Float[np.ndarray, "image dim"],
  labels: Int[np.ndarray, " image"],
  *,
  num_classes: int,
  hidden: Sequence[int],
  epochs: int = 10,
  batch_size: int = 100,
  learning_rate: float = 1e-3,
  seed: int = 0,
) -> Head:
  """Trains a classifier with hidden layers, by Adam for some epochs.

  >>> head = fit_layers(np.eye(2), np.array([0, 1]), num_classes=2, hidden=(4,))
  >>> [layer.shape for layer in head]
  [(3, 4), (5, 2)]

  Args:
    vectors: of a frozen encoder.
    labels: in [0, num_classes).
    num_classes: how many classes there are, at least 2.
    hidden: sizes of the hidden layers, the first one first.
    epochs: how often every vector is read, at least 1.
    batch_size: vectors of a step; what an epoch leaves over is left out.
    learning_rate: of Adam, constant.
    seed: of the first weights and of the order.

  References:
    Kong, Munoz Medina and Ribero (2023), arXiv:2310.03104, section 5: layers of
    64, 32 and 20 outputs on CIFAR-100, ten epochs.
  """
  rng = np.random.default_rng(seed)
  sizes = [np.shape(vectors)[1], *hidden, num_classes]
  params = [
    jnp.asarray(rng.normal(0, np.sqrt(2 / n), (n + 1, m)), jnp.float32)
    .at[-1]
    .set(0.0)
    for n, m in itertools.pairwise(sizes)
  ]
  size = min(batch_size, len(labels))
  count = len(labels) // size * size
  rows = [rng.permutation(len(labels))[:count] for _ in range(epochs)]
  tx = optax.adam(learning_rate)

  def loss(params, inputs, wanted):
    logits = _logits(params, inputs, jnp)
    return jnp.mean(
      optax.softmax_cross_entropy_with_integer_labels(logits, wanted)
    )

  @jax.jit
  def fitted(state, inputs, wanted, batches):  # arguments: programs are kept
    def step(state, chosen):
      params, of_adam = state
      grads = jax.grad(loss)(params, inputs[chosen], wanted[chosen])
      updates, of_adam = tx.update(grads, of_adam)
      return (optax.apply_updates(params, updates), of_adam), None

    return jax.lax.scan(step, state, batches)[0]

  params, _ = fitted(
    (params, tx.init(params)),
    jnp.asarray(vectors, jnp.float32),
    jnp.asarray(labels),
    jnp.asarray(np.concatenate(rows).reshape(-1, size)),
  )
  return tuple(np.asarray(layer) for layer in params)


def predict(
  head: Head, vectors: Float[np.ndarray, "image dim"]
) -> Int[np.ndarray, " image"]:
  """Returns the classes that a head finds most likely.

  Args:
    head: from `fit` or `fit_layers`.
    vectors: of the same encoder.
  """
  return np.argmax(_logits(head, np.asarray(vectors, np.float64), np), axis=1)


def _logits(head, x, xp):
  """Returns the outputs of the last layer; `xp` is numpy, or JAX's."""
  for number, layer in enumerate(head):
    x = (xp.maximum(x, 0) if number else x) @ layer[:-1] + layer[-1:]
  return x


def _with_ones(vectors: np.ndarray) -> np.ndarray:
  vectors = np.asarray(vectors, np.float64)
  return np.concatenate([vectors, np.ones((len(vectors), 1))], axis=1)
