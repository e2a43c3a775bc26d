"""Learning rates, step by step."""

import numpy as np
import pytest

from synthq_jax.optim import schedules


def values(schedule, steps):
  return [float(schedule(step)) for step in steps]


def test_the_warmup_starts_above_zero_and_ends_at_the_peak():
  schedule = schedules.linear(0.8, steps=10**6, warmup_steps=4)
  np.testing.assert_allclose(
    values(schedule, range(6)), [0.2, 0.4, 0.6, 0.8, 0.8, 0.8], rtol=1e-5
  )


def test_without_warmup_the_first_step_has_the_peak():
  assert values(schedules.linear(0.5, steps=2), [0]) == [0.5]


def test_linear_goes_down_by_equal_parts():
  schedule = schedules.linear(1.0, steps=5, warmup_steps=1)
  np.testing.assert_allclose(
    values(schedule, range(6)), [1.0, 1.0, 0.75, 0.5, 0.25, 0.0], rtol=1e-6
  )


def test_numbers_out_of_range_are_refused():
  with pytest.raises(ValueError, match="peak=-1"):
    schedules.linear(-1.0, steps=3)
  with pytest.raises(ValueError, match="steps=3"):
    schedules.linear(1.0, steps=3, warmup_steps=3)
  with pytest.raises(ValueError, match="warmup_steps=-1"):
    schedules.linear(1.0, steps=3, warmup_steps=-1)
