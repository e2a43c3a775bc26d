"""What the best of several private trainings costs."""

import contextlib
import dataclasses
import itertools
import logging
import math

import numpy as np
import pytest
from scipy import optimize, stats

from synthq_jax.cli import main
from synthq_jax.privacy import (
  accounting,
  calculator,
  claim,
  joint,
  ledger,
  sampling,
  selection,
)

NUM = 1000
DELTA = 1 / (2 * NUM)
EVERYTHING = sampling.Poisson(
  num_examples=NUM, expected_batch_size=NUM, max_batch_size=NUM + 1
)
POISSON = sampling.Poisson.with_margin(num_examples=NUM, expected_batch_size=50)
ORDERS = np.array(accounting._RDP_ORDERS)
LAWS = list(selection.LAWS)


def gaussian(noise):
  return accounting.Run(EVERYTHING, noise, 1)


def epsilon(run, trials, delta=DELTA):
  return accounting.composed_epsilon([run._replace(trials=trials)], delta=delta)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("mean", [1, 2.5, 40])
def test_the_mean_of_a_law_is_what_it_says(law, mean):
  number = selection.Trials(mean=mean, law=law).distribution()
  counts = np.arange(5000)
  chances = number.pmf(counts)
  assert chances.sum() == pytest.approx(1)
  assert counts @ chances == pytest.approx(mean, rel=1e-6)


def gamma_of(mean, shape):
  """From definition 1's mean, by a root of its own."""

  def excess(gamma):
    if shape == 0:
      return (1 / gamma - 1) / math.log(1 / gamma) - mean
    return shape * (1 - gamma) / (gamma * (1 - gamma**shape)) - mean

  return optimize.brentq(excess, 1e-9, 1 - 1e-9, xtol=1e-15)


def from_renyi(divergences, delta):
  """Canonne, Kamath and Steinke (2020), proposition 12."""
  bounds = divergences + np.log1p(-1 / ORDERS)
  bounds -= np.log(delta * ORDERS) / (ORDERS - 1)
  return bounds.min()


@pytest.mark.parametrize("mean", [3, 30])
@pytest.mark.parametrize("law", ["logarithmic", "geometric"])
def test_negative_binomial_trials_cost_what_theorem_2_says(law, mean):
  shape, noise = selection.LAWS[law], 2.0
  own = ORDERS / (2 * noise**2)
  extra = (1 - 1 / ORDERS) * own
  extra += math.log(1 / gamma_of(mean, shape)) / ORDERS
  best = own + (1 + shape) * extra.min() + math.log(mean) / (ORDERS - 1)
  best = np.minimum.accumulate(best[::-1])[::-1]  # divergences grow
  found = epsilon(gaussian(noise), selection.Trials(mean=mean, law=law))
  assert found == pytest.approx(from_renyi(best, DELTA), rel=1e-4)


@pytest.mark.parametrize("mean", [3, 30])
def test_poisson_trials_cost_what_theorem_6_says(mean):
  """Its delta from the exact Gaussian: no bound on it is smaller."""
  noise = 2.0
  own = ORDERS / (2 * noise**2)
  margin = np.log1p(1 / (ORDERS - 1))
  lost = stats.norm.cdf(0.5 / noise - margin * noise)
  lost -= np.exp(margin) * stats.norm.cdf(-0.5 / noise - margin * noise)
  best = own + mean * lost + math.log(mean) / (ORDERS - 1)
  found = epsilon(gaussian(noise), selection.Trials(mean=mean, law="Poisson"))
  assert from_renyi(best, DELTA) <= found <= 2 * from_renyi(best, DELTA)


