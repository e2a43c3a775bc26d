"""A linear classifier on vectors that nothing trains any more."""

import numpy as np
from jaxtyping import Float, Int

__all__ = ["fit", "predict"]


def fit(
  vectors: Float[np.ndarray, "image dim"],
  labels: Int[np.ndarray, " image"],
  *,
  num_classes: int,
  weight_decay: float = 1e-4,
) -> Float[np.ndarray, "dim_and_bias label"]:
  """Fits a linear softmax classifier to the end; it is convex.

  There is no privacy in it: give it public vectors and labels.

  >>> head = fit(np.array([[1.0], [-1.0]]), np.array([0, 1]), num_classes=2)
  >>> predict(head, np.array([[3.0], [-0.5]])).tolist()
  [0, 1]

  Args:
    vectors: of a frozen encoder.
    labels: in [0, num_classes).
    num_classes: how many classes there are, at least 2.
    weight_decay: times half of the squared weights, beside the mean loss.

  Returns:
    Weights, the biases in the last row.
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
  return found.x.reshape(shape)


def predict(
  head: Float[np.ndarray, "dim_and_bias label"],
  vectors: Float[np.ndarray, "image dim"],
) -> Int[np.ndarray, " image"]:
  """Returns the classes that a head finds most likely.

  Args:
    head: from `fit`.
    vectors: of the same encoder.
  """
  return np.argmax(_with_ones(vectors) @ head, axis=1)


def _with_ones(vectors: np.ndarray) -> np.ndarray:
  vectors = np.asarray(vectors, np.float64)
  return np.concatenate([vectors, np.ones((len(vectors), 1))], axis=1)
