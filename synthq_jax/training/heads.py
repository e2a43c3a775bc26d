"""Trains classifiers on frozen vectors: linear, or with hidden layers.

They have no privacy: give them public vectors and labels.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, Int

__all__ = ["Head", "fit", "fit_layers", "predict"]

_BATCH_SIZE = 100
_LEARNING_RATE = 1e-3

Head = tuple[Float[np.ndarray, "inputs_and_bias outputs"], ...]
"""The weights of each layer, with the biases in the last row; ReLU in between."""


def fit(
  vectors: Float[np.ndarray, "image dim"],
  labels: Int[np.ndarray, " image"],
  *,
  num_classes: int,
  weight_decay: float = 1e-4,
) -> Head:
  """Fits a linear softmax classifier by L-BFGS; the loss is convex.

  >>> head = fit(np.array([[1.0], [-1.0]]), np.array([0, 1]), num_classes=2)
  >>> predict(head, np.array([[3.0], [-0.5]])).tolist()
  [0, 1]

  Args:
    vectors: vectors of a frozen encoder.
    labels: classes, in [0, num_classes).
    num_classes: the number of classes, at least 2.
    weight_decay: the factor of half the squared weights, added to the mean loss.
  """
  from scipy import optimize, special

  inputs = _append_ones(vectors)
  targets = np.eye(num_classes)[labels]
  shape = (inputs.shape[1], num_classes)

  def loss_and_gradient(flat: np.ndarray) -> tuple[float, np.ndarray]:
    weights = flat.reshape(shape)
    logits = inputs @ weights
    log_shares = special.log_softmax(logits, axis=1)
    loss = -np.sum(targets * log_shares) / len(inputs)
    slope = inputs.T @ (np.exp(log_shares) - targets) / len(inputs)
    loss += weight_decay / 2 * np.sum(weights**2)
    return loss, (slope + weight_decay * weights).reshape(-1)

  optimum = optimize.minimize(
    loss_and_gradient, np.zeros(shape).reshape(-1), jac=True, method="L-BFGS-B"
  )
  return (optimum.x.reshape(shape),)


def fit_layers(
  vectors: Float[np.ndarray, "image dim"],
  labels: Int[np.ndarray, " image"],
  *,
  num_classes: int,
  hidden: Sequence[int],
  epochs: int,
) -> Head:
  """Trains a classifier with hidden layers by Adam, from a fixed seed.

  >>> head = fit_layers(np.eye(2), np.array([0, 1]), num_classes=2, hidden=(4,), epochs=1)
  >>> [layer.shape for layer in head]
  [(3, 4), (5, 2)]

  Args:
    vectors: vectors of a frozen encoder.
    labels: classes, in [0, num_classes).
    num_classes: the number of classes, at least 2.
    hidden: sizes of the hidden layers, the first one first.
    epochs: passes over the vectors, at least 1; each leaves out an incomplete
      last batch.

  References:
    Kong, Munoz Medina and Ribero (2023), arXiv:2310.03104, appendix B.2: three
    layers on CIFAR-100, of 64, 32 and 20 outputs in the published code; ten epochs.
  """
  rng = np.random.default_rng(0)
  sizes = [np.shape(vectors)[1], *hidden, num_classes]
  params = [
    jnp.asarray(rng.normal(0, np.sqrt(2 / n), (n + 1, m)), jnp.float32)
    .at[-1]
    .set(0.0)
    for n, m in itertools.pairwise(sizes)
  ]
  size = min(_BATCH_SIZE, len(labels))
  count = len(labels) // size * size
  rows = [rng.permutation(len(labels))[:count] for _ in range(epochs)]
  tx = optax.adam(_LEARNING_RATE)

  def loss(params, inputs, labels):
    logits = _compute_logits(params, inputs, jnp)
    return jnp.mean(
      optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    )

  @jax.jit
  def fitted(
    state, inputs, labels, batches
  ):  # no constants: programs are cached
    def step(state, rows):
      params, opt_state = state
      grads = jax.grad(loss)(params, inputs[rows], labels[rows])
      updates, opt_state = tx.update(grads, opt_state)
      return (optax.apply_updates(params, updates), opt_state), None

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
  """Returns the most likely class of each vector.

  Args:
    head: a head of `fit` or `fit_layers`.
    vectors: vectors of the same encoder.
  """
  logits = _compute_logits(head, np.asarray(vectors, np.float64), np)
  return np.argmax(logits, axis=1)


def _compute_logits(head, x, xp):
  """Computes the outputs of the last layer; `xp` is numpy or jax.numpy."""
  for number, layer in enumerate(head):
    x = (xp.maximum(x, 0) if number else x) @ layer[:-1] + layer[-1:]
  return x


def _append_ones(vectors: np.ndarray) -> np.ndarray:
  vectors = np.asarray(vectors, np.float64)
  return np.concatenate([vectors, np.ones((len(vectors), 1))], axis=1)
