"""What Adafactor factors and refuses; t5x_adafactor_test.py has its numbers."""

import jax
import jax.numpy as jnp
import pytest

from synthq_jax import optim


def test_only_two_long_axes_are_factored():
  params = {"long": jnp.zeros((128, 130)), "thin": jnp.zeros((127, 500))}
  state = optim.adafactor(0.1).init(params)
  shapes = sorted(leaf.shape for leaf in jax.tree.leaves(state) if leaf.ndim)
  assert shapes == [(1,), (1,), (1,), (127, 500), (128,), (130,)]


@pytest.mark.parametrize(
  "options",
  [{"decay_rate": 0.0}, {"clipping_threshold": 0.0}],
  ids=str,
)
def test_a_number_out_of_range_is_refused_by_name(options):
  with pytest.raises(ValueError, match=next(iter(options))):
    optim.adafactor(0.1, **options)


def test_parameters_are_needed():
  transform = optim.adafactor(0.1)
  with pytest.raises(ValueError, match="params"):
    transform.update(jnp.ones(3), transform.init(jnp.ones(3)))
