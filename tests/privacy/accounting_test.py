"""Epsilons against closed forms, published figures and each other."""

import dataclasses
import math
import pathlib
import re

import dp_accounting
import numpy as np
import pytest
from scipy import optimize, stats

from synthq_jax.privacy import accounting, sampling

SMALL = sampling.Poisson.with_margin(num_examples=6000, expected_batch_size=256)
SMALL_DELTA = 1 / 12000


def whole(num=50):
  """Every record in every batch, with room for one more."""
  return sampling.Poisson(
    num_examples=num, expected_batch_size=num, max_batch_size=num + 1
  )


def gaussian_delta(epsilon, noise):
  """The exact delta of N(0, noise^2) against N(1, noise^2)."""
  half, shift = 1 / (2 * noise), epsilon * noise
  lost = math.exp(epsilon) * stats.norm.cdf(-half - shift)
  return stats.norm.cdf(half - shift) - lost


def gaussian_epsilon(delta, noise):
  return optimize.brentq(
    lambda epsilon: gaussian_delta(epsilon, noise) - delta, 0, 200
  )


@pytest.mark.parametrize("noise", [0.7, 4.0])
@pytest.mark.parametrize(
  ("relation", "moved"),
  [("ADD_OR_REMOVE_ONE", 1), ("REPLACE_SPECIAL", 1), ("REPLACE_ONE", 2)],
)
def test_one_gaussian_step_has_the_closed_form(noise, relation, moved):
  # Noise is noise_multiplier x sensitivity(ADD_OR_REMOVE_ONE) throughout: a
  # replaced record moves the sum by twice that.
  exact = gaussian_epsilon(1e-3, noise / moved)
  found = accounting.epsilon(
    noise_multiplier=noise,
    delta=1e-3,
    sampler=whole(),
    steps=1,
    relation=dp_accounting.NeighboringRelation[relation],
  )
  assert exact - 1e-6 <= found <= exact * 1.002 + 1e-4


def test_steps_of_a_whole_batch_add_up_in_variance():
  found = accounting.epsilon(
    noise_multiplier=3.0, delta=1e-3, sampler=whole(), steps=9
  )
  np.testing.assert_allclose(found, gaussian_epsilon(1e-3, 1.0), rtol=2e-3)


def test_one_poisson_step_has_the_closed_form():
  sampler = sampling.Poisson(
    num_examples=1000, expected_batch_size=100, max_batch_size=400
  )
  inner = gaussian_epsilon(1e-4 / 0.1, 0.8)
  exact = math.log1p(0.1 * math.expm1(inner))
  found = accounting.epsilon(
    noise_multiplier=0.8, delta=1e-4, sampler=sampler, steps=1
  )
  assert exact - 1e-6 <= found <= exact * 1.002
  without = accounting.epsilon(
    noise_multiplier=0.8, delta=1e-4, sampler=whole(1000), steps=1
  )
  assert without > 1.5 * found


@pytest.mark.parametrize(
  ("target", "poisson", "fixed"),
  [(3, 0.730, 8.48), (8, 0.554, 3.58), (16, 0.465, 2.02)],
)
def test_the_papers_setting_needs_the_known_noise(target, poisson, fixed):
  num, batch = 532761, 1024
  shared = {"epsilon": target, "delta": 1 / (2 * num)}
  amplified = accounting.noise_multiplier(
    **shared,
    sampler=sampling.Poisson.with_margin(
      num_examples=num, expected_batch_size=batch
    ),
    steps=round(30 * num / batch),
  )
  np.testing.assert_allclose(amplified, poisson, rtol=0.01)
  order = sampling.FixedOrder(num_examples=num, batch_size=batch)
  plain = accounting.noise_multiplier(
    **shared,
    sampler=order,
    steps=30 * order.steps_per_epoch,
    relation="REPLACE_SPECIAL",
  )
  np.testing.assert_allclose(plain, fixed, rtol=0.01)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("target", [0.1, 1.0, 8.0])
def test_calibrated_noise_is_enough_and_hardly_more(target, accountant):
  shared = {
    "delta": SMALL_DELTA,
    "sampler": SMALL,
    "steps": 300,
    "accountant": accountant,
  }
  noise = accounting.noise_multiplier(epsilon=target, **shared)

  def reach(scale):
    return accounting.epsilon(noise_multiplier=noise * scale, **shared)

  assert reach(1.0) <= target
  assert reach(0.995) > target


def test_renyi_accounting_is_looser_but_close():
  shared = {"delta": SMALL_DELTA, "sampler": SMALL, "steps": 300}
  tight = accounting.epsilon(noise_multiplier=0.8, **shared)
  loose = accounting.epsilon(noise_multiplier=0.8, accountant="rdp", **shared)
  assert tight < loose < 1.25 * tight


