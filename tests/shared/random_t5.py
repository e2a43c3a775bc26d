"""Random parameters of a T5, for tests that train nothing."""

import functools

import jax
import numpy as np

from synthq_jax.models import t5


@functools.cache
def params(config, *, spread=0.1):
  """Without the initialisers, which compile slowly; `spread` is of scales."""
  shapes = jax.eval_shape(
    functools.partial(t5.init_params, config), jax.random.key(0)
  )
  rng = np.random.default_rng(0)

  def fill(path, leaf):
    noise = rng.normal(size=leaf.shape).astype(np.float32)
    if path[-1].key == "kernel":
      return noise / leaf.shape[0] ** 0.5
    return 1 + spread * noise if path[-1].key == "scale" else noise

  return jax.tree.map_with_path(fill, shapes)
