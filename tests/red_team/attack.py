"""Attacks on clipped sums: each returns how far one record moves them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from synthq_jax.optim import clipping
from tests.red_team import oracle

CLIP = 1.0
STRATEGIES = ("vmap", "bookkeeping", "ghost")


KEY = jax.random.key(17)


@functools.cache
def _truth(case: Any, rows: int) -> list[np.ndarray]:
  key = KEY if case.keyed else None
  return oracle.gradients(case, case.batch(rows), key)


def table(case: Any, strategy: str, rows: int, *, clip: float = CLIP, **options):
  """Compares a loss's clipped sum with the oracle, and examples with the clip.

  Returns:
    How far the sum is off, each example's part added up, in clip norms beyond
    the tolerance of 1e-5 of the sum; the largest contribution of one example
    alone among padding; and the largest move when one is taken from the rest.
  """
  batch = case.batch(rows)
  key = KEY if case.keyed else None
  grad_fn = clipping.clipped_grad(
    case.loss, l2_clip_norm=clip, strategy=strategy, **options
  )
  nobody = np.zeros((1, rows), bool)
  each = np.eye(rows, dtype=bool)
  masks = jnp.asarray(np.concatenate([nobody, each, ~each]))

  def sums(params, batch, masks):
    one = lambda mask: grad_fn(  # noqa: E731
      params, batch, key=key, is_padding_example=mask
    )[0]
    return jax.lax.map(one, masks)

  found = jax.jit(sums)(case.params, batch, masks)
  found = np.stack(
    [oracle.flat(jax.tree.map(lambda x: x[i], found)) for i in range(len(masks))]
  )
  whole, without, alone = found[0], found[1 : rows + 1], found[rows + 1 :]
  truth = [oracle.clip(g, clip) for g in _truth(case, rows)]
  off = 0.0
  for index, (got, expected) in enumerate(zip(alone, truth, strict=True)):
    if index in case.zeros and not got.any():
      truth[index] = got
      continue
    off = max(off, np.linalg.norm(got - expected) / clip)
  rest = np.linalg.norm(whole - sum(truth)) - 1e-5 * np.linalg.norm(whole)
  off = max(off, rest / rows / clip)
  return (
    off,
    max(np.linalg.norm(alone, axis=1)) / clip,
    max(np.linalg.norm(whole - without, axis=1)) / clip,
  )
