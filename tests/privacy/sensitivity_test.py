"""Closed forms against adversarial gradients."""

import dp_accounting
import numpy as np
import pytest

from synthq_jax.privacy import sensitivity


@pytest.mark.parametrize("relation", list(dp_accounting.NeighboringRelation))
def test_a_clipped_batch_gradient_moves_by_twice_the_norm(relation):
  bound = sensitivity.batch(l2_clip_norm=0.3, relation=relation)
  generator = np.random.default_rng(0)
  gradients = generator.normal(size=(1000, 2, 5)) * 10  # [case, side, dim]
  norms = np.linalg.norm(gradients, axis=-1, keepdims=True)
  clipped = gradients * np.minimum(1, 0.3 / norms)
  moved = np.linalg.norm(clipped[:, 0] - clipped[:, 1], axis=-1)
  assert moved.max() <= bound
  opposite = np.linalg.norm(clipped[0, 0] - -clipped[0, 0])
  np.testing.assert_allclose(opposite, bound, rtol=1e-12)


@pytest.mark.parametrize("norm", [0, -1.0, float("inf"), float("nan"), "1"])
def test_a_norm_that_is_no_norm_is_refused(norm):
  with pytest.raises(ValueError, match="l2_clip_norm"):
    sensitivity.batch(l2_clip_norm=norm, relation="REPLACE_ONE")


def test_an_unknown_relation_is_refused():
  with pytest.raises(ValueError, match="relation"):
    sensitivity.batch(l2_clip_norm=1.0, relation="ADD_ONE")
