"""Sums of clipped gradients in float64, one example after the other.

Slow, plain and without a line of `synthq_jax.optim`: what every strategy is to
agree with.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_LARGEST = float(np.finfo(np.float32).max)


def gradients(case: Any, batch: Any, key: Any = None) -> list[np.ndarray]:
  """Returns each example's flat gradient in float64, zero if it is not finite.

  A loss in half precision is differentiated as it stands: in float64 it would
  be another loss.

  Args:
    case: an entry of the table of losses.
    batch: arrays with a leading axis [batch].
    key: of the step, for losses that take one.
  """
  with jax.enable_x64(not case.half):
    params = _wide(case.params, case.half)

    def loss(params: Any, one: Any, *keys: Any) -> jax.Array:
      return case.loss(params, one, *keys)[0]

    of_one = jax.jit(jax.value_and_grad(loss))
    found = []
    size = len(jax.tree.leaves(batch)[0])
    for index, row in enumerate(np.arange(size)[:, None]):
      one = _wide(jax.tree.map(lambda x, row=row: x[row], batch), case.half)
      keys = () if key is None else (jax.random.fold_in(key, index),)
      value, gradient = of_one(params, one, *keys)
      found.append(_sound(np.float64(value), flat(gradient)))
  return found


def clip(gradient: np.ndarray, l2_clip_norm: float) -> np.ndarray:
  """Returns a gradient of at most this norm."""
  norm = np.sqrt(np.sum(gradient**2))
  return gradient * (l2_clip_norm / norm if norm > l2_clip_norm else 1.0)


def flat(tree: Any) -> np.ndarray:
  """Returns all leaves in one vector of float64."""
  leaves = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
  return np.concatenate(leaves)


def _sound(value: np.ndarray, gradient: np.ndarray) -> np.ndarray:
  with np.errstate(over="ignore", invalid="ignore"):
    fits = np.sum(gradient**2) < _LARGEST
    is_sound = fits and abs(value) < _LARGEST
  return gradient if is_sound else np.zeros_like(gradient)


def _wide(tree: Any, half: bool) -> Any:
  def wide(x: Any) -> jax.Array:
    x = np.asarray(x)
    floating = x.dtype == np.float32
    return jnp.asarray(x, jnp.float64 if floating and not half else x.dtype)

  return jax.tree.map(wide, tree)