def attained(number, noise, value):
  """The exact delta of the greatest of K Gaussians, cut into cells.

  One record moves the mean of each by 1. Where K is 0, the last cell.
  """
  edges = np.append(np.linspace(-6 * noise, 8 * noise, 1200), np.inf)
  counts = np.arange(0, 4000)
  chance = number.pmf(counts)
  assert chance.sum() > 1 - 1e-9

  def law_of(mean):
    below = stats.norm.cdf(edges, mean, noise)
    greatest = sum(
      p * below**k for k, p in zip(counts, chance, strict=True) if p > 1e-16
    )
    return np.append(np.diff(greatest, prepend=chance[0]), chance[0])

  first, second = law_of(0.0), law_of(1.0)
  return max(
    np.maximum(a - math.exp(value) * b, 0).sum()
    for a, b in ((first, second), (second, first))
  )


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("mean", [4, 20])
def test_the_price_holds_by_brute_force_and_that_of_one_training_does_not(
  law, mean
):
  trials = selection.Trials(mean=mean, law=law)
  number = trials.distribution()
  for noise in (1.0, 3.0):
    run = gaussian(noise)
    assert attained(number, noise, epsilon(run, trials)) <= DELTA
    assert attained(number, noise, epsilon(run, None)) > 1.5 * DELTA


@pytest.mark.parametrize("law", ["logarithmic", "geometric"])
@pytest.mark.parametrize("score_noise", [None, 5.0])
def test_a_grid_of_one_point_costs_what_the_best_of_its_trials_does(
  law, score_noise
):
  trials = selection.Trials(mean=6, law=law, score_noise=score_noise)
  run = accounting.Run(POISSON, 0.9, 200)
  price = selection.grid_price([run, run], trials, delta=DELTA)
  assert price == pytest.approx(epsilon(run, trials), rel=1e-6)


def test_a_score_is_paid_for_as_one_more_step_of_each_trial():
  """Two Gaussians are one whose precisions add up."""
  scored = selection.Trials(mean=6, score_noise=3.0)
  both = (1 / 2.0**2 + 1 / 3.0**2) ** -0.5
  found = epsilon(gaussian(2.0), scored)
  assert found == pytest.approx(
    epsilon(gaussian(both), selection.Trials(mean=6))
  )
  assert found > 1.1 * epsilon(gaussian(2.0), selection.Trials(mean=6))
  with pytest.raises(ValueError, match="score_noise"):
    selection.Trials(mean=6, score_noise=0.0)


def test_a_score_pays_for_what_moves_past_where_its_noise_ends():
  """At .1 four fifths of a score that moves by one lie past the noise."""
  few = selection.Trials(mean=1, score_noise=0.1)
  assert math.isinf(epsilon(gaussian(5.0), few))
  assert math.isinf(selection.grid_price([gaussian(5.0)], few, delta=1e-5))
  assert math.isfinite(
    epsilon(gaussian(5.0), dataclasses.replace(few, score_noise=0.3))
  )


@pytest.mark.parametrize("law", ["logarithmic", "geometric"])
def test_the_point_with_the_largest_divergence_decides_the_price_of_a_grid(
  law, monkeypatch
):
  """By brute force: that of the quietest point alone would be false."""
  trials, noises = selection.Trials(mean=6, law=law), (1.0, 4.0)
  runs = [gaussian(noise) for noise in noises]
  price = selection.grid_price(runs, trials, delta=DELTA)
  assert price == selection.grid_price(runs[:1], trials, delta=DELTA)
  wrong = selection.grid_price(runs[1:], trials, delta=DELTA)
  cdf = stats.norm.cdf
  # Half of the trials are of the other point, which always scores less.
  monkeypatch.setattr(stats.norm, "cdf", lambda *known: 0.5 + 0.5 * cdf(*known))
  number = trials.distribution()
  assert attained(number, 1.0, price) <= DELTA
  assert attained(number, 1.0, wrong) > 1.5 * DELTA


