"""Random parameters for the tests of checkpoints, and a comparison of bits."""

import numpy as np

from synthq_jax.models import t5, t5_checkpoints


def make(config, dtype=np.float32):
  """Random parameters of a shape, without the time of an initialisation."""
  rng = np.random.default_rng(0)
  return t5_checkpoints.unflatten(
    {
      name: rng.normal(size=shape).astype(dtype)
      for name, shape in sorted(t5.shapes(config).items())
    }
  )


def assert_same_bits(left, right):
  left, right = t5_checkpoints.flatten(left), t5_checkpoints.flatten(right)
  assert list(left) == list(right)
  for name in left:
    assert left[name].dtype == right[name].dtype, name
    assert left[name].shape == right[name].shape, name
    assert left[name].tobytes() == right[name].tobytes(), name