def displaced_epsilon(delta, noise):
  """One step that keeps 4 of 5 records against one that keeps all other 4.

  The new record is kept with probability 4/5 and then pushes out another, so
  the worst case is 1/5 N(0) + 4/5 N(2) against N(0).
  """
  grid = np.linspace(-12, 14, 200001)
  before = stats.norm.pdf(grid, 0, noise)
  after = 0.2 * before + 0.8 * stats.norm.pdf(grid, 2, noise)

  def excess(epsilon):
    gap = np.maximum(after - math.exp(epsilon) * before, 0)
    return np.trapezoid(gap, grid) - delta

  return optimize.brentq(excess, 0, 50)


def test_records_that_push_others_out_are_accounted_for():
  full = sampling.Poisson(
    num_examples=4, expected_batch_size=4, max_batch_size=4
  )
  exact = displaced_epsilon(1e-3, 1.0)
  found = accounting.epsilon(
    noise_multiplier=1.0, delta=1e-3, sampler=full, steps=1
  )
  assert gaussian_epsilon(1e-3, 1.0) < exact <= found


def test_both_ways_to_account_for_truncation_agree(monkeypatch):
  run = accounting.Run(SMALL, 1.0, 300)
  arguments = ((run,), SMALL_DELTA, "ADD_OR_REMOVE_ONE", 1e-3)
  from_delta = accounting._compute_pld_epsilon(*arguments)
  monkeypatch.setattr(accounting, "_NEGLIGIBLE", 0.0)
  in_distribution = accounting._compute_pld_epsilon(*arguments)
  np.testing.assert_allclose(from_delta, in_distribution, rtol=1e-3)


@pytest.mark.parametrize("room", [260, 330])
def test_the_larger_neighbour_is_the_worse_one(room):
  def epsilon(num):
    event = dp_accounting.dp_event.TruncatedSubsampledGaussianDpEvent(
      dataset_size=num,
      sampling_probability=256 / 6000,
      truncated_batch_size=room,
      noise_multiplier=1.0,
    )
    accountant = dp_accounting.pld.PLDAccountant(
      value_discretization_interval=1e-2
    )
    return accountant.compose(event, 300).get_epsilon(SMALL_DELTA)

  assert epsilon(6000) <= epsilon(6001)


def test_renyi_accounting_refuses_truncation_that_delta_cannot_pay():
  tight = sampling.Poisson(
    num_examples=6000, expected_batch_size=256, max_batch_size=260
  )
  shared = {
    "delta": SMALL_DELTA,
    "sampler": tight,
    "steps": 300,
    "accountant": "rdp",
  }
  assert accounting.epsilon(noise_multiplier=5.0, **shared) == math.inf
  with pytest.raises(ValueError, match="max_batch_size"):
    accounting.noise_multiplier(epsilon=8.0, **shared)


def test_two_runs_cost_what_one_of_twice_the_steps_costs():
  run = accounting.Run(SMALL, 1.0, 300)
  both = accounting.composed_epsilon([run, run], delta=SMALL_DELTA)
  long = accounting.epsilon(
    noise_multiplier=1.0, delta=SMALL_DELTA, sampler=SMALL, steps=600
  )
  np.testing.assert_allclose(both, long, rtol=1e-4)
  once = accounting.composed_epsilon([run], delta=SMALL_DELTA)
  assert once < both < 2 * once
  assert accounting.composed_epsilon([], delta=SMALL_DELTA) == 0


def test_no_noise_is_an_infinite_epsilon_and_back():
  shared = {"delta": SMALL_DELTA, "sampler": SMALL, "steps": 300}
  assert accounting.noise_multiplier(epsilon=math.inf, **shared) == 0
  assert accounting.epsilon(noise_multiplier=0, **shared) == math.inf


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"epsilon": 0.0}, "positive epsilon"),
    ({"epsilon": math.nan}, "positive epsilon"),
    ({"delta": 0.0}, "delta"),
    ({"delta": 1 / 6000}, "delta"),
    ({"delta": math.nan}, "delta"),
    ({"steps": 0}, "steps"),
    ({"steps": 2.5}, "steps"),
    ({"relation": "ADD_ONE"}, "relation"),
    ({"accountant": "moments"}, "accountant"),
    ({"accountant": "rdp", "relation": "REPLACE_ONE"}, "pld"),
    (
      {"sampler": sampling.FixedOrder(num_examples=6000, batch_size=9)},
      "REPLACE_SPECIAL",
    ),
  ],
)
def test_what_cannot_be_claimed_is_refused(change, message):
  good = {
    "epsilon": 8.0,
    "delta": SMALL_DELTA,
    "sampler": SMALL,
    "steps": 300,
  }
  with pytest.raises(ValueError, match=message):
    accounting.noise_multiplier(**(good | change))