def test_mechanisms_that_cross_cost_more_than_each_by_itself():
  """A large batch for few steps, and a small one for many, equally dear."""
  runs = []
  for size, steps in ((20, 1000), (400, 8)):
    sampler = sampling.Poisson.with_margin(
      num_examples=NUM, expected_batch_size=size
    )
    noise = accounting.noise_multiplier(
      epsilon=2.0, delta=DELTA, sampler=sampler, steps=steps
    )
    runs.append(accounting.Run(sampler, noise, steps))
  trials = selection.Trials(mean=10)
  alone = [selection.grid_price([x], trials, delta=DELTA) for x in runs]
  both = selection.grid_price(runs, trials, delta=DELTA)
  assert max(alone) <= both <= sum(alone)


def test_orders_that_are_left_out_are_not_told_on_the_screen(
  caplog, monkeypatch
):
  """Sums for fractional orders do not converge at such noise."""
  sampler = sampling.Poisson.with_margin(
    num_examples=NUM, expected_batch_size=300
  )
  run = accounting.Run(sampler, 1.0, 20)
  trials = selection.Trials(mean=3)
  level = logging.getLogger("absl").level
  assert accounting.composed_epsilon([run._replace(trials=trials)], delta=DELTA)
  assert not [x for x in caplog.records if "converge" in x.message]
  assert logging.getLogger("absl").level == level
  # And there was something to be told.
  monkeypatch.setattr(accounting, "_quiet_orders", contextlib.nullcontext)
  accounting._epsilon.cache_clear()
  accounting.composed_epsilon([run._replace(trials=trials)], delta=DELTA)
  assert [x for x in caplog.records if "converge" in x.message]


def test_many_trials_are_cheaper_by_selection_and_few_by_composition():
  run = accounting.Run(POISSON, 1.0, 200)
  few = selection.prices(run, 2, delta=DELTA)
  many = selection.prices(run, 50, delta=DELTA)
  assert set(few) == {"composition", *LAWS}
  assert min(few, key=few.get) == "composition"
  assert min(many, key=many.get) in LAWS
  assert many["composition"] > 2 * min(many.values())
  one = selection.prices(run, 1, delta=DELTA)
  alone = accounting.composed_epsilon([run], delta=DELTA)
  assert one["composition"] == alone < min(one[law] for law in LAWS)


def test_truncated_batches_are_paid_for_in_every_trial():
  tight = sampling.Poisson(
    num_examples=NUM, expected_batch_size=50, max_batch_size=80
  )
  run, trials = accounting.Run(tight, 1.0, 100), selection.Trials(mean=10)
  owed = accounting._overflow_delta((run,))
  assert owed > 0
  many = accounting._overflow_delta((run._replace(trials=trials),))
  assert many == pytest.approx(10 * owed)


def made(trials=None, **changes):
  settings = {
    "sampler": POISSON,
    "steps": 200,
    "noise_multiplier": 1.0,
    "l2_clip_norm": 0.1,
  }
  return claim.Claim(**(settings | changes), trials=trials)


def test_the_winner_is_claimed_and_composed_and_told_as_such(tmp_path):
  trials = selection.Trials(mean=10)
  winner, alone = made(trials), made()
  assert winner.epsilon == epsilon(accounting.Run(POISSON, 1.0, 200), trials)
  assert winner.epsilon > 1.5 * alone.epsilon
  path = tmp_path / "ledger.jsonl"
  promised = winner.enter(path, "tuned/1")
  assert ledger.read(path)["tuned/1"] == promised  # JSON and back
  both = joint.claim([promised, alone.statement("other/1")])
  assert both.epsilon > max(winner.epsilon, alone.epsilon)
  assert joint.claim([promised]).epsilon == winner.epsilon
  again = joint.claim([promised, promised], delta=winner.delta)
  assert again.epsilon == pytest.approx(winner.epsilon)


def test_what_is_no_law_or_has_no_bound_is_refused():
  for fields in ({"mean": 0.5}, {"mean": math.inf}, {"mean": 2, "law": "x"}):
    with pytest.raises(ValueError, match="mean"):
      selection.Trials(**fields)
  with pytest.raises(ValueError, match="REPLACE_ONE"):
    _ = made(selection.Trials(mean=3), relation="REPLACE_ONE").epsilon


