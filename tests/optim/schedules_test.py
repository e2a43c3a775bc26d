"""Learning rates, step by step."""

import numpy as np
import pytest

from synthq_jax.optim import schedules


def values(schedule, steps):
  return [float(schedule(step)) for step in steps]


def test_the_warmup_starts_above_zero_and_ends_at_the_peak():
  schedule = schedules.constant(0.8, warmup_steps=4)
  np.testing.assert_allclose(
    values(schedule, range(6)), [0.2, 0.4, 0.6, 0.8, 0.8, 0.8], rtol=1e-6
  )


def test_without_warmup_the_first_step_has_the_peak():
  assert values(schedules.constant(0.5), [0, 9]) == [0.5, 0.5]
  assert values(schedules.linear(0.5, steps=2), [0]) == [0.5]


def test_rsqrt_halves_when_the_steps_have_quadrupled():
  schedule = schedules.rsqrt(1.0, warmup_steps=100)
  np.testing.assert_allclose(
    values(schedule, [49, 99, 399, 1599]), [0.5, 1.0, 0.5, 0.25], rtol=1e-6
  )


def test_cosine_is_half_way_down_in_the_middle():
  schedule = schedules.cosine(1.0, steps=110, warmup_steps=10, end=0.2)
  np.testing.assert_allclose(
    values(schedule, [9, 60, 110, 500]), [1.0, 0.6, 0.2, 0.2], rtol=1e-5
  )


def test_linear_goes_down_by_equal_parts():
  schedule = schedules.linear(1.0, steps=5, warmup_steps=1)
  np.testing.assert_allclose(
    values(schedule, range(6)), [1.0, 1.0, 0.75, 0.5, 0.25, 0.0], rtol=1e-6
  )


def test_numbers_out_of_range_are_refused():
  with pytest.raises(ValueError, match="peak=-1"):
    schedules.constant(-1.0)
  with pytest.raises(ValueError, match="warmup_steps=0"):
    schedules.rsqrt(1.0, warmup_steps=0)
  with pytest.raises(ValueError, match="steps=3"):
    schedules.cosine(1.0, steps=3, warmup_steps=3)
  with pytest.raises(ValueError, match="warmup_steps=-1"):
    schedules.linear(1.0, steps=3, warmup_steps=-1)
