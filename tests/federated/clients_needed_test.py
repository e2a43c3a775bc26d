"""How many clients user-level privacy takes, and the refusal of fewer."""

import pytest

from synthq_jax.federated import cohorts, user_privacy
from synthq_jax.privacy import accounting

ENCODER = 951_040  # parameters of the shipped encoder


def settings(num_clients, *, per_round=None, delta=None, noise=None, epsilon=8):
  """Settings of 100 rounds that reach epsilon, or have so much noise."""
  sampler = cohorts.poisson(
    num_clients=num_clients, clients_per_round=per_round or num_clients
  )
  delta = min(1e-3, 0.4 / num_clients) if delta is None else delta
  if noise is None:
    noise = accounting.noise_multiplier(
      epsilon=epsilon, delta=delta, sampler=sampler, steps=100
    )
  return user_privacy.claim(
    sampler=sampler,
    rounds=100,
    l2_clip_norm=1.0,
    noise_multiplier=noise,
    delta=delta,
  )


def refusal(privacy, num_parameters=ENCODER):
  with pytest.raises(ValueError) as caught:
    user_privacy.check_meaningful(privacy, num_parameters)
  words = str(caught.value)
  assert "\n" not in words and "would not be meaningful" in words
  assert "claim privacy for the examples inside of each client" in words
  return words


@pytest.mark.parametrize("per_round", [3, 9])
def test_nine_clients_are_refused_whatever_delta_and_noise_they_choose(
  per_round,
):
  for delta in (9**-1.1, 1e-3, 1e-6):
    assert "of 9 clients" in refusal(
      settings(9, per_round=per_round, delta=delta)
    )
  # Little noise for a small ratio, much noise for a small epsilon.
  assert "epsilon=" in refusal(settings(9, per_round=per_round, noise=0.6))
  assert "times as far" in refusal(settings(9, per_round=per_round, noise=50.0))


def test_the_refusal_says_how_far_noise_goes_and_how_many_clients_it_takes():
  privacy = settings(9, delta=1e-3)
  words = refusal(privacy)
  assert "noise would move the 951,040 parameters 52 times as far" in words
  assert "have about 469 of them in a round, not 9, for this noise" in words
  # So many do, at that noise.
  noise = privacy.noise_multiplier
  many = settings(469, delta=1e-3, noise=noise)
  user_privacy.check_meaningful(many, ENCODER)
  fewer = settings(460, delta=1e-3, noise=noise)
  assert "times as far" in refusal(fewer)


def test_a_thousand_clients_and_more_are_not_refused():
  user_privacy.check_meaningful(settings(1024, per_round=102), ENCODER)
  user_privacy.check_meaningful(settings(10_000, per_round=200), ENCODER)


def test_delta_is_bounded_by_the_number_of_clients():
  user_privacy.check_meaningful(settings(5000, delta=1e-4), ENCODER)
  words = refusal(settings(5000, delta=1.1e-4))
  assert "lets 0.55 of them be laid bare" in words


def test_an_epsilon_above_ten_is_refused():
  user_privacy.check_meaningful(settings(5000, epsilon=9.9), ENCODER)
  assert "expected at most 10" in refusal(settings(5000, epsilon=10.5))


def test_signal_to_noise_is_that_of_clients_who_all_agree():
  """100 rounds of noise 2/400 on each of 2500 coordinates, clip norm 1."""
  privacy = settings(500, per_round=400, noise=2.0)
  noise = (100 * 2500 * (2.0 / 400) ** 2) ** 0.5
  ratio = user_privacy.signal_to_noise(privacy, 2500)
  assert ratio == pytest.approx(100 * 1.0 / noise)


@pytest.mark.parametrize(
  ("num_parameters", "share", "documented"),
  [(ENCODER, 0.1, 1024), (2 * ENCODER, 0.1, 1117), (60_000_000, 1.0, 4213)],
)
def test_the_table_of_clients_needed_is_right(
  num_parameters, share, documented
):
  found = user_privacy.clients_needed(
    epsilon=8.0, rounds=100, share=share, num_parameters=num_parameters
  )
  assert found == pytest.approx(documented, rel=0.01)
  table = user_privacy.check_meaningful.__doc__
  row = next(x for x in table.splitlines() if f"{num_parameters:,}" in x)
  assert f"{documented:,}" in row
