"""One example of many: what rounding adds to how far it moves the sum."""

import jax.numpy as jnp
import pytest

from tests.red_team import attack, sums

ALIGNED = 1 + 2e-3
DRIFTING = 1 + 5e-3  # blocks of 512 that processors add up one by one
every = pytest.mark.parametrize("strategy", attack.STRATEGIES)


@every
@pytest.mark.parametrize("size", [1, 1024])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_one_of_many_aligned_examples_moves_the_sum_by_its_clip_norm(
  dtype, size, strategy
):
  """Ghost clipping in bfloat16: 4 clip norms, where it summed in bfloat16."""
  moved = sums.sweep(strategy, dtype, size)
  assert 0.99 <= moved <= ALIGNED


@every
@pytest.mark.parametrize("name", ["summand", "product"])
def test_a_sum_does_not_drift_with_one_example(name, strategy):
  for size in (512, 4096):
    moved = sums.drift(name, strategy, size)
    assert 0.99 <= moved <= DRIFTING


@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost"])
def test_a_sum_of_lookups_does_not_drift_with_one_example(strategy):
  """They were added up one by one: 2 clip norms."""
  moved = sums.drift("lookup", strategy, 8192)
  assert 0.99 <= moved <= DRIFTING


@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost"])
def test_many_lookups_of_an_example_do_not_drift_either(strategy):
  """Each position was an addition of its own: 3 clip norms at 1,024."""
  moved = sums.drift("lookup", strategy, 1024, positions=128)
  assert 0.99 <= moved <= DRIFTING


@every
def test_microbatches_do_not_drift_with_one_example(strategy):
  """Partial sums were added up in float32: 2 clip norms at 8,192."""
  moved = sums.drift("summand", strategy, 8192, microbatch_size=1)
  assert 0.99 <= moved <= DRIFTING
