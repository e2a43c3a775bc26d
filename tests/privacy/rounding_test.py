"""Numbers of claims as text: never less than they are, nor much more."""

import math

import numpy as np
import pytest

from synthq_jax.privacy import rounding

VALUES = np.random.default_rng(0).uniform(size=2000) * 10.0 ** np.tile(
  np.arange(-12, 8), 100
)


@pytest.mark.parametrize(
  ("write", "digits"), [(rounding.epsilon, 4), (rounding.delta, 3)]
)
def test_a_printed_number_is_at_least_the_number(write, digits):
  for value in VALUES:
    printed = write(value)
    assert value <= float(printed) <= value * (1 + 10.0 ** (1 - digits))
    assert len(printed.partition("e")[0].replace(".", "").strip("0")) <= digits


def test_the_last_bit_rounds_up_too():
  for value in (8.0, 0.57, 1e-5, 123.4):
    above = math.nextafter(value, math.inf)
    assert float(rounding.epsilon(value)) == value
    assert float(rounding.epsilon(above)) > above


@pytest.mark.parametrize(
  ("value", "places", "text"),
  [
    (7.9961, 2, "8"),
    (8.0001, 2, "8.01"),
    (0.0001, 2, "0.01"),
    (1e300, 2, "1e+300"),
    (math.inf, 2, "inf"),
    (0.0, 3, "0"),
  ],
)
def test_places_count_behind_the_point(value, places, text):
  assert rounding.up(value, places=places) == text


def test_the_printed_factor_on_the_odds_is_at_least_e_to_the_epsilon():
  for epsilon in np.r_[0.0, np.linspace(0.01, 30, 997), 700.0].tolist():
    printed = float(rounding.factor(epsilon).replace(",", ""))
    assert math.exp(epsilon) <= printed <= 1.01 * math.exp(epsilon), epsilon
