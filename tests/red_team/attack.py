"""Every loss of the table beside the oracle."""

import functools
from typing import Any

import jax
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


def table(
  case: Any, strategy: str, rows: int, **options: Any
) -> tuple[float, float, float]:
  """Compares a loss's clipped sum with the oracle, and examples with the clip.

  Args:
    case: an entry of the table of losses.
    strategy: of clipping.
    rows: of the batch.
    **options: for `clipped_grad`.

  Returns:
    In clip norms: how far an example's part is off, alone or as its share of
    the whole sum beyond 1e-5 of that; the largest contribution of one example
    among padding; and the largest move when one is taken from the rest.
  """
  batch = case.batch(rows)
  key = KEY if case.keyed else None
  grad_fn = clipping.clipped_grad(
    case.loss, l2_clip_norm=CLIP, strategy=strategy, **options
  )
  each = np.eye(rows, dtype=bool)
  nobody = np.zeros((1, rows), bool)
  masks = np.concatenate([nobody, each, ~each, ~nobody])

  def sums(params: Any, batch: Any, masks: Any) -> Any:
    def one(mask: jax.Array) -> Any:
      return grad_fn(params, batch, key=key, is_padding_example=mask)[0]

    return jax.lax.map(one, masks)

  found = jax.jit(sums)(case.params, batch, masks)
  found = np.concatenate(
    [
      np.asarray(x, np.float64).reshape(len(masks), -1)
      for x in jax.tree.leaves(found)
    ],
    axis=1,
  )
  whole, without, alone = found[0], found[1 : rows + 1], found[rows + 1 : -1]
  truth = [oracle.clip(g, CLIP) for g in _truth(case, rows)]
  for index in case.zeros:
    if not alone[index].any():
      truth[index] = alone[index]
  far = np.linalg.norm(whole - sum(truth)) - 1e-5 * np.linalg.norm(whole)
  off = max(far / rows, np.max(np.linalg.norm(alone - truth, axis=1)))
  assert not found[-1].any(), "padding alone adds something"
  return (
    off / CLIP,
    np.max(np.linalg.norm(alone, axis=1)) / CLIP,
    np.max(np.linalg.norm(whole - without, axis=1)) / CLIP,
  )
