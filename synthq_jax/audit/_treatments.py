"""What becomes of true vectors before they are sent."""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

__all__ = ["Gaussian", "Treatment", "hidden", "raw", "send"]


class Treatment(Protocol):
  """What becomes of true vectors before they are sent; traced by JAX."""

  def __call__(
    self, vectors: Float[Array, "row dim"], key: Key[Array, ""]
  ) -> Float[Array, "row sent_dim"]:
    """Returns what is sent for each row; a fresh key is fresh noise."""


def raw(
  vectors: Float[Array, "row dim"], key: Key[Array, ""]
) -> Float[Array, "row dim"]:
  """Sends the vectors as they are."""
  del key
  return vectors


def hidden(
  vectors: Float[Array, "row dim"], key: Key[Array, ""]
) -> Float[Array, "row dim"]:
  """Sends zeros: for the decoder that others are compared with."""
  del key
  return jnp.zeros_like(vectors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gaussian:
  """Adds noise to every coordinate.

  Who receives a vector k times, each time with noise of its own, knows it as
  well as from one with this standard deviation over sqrt(k): audit that.
  """

  standard_deviation: float
  """Of the noise of each coordinate, at least 0."""

  def __post_init__(self):
    if not self.standard_deviation >= 0:
      raise ValueError(
        "Gaussian.standard_deviation must be at least 0, got"
        f" standard_deviation={self.standard_deviation}"
      )

  def __call__(self, vectors, key):
    noise = jax.random.normal(key, vectors.shape, vectors.dtype)
    return vectors + self.standard_deviation * noise


def send(
  treatment: Treatment | None,
  vectors: Float[np.ndarray, "row dim"],
  key: Key[Array, ""],
) -> Float[np.ndarray, "row sent_dim"]:
  """Returns what is sent for true vectors.

  Args:
    treatment: what is done to them; None for nothing.
    vectors: of sentences.
    key: of the noise.
  """
  sent = jax.jit(treatment or raw)(jnp.asarray(vectors), key)
  return np.asarray(sent, np.float32)