@pytest.mark.parametrize("noise", [-1.0, math.nan, math.inf])
def test_noise_that_is_no_noise_is_refused(noise):
  with pytest.raises(ValueError, match="noise_multiplier"):
    accounting.epsilon(
      noise_multiplier=noise, delta=SMALL_DELTA, sampler=SMALL, steps=1
    )


def test_cyclic_batches_are_one_sampled_gaussian_for_every_cycle():
  sampler = sampling.CyclicPoisson(
    num_examples=1000,
    expected_batch_size=50,
    max_batch_size=200,
    cycle_length=4,
  )
  accountant = dp_accounting.pld.PLDAccountant(
    value_discretization_interval=1e-3
  )
  step = dp_accounting.PoissonSampledDpEvent(
    0.2, dp_accounting.GaussianDpEvent(1.5)
  )
  accountant.compose(dp_accounting.SelfComposedDpEvent(step, 26))
  found = accounting.epsilon(
    noise_multiplier=1.5, delta=1e-4, sampler=sampler, steps=101
  )
  assert found == pytest.approx(accountant.get_epsilon(1e-4), rel=1e-6)
  # The same noise under plain Poisson batches is amplified more.
  plain = sampling.Poisson(
    num_examples=1000, expected_batch_size=50, max_batch_size=200
  )
  assert (
    accounting.epsilon(
      noise_multiplier=1.5, delta=1e-4, sampler=plain, steps=101
    )
    < found
  )


def test_cyclic_batches_that_overflow_pay_from_delta():
  def epsilon(room):
    sampler = sampling.CyclicPoisson(
      num_examples=1000,
      expected_batch_size=50,
      max_batch_size=50 + room,
      cycle_length=4,
    )
    return accounting.epsilon(
      noise_multiplier=1.5, delta=1e-4, sampler=sampler, steps=40
    )

  assert epsilon(60) < epsilon(30) < math.inf
  assert epsilon(0) == math.inf


def roomy(expected, num=50):
  return sampling.Poisson(
    num_examples=num, expected_batch_size=expected, max_batch_size=num + 10
  )


def of_group(sampler, noise, steps, size, relation="ADD_OR_REMOVE_ONE"):
  return accounting.group_epsilon(
    [accounting.Run(sampler, noise, steps)],
    delta=1e-3,
    relation=relation,
    size=size,
  )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_group_moves_a_whole_batch_by_as_many_sensitivities(size):
  exact = gaussian_epsilon(1e-3, 3.0 / size)
  assert exact <= of_group(roomy(50), 3.0, 1, size) <= 1.02 * exact + 0.01
  order = sampling.FixedOrder(num_examples=50, batch_size=10)
  found = of_group(order, 3.0, 5, size, "REPLACE_SPECIAL")
  assert exact <= found <= 1.02 * exact + 0.01


@pytest.mark.parametrize("noise", [0.8, 2.0])
def test_two_records_of_a_sampled_batch_are_a_mixture_of_gaussians(noise):
  """The exact divergence of one step, by integration, both ways round."""
  share, grid = 0.2, np.linspace(-40, 40, 400_001)
  nobody = stats.norm.pdf(grid, 0, noise)
  weights = stats.binom.pmf([0, 1, 2], 2, share)
  both = sum(
    w * stats.norm.pdf(grid, at, noise) for at, w in enumerate(weights)
  )
  width = grid[1] - grid[0]

  def delta(epsilon):
    lost = (
      np.maximum(a - math.exp(epsilon) * b, 0).sum() * width
      for a, b in ((both, nobody), (nobody, both))
    )
    return max(lost)

  exact = optimize.brentq(lambda e: delta(e) - 1e-3, 0, 50)
  found = of_group(roomy(10), noise, 1, 2)
  assert exact - 1e-6 <= found <= 1.02 * exact + 0.02


def test_a_group_of_one_is_a_record_and_a_group_has_less_than_a_chain():
  one = accounting.epsilon(
    noise_multiplier=1.0, delta=1e-3, sampler=roomy(10), steps=5
  )
  assert of_group(roomy(10), 1.0, 5, 1) == pytest.approx(one, rel=0.02)
  assert one < of_group(roomy(10), 1.0, 5, 2) < 3.5 * one


def test_two_records_of_the_demo_cost_what_the_pages_say():
  num, steps = 7378, 60
  sampler = sampling.Poisson.with_margin(
    num_examples=num, expected_batch_size=1024, multiple_of=8
  )
  delta = 1 / (2 * num)
  noise = accounting.noise_multiplier(
    epsilon=8.0, delta=delta, sampler=sampler, steps=steps
  )
  two = accounting.group_epsilon(
    [accounting.Run(sampler, noise, steps)],
    delta=delta,
    relation="ADD_OR_REMOVE_ONE",
    size=2,
  )
  docs = pathlib.Path(__file__).parents[2] / "docs"
  for name in ("privacy.md", "claims.md"):
    [said] = re.findall(
      r"has (?:epsilon )?8 for one \w+,? and (\d+) for two",
      (docs / name).read_text(),
    )
    assert two <= float(said) < two + 0.1, name


