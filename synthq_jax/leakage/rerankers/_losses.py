"""Losses of scores in pairs: 2i relevant, 2i + 1 not."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["cross_entropy", "hinge", "softmax"]


def hinge(scores: Float[Array, " batch"]) -> Float[Array, ""]:
  """Returns the mean of max(0, 1 - s+ + s-).

  >>> hinge(jnp.array([2.0, 0.5, 0.0, 1.0])).item()
  1.0
  """
  return jnp.mean(jax.nn.relu(1.0 - scores[0::2] + scores[1::2]))


def softmax(scores: Float[Array, " batch"]) -> Float[Array, ""]:
  """Returns the mean of -log(exp(s+) / (exp(s+) + exp(s-))).

  >>> round(softmax(jnp.array([1.0, 1.0])).item(), 4)
  0.6931
  """
  return jnp.mean(jax.nn.softplus(scores[1::2] - scores[0::2]))


def cross_entropy(
  log_probabilities: Float[Array, "batch 2"],
) -> Float[Array, ""]:
  """Returns the mean cross-entropy of rows whose labels are 1, 0, 1, 0, ...

  Args:
    log_probabilities: of the labels 0 and 1, not relevant and relevant.
  """
  relevant, other = log_probabilities[0::2, 1], log_probabilities[1::2, 0]
  return -(jnp.mean(relevant) + jnp.mean(other)) / 2
