import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as distributions
from dp_accounting.pld import privacy_loss_mechanism as mechanism
from scipy import stats

from synthq_jax.privacy import accounting, loss_inverses, sampling


def mixture(size, share, deviation):
  drawn = np.arange(size + 1)
  return {
    "standard_deviation": deviation,
    "sensitivities": drawn,
    "sampling_probs": stats.binom.pmf(drawn, size, share),
  }


@pytest.mark.parametrize("adjacency", ["ADD", "REMOVE"])
@pytest.mark.parametrize(
  "size, share, deviation",
  [
    (1, 0.3, 0.7),
    (2, 0.14, 0.9),
    (3, 1.0, 2.0),
    (8, 0.5, 40.0),
    (64, 0.01, 3.0),
  ],
)
def test_every_loss_has_the_same_inverse_to_the_bit(
  size, share, deviation, adjacency
):
  options = mixture(size, share, deviation)
  options["adjacency_type"] = mechanism.AdjacencyType[adjacency]

  def divergences():
    losses = mechanism.MixtureGaussianPrivacyLoss(**options)
    ends = losses.connect_dots_bounds()
    epsilons = np.linspace(ends.epsilon_lower, ends.epsilon_upper, 999)
    return losses.get_delta_for_epsilon(epsilons)

  expected = divergences()
  with loss_inverses.quick():
    found = divergences()
  np.testing.assert_array_equal(found, expected)
  assert 0 < np.count_nonzero(expected)


@pytest.mark.parametrize("adjacency", ["ADD", "REMOVE", "REPLACE"])
@pytest.mark.parametrize("share", [1.0, 0.999999, 0.3, 1e-3, 1e-9, 1e-13])
@pytest.mark.parametrize("deviation", [0.05, 1.0, 400.0])
def test_gaussians_have_the_same_divergences_to_the_bit(
  deviation, share, adjacency
):
  def divergences():
    losses = mechanism.GaussianPrivacyLoss(
      deviation,
      sampling_prob=share,
      adjacency_type=mechanism.AdjacencyType[adjacency],
    )
    ends = losses.connect_dots_bounds()
    inside = np.linspace(ends.epsilon_lower, ends.epsilon_upper, 99)
    end = np.log1p(-min(share, 0.5))
    asked = [*inside, 0.0, -0.0, end, -end, end / 2, -end / 2, 800.0, -800.0]
    try:
      return [losses.get_delta_for_epsilon(x) for x in (np.array(asked), 0.3)]
    except ValueError as error:  # where floats are too coarse for a share
      return [str(error)]

  expected = divergences()
  with loss_inverses.quick():
    found = divergences()
  for one, other in zip(found, expected, strict=True):
    np.testing.assert_array_equal(one, other)


def test_most_losses_of_gaussians_are_inverted_at_once(monkeypatch):
  one_by_one = []
  slow = mechanism.GaussianPrivacyLoss
  monkeypatch.setattr(
    slow, "_inverse_privacy_loss_add", lambda *_: one_by_one.append(0) or 0.0
  )
  with loss_inverses.quick():
    losses = mechanism.GaussianPrivacyLoss(
      1.0, sampling_prob=0.1, adjacency_type=mechanism.AdjacencyType.ADD
    )
    losses.get_delta_for_epsilon(np.linspace(-5.0, 0.1, 500))
  assert not one_by_one


def test_a_few_losses_and_points_beyond_the_precision_of_floats_end():
  with loss_inverses.quick():
    losses = mechanism.MixtureGaussianPrivacyLoss(
      **mixture(2, 0.5, 1e13), adjacency_type=mechanism.AdjacencyType.REMOVE
    )
    assert np.isfinite(
      losses.get_delta_for_epsilon(np.array([0.0, 1e-9]))
    ).all()


def test_dp_accounting_is_as_it_was_afterwards():
  before = dict(vars(mechanism))
  with pytest.raises(ZeroDivisionError), loss_inverses.quick():
    inside = {k for k, v in vars(mechanism).items() if v is not before[k]}
    with loss_inverses.quick():
      pass
    raise ZeroDivisionError
  assert inside == {"GaussianPrivacyLoss", "MixtureGaussianPrivacyLoss"}
  assert all(v is before[k] for k, v in vars(mechanism).items())


def test_what_is_claimed_of_users_is_what_dp_accounting_says(monkeypatch):
  sampler = sampling.Poisson.with_margin(
    num_examples=2000, expected_batch_size=64, group_size=3
  )
  options = {"delta": 1e-4, "sampler": sampler, "steps": 40}
  run = accounting.Run(sampler, 4.0, 40, None)
  found = accounting._pld_epsilon((run,), 1e-4, "ADD_OR_REMOVE_ONE", 1e-3)
  event = sampler.untruncated_event(4.0, 40)
  composed = accounting._composed([(event, 1)], "ADD_OR_REMOVE_ONE", 1e-3)
  by_hand = distributions.from_mixture_gaussian_mechanism(
    **mixture(3, sampler.probability, 4.0), value_discretization_interval=1e-3
  )
  assert composed.get_epsilon(1e-4) == pytest.approx(
    by_hand.self_compose(40).get_epsilon_for_delta(1e-4), rel=1e-9
  )
  assert found == pytest.approx(composed.get_epsilon(1e-4), rel=1e-2)
  sigma = accounting.noise_multiplier(epsilon=found, **options)
  assert sigma == pytest.approx(4.0, rel=1e-3)


def test_users_whose_queries_are_all_in_every_step_need_k_times_the_noise():
  """dp_accounting ends in a TypeError for some mixtures of a single Gaussian."""
  sigmas = []
  for size in (1, 2):
    sampler = sampling.Poisson(
      num_examples=63,
      expected_batch_size=63,
      max_batch_size=63 + size,
      group_size=size,
    )
    sigmas.append(
      accounting.noise_multiplier(
        epsilon=8.0, delta=1 / 80, sampler=sampler, steps=1
      )
    )
  assert sigmas[1] == pytest.approx(2 * sigmas[0], rel=1e-3)


def test_a_small_epsilon_of_users_over_many_steps_is_not_overstated():
  """Coarse intervals said 0.54 here, and 2.28 for two units of a claim of 0.5."""
  options = {"num_examples": 60_000, "expected_batch_size": 256}
  of_users = sampling.Poisson.with_margin(**options, group_size=64)
  run = accounting.Run(of_users, 275.0, 20_000)
  one = accounting.composed_epsilon(
    [run], delta=1 / 120_000, relation="ADD_OR_REMOVE_ONE"
  )
  assert 0.49 < one < 0.51
  run = accounting.Run(sampling.Poisson.with_margin(**options), 4.367, 20_000)
  two = accounting.group_epsilon(
    [run], delta=1 / 120_000, relation="ADD_OR_REMOVE_ONE", size=2
  )
  assert 1.0 < two < 1.1