def test_the_command_prices_a_grid_as_the_library_does(capsys):
  flags = "--examples=1000 --batch_size=50,100 --epochs=2,4 --epsilon=3"
  command = ["privacy", *flags.split(), "--trials=8"]
  assert main.main(command) == 0
  said = capsys.readouterr().out
  runs = []
  for size, epochs in itertools.product((50, 100), (2, 4)):
    sampler = sampling.Poisson.with_margin(
      num_examples=NUM, expected_batch_size=size
    )
    steps = epochs * (NUM // size)
    noise = accounting.noise_multiplier(
      epsilon=3.0, delta=DELTA, sampler=sampler, steps=steps
    )
    runs.append(accounting.Run(sampler, noise, steps))
  expected = accounting.composed_epsilon(runs * 2, delta=DELTA)
  best = selection.grid_price(runs, selection.Trials(mean=8), delta=DELTA)
  for name, value in {"composition": expected, "logarithmic": best}.items():
    [line] = [x for x in said.splitlines() if x.startswith(f"  {name}")]
    assert float(line.split("epsilon ")[1]) == pytest.approx(value, abs=0.011)
  assert "cheapest: logarithmic" in said
  for wrong in (
    ["--batch_size=50,100", "--epochs=2", "--epsilon=3"],
    ["--batch_size=5,x", "--epochs=2", "--epsilon=3", "--trials=2"],
    ["--batch_size=50,100", "--steps=2", "--epsilon=3", "--trials=2"],
  ):
    assert main.main(["privacy", "--examples=1000", *wrong]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "expected" in error


def test_the_calculator_says_what_trials_cost_and_which_way_is_cheaper():
  known = {"num_examples": 6000, "batch_size": 256, "epochs": 13}
  said = calculator.describe(**known, noise_multiplier=1.0, trials=50)
  run = accounting.Run(
    sampling.Poisson.with_margin(num_examples=6000, expected_batch_size=256),
    1.0,
    299,
  )
  prices = selection.prices(run, 50, delta=1 / 12000)
  for name, value in prices.items():
    [line] = [x for x in said.splitlines() if x.startswith(f"  {name}:")]
    assert float(line.split("epsilon ")[1].split()[0]) == pytest.approx(
      value, abs=0.01
    )
  assert f"cheapest: {min(prices, key=prices.get)}" in said
  for bad in (0, -1):
    with pytest.raises(ValueError, match="trials"):
      calculator.describe(**known, noise_multiplier=1.0, trials=bad)


def test_noise_for_trials_is_not_calibrated_as_for_one_training():
  """PLD left the trials out: noise of epsilon 8 whose best cost 15.15."""
  known = {"delta": DELTA, "sampler": POISSON, "steps": 200}
  trials = selection.Trials(mean=10)
  for target in (8.0, math.inf):
    for options in ({}, {"accountant": "pld"}):
      with pytest.raises(
        ValueError, match='expected accountant="rdp" with trials'
      ) as caught:
        accounting.noise_multiplier(
          epsilon=target, trials=trials, **known, **options
        )
      assert "\n" not in str(caught.value)
  noise = accounting.noise_multiplier(
    epsilon=8.0, trials=trials, accountant="rdp", **known
  )
  assert 7.9 < epsilon(accounting.Run(POISSON, noise, 200), trials) <= 8.0


def test_a_calibrated_claim_reaches_its_target_with_its_trials():
  made = claim.calibrated(
    epsilon=8.0,
    sampler=sampling.Poisson.with_margin(
      num_examples=2000, expected_batch_size=100
    ),
    steps=20,
    l2_clip_norm=1.0,
    trials=selection.Trials(mean=20),
  )
  assert 7.9 < made.epsilon <= 8.0