def test_truncation_is_paid_for_by_a_group_or_nothing_is_claimed():
  tight = sampling.Poisson(
    num_examples=50, expected_batch_size=10, max_batch_size=12
  )
  assert of_group(tight, 1.0, 5, 2) == math.inf
  assert of_group(tight, 1.0, 5, 2) > of_group(roomy(10), 1.0, 5, 2)
  # One record more hardly ever finds a batch full; four at once do.
  narrow = dataclasses.replace(tight, max_batch_size=23)
  assert of_group(narrow, 1.0, 5, 1) < 1.1 * of_group(roomy(10), 1.0, 5, 1)
  assert of_group(narrow, 1.0, 5, 6) == math.inf > of_group(roomy(10), 1, 5, 6)


def test_nothing_is_claimed_for_groups_that_no_event_describes():
  cyclic = sampling.CyclicPoisson(
    num_examples=50, expected_batch_size=5, max_batch_size=50, cycle_length=4
  )
  assert of_group(cyclic, 1.0, 5, 2) == math.inf
  assert of_group(roomy(10), 1.0, 5, 2, "REPLACE_ONE") == math.inf
  assert of_group(roomy(10), 0.0, 5, 2) == math.inf


def ended_delta(epsilon, noise, end):
  """The exact delta of noise that ends, against the same moved by one."""

  grid = np.linspace(1 - end * noise, 1 + end * noise, 400_001)
  here = stats.norm.pdf(grid, scale=noise) * (grid <= end * noise)
  moved = stats.norm.pdf(grid - 1, scale=noise)
  values = np.maximum(moved - math.exp(epsilon) * here, 0.0)
  return np.trapezoid(values, grid) / (1 - 2 * stats.norm.sf(end))


@pytest.mark.parametrize("end", [4.5, 5.0])
@pytest.mark.parametrize(
  ("relation", "moved"), [("ADD_OR_REMOVE_ONE", 1), ("REPLACE_ONE", 2)]
)
def test_noise_that_ends_pays_for_what_moves_past_its_end(
  end, relation, moved, monkeypatch
):
  """Else one outcome, which the neighbour cannot have, costs more than delta.

  A record that is replaced moves a sum twice as far.
  """
  monkeypatch.setattr(accounting, "_END", end)
  monkeypatch.setattr(accounting, "_COORDINATES", 1.0)
  for name in (
    "_compute_epsilon",
    "_calibrate",
  ):  # not remembered: with another end
    own = getattr(accounting, name).__wrapped__
    monkeypatch.setattr(accounting, name, own)
  asked = {"delta": 1e-3, "sampler": whole(), "steps": 1, "relation": relation}
  noise = accounting.noise_multiplier(epsilon=8.0, **asked) / moved
  assert 1e-4 < ended_delta(8.0, noise, end) <= 1e-3
  unpaid = optimize.brentq(lambda x: gaussian_delta(8.0, x) - 1e-3, 0.1, 10)
  assert ended_delta(8.0, unpaid, end) > 1.1e-3


def test_a_record_that_pushes_another_out_pays_for_twice_the_way_past_the_end():
  """All others move the sum against it; drawn noise reaches 9.35 deviations."""
  num, rows, noise, delta = 200, 100, 0.25, 1 / 400
  sampler = sampling.Poisson(
    num_examples=num, expected_batch_size=rows, max_batch_size=rows
  )
  others = np.arange(rows, num + 1)
  stays = stats.binom.pmf(others, num, 0.5) * 0.5 * rows / (others + 1)
  past_end = stats.norm.sf(9.35 - 2 / noise) - stats.norm.sf(9.35)
  assert stays.sum() * past_end > 4 * delta  # outcomes that show the record
  asked = {"delta": delta, "sampler": sampler, "steps": 1}
  assert accounting.epsilon(noise_multiplier=noise, **asked) == math.inf
  assert accounting.epsilon(noise_multiplier=1.0, **asked) < 6


@pytest.mark.parametrize(
  ("sampler", "uses"),
  [
    (SMALL, 10 * 256 / 6000),
    (
      sampling.CyclicPoisson.with_margin(
        num_examples=60, expected_batch_size=6, cycle_length=4
      ),
      3 * 0.4,
    ),
    (sampling.FixedOrder(num_examples=60, batch_size=20), 4),
  ],
)
def test_a_record_is_used_as_often_as_batches_hold_it(sampler, uses):
  assert sampler.uses(10) == {1: pytest.approx(uses)}
