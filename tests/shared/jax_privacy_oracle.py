"""Clipped sums of every strategy beside those of jax_privacy."""

from collections.abc import Iterable
from typing import Any

import jax
import jax_privacy
import numpy as np

from synthq_jax.optim import clipping


def compare(
  loss_fn: Any,
  params: Any,
  batch: Any,
  clip: float,
  strategies: Iterable[str],
  *,
  nothing: float = 0.0,
  key: Any = None,
) -> None:
  """Compares sums, norms and losses to 1e-5.

  Args:
    loss_fn: from parameters and a batch, and a key if one is given, to losses.
    params: of the model.
    batch: arrays [batch, ...].
    clip: norm.
    strategies: of clipping.
    nothing: leaves whose largest entry is below are zero but for rounding.
    key: of the step; an example's own follows from its position.
  """
  one = lambda p, b: loss_fn(p, b)[0]  # noqa: E731
  examples, keys = batch, {}
  if key is not None:
    one = lambda p, b: loss_fn(p, b[0], b[1][0])[0]  # noqa: E731
    places = np.arange(len(jax.tree.leaves(batch)[0]))
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    examples, keys = (batch, fold(key, places)), {"key": key}
  oracle = jax_privacy.clipped_grad(
    one, l2_clip_norm=clip, return_grad_norms=True, return_values=True
  )
  expected, aux = jax.jit(oracle)(params, examples)
  assert np.min(aux.grad_norms) > 0
  for strategy in strategies:
    grad_fn = clipping.clipped_grad(
      loss_fn, l2_clip_norm=clip, strategy=strategy
    )
    total, own = jax.jit(grad_fn)(params, batch, **keys)
    np.testing.assert_allclose(own.norms, aux.grad_norms, rtol=1e-5)
    np.testing.assert_allclose(own.losses, aux.values, rtol=1e-5)
    leaves = map(jax.tree.leaves, (total, expected))
    for a, b in zip(*leaves, strict=True):
      scale = np.abs(b).max()
      assert np.abs(a - b).max() <= (1e-5 * scale if scale > nothing else 1e-6)
