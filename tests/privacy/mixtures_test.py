import numpy as np
import pytest
from dp_accounting import dp_event, pld
from dp_accounting.pld import privacy_loss_mechanism as mechanism
from dp_accounting.privacy_accountant import UnsupportedEventError
from scipy import stats

from synthq_jax.privacy import accounting, mixtures, sampling


def mixture(size, share, deviation):
  drawn = np.arange(size + 1)
  return {
    "standard_deviation": deviation,
    "sensitivities": drawn,
    "sampling_probs": stats.binom.pmf(drawn, size, share),
  }


CASES = [
  (1, 0.3, 0.7),
  (2, 0.14, 0.9),
  (3, 1.0, 2.0),
  (8, 0.5, 40.0),
  (64, 0.01, 3.0),
]


def inverses(losses, number=999):
  """Divergences at many epsilons, each from the inverse of a loss."""
  ends = losses.connect_dots_bounds()
  epsilons = np.linspace(ends.epsilon_lower, ends.epsilon_upper, number)
  return losses.get_delta_for_epsilon(epsilons)


@pytest.mark.parametrize("adjacency", ["ADD", "REMOVE"])
@pytest.mark.parametrize("size, share, deviation", CASES)
def test_every_loss_has_the_same_inverse_to_the_bit(
  size, share, deviation, adjacency
):
  options = mixture(size, share, deviation)
  options["adjacency_type"] = mechanism.AdjacencyType[adjacency]
  expected = inverses(mechanism.MixtureGaussianPrivacyLoss(**options))
  np.testing.assert_array_equal(
    inverses(mixtures._Mixture(**options)), expected
  )
  assert 0 < np.count_nonzero(expected)


@pytest.mark.parametrize("relation", ["ADD_OR_REMOVE_ONE", "REPLACE_SPECIAL"])
def test_events_compose_to_the_same_epsilon_to_the_bit(relation):
  """Mixtures beside other events, nested, and those that need no inverse."""
  gaussian = dp_event.GaussianDpEvent(3.0)
  events = [
    dp_event.PoissonSampledDpEvent(0.1, gaussian),
    *(
      dp_event.MixtureOfGaussiansDpEvent(*mixture(*case).values())
      for case in [(2, 0.14, 3.0), (3, 0.5, 9.0)]
    ),
    dp_event.MixtureOfGaussiansDpEvent(1.0, [0.0], [1.0]),
    gaussian,
  ]
  both = dp_event.ComposedDpEvent(
    [dp_event.SelfComposedDpEvent(event, 4) for event in events]
  )
  found, expected = (
    make(accounting._load_relation(relation), 1e-3).compose(both, 2)
    for make in (mixtures.Accountant, pld.PLDAccountant)
  )
  for delta in (1e-3, 1e-6):
    assert found.get_epsilon(delta) == expected.get_epsilon(delta)


def test_what_dp_accounting_refuses_is_refused():
  event = dp_event.MixtureOfGaussiansDpEvent(*mixture(2, 0.14, 3.0).values())
  replaced = mixtures.Accountant(accounting._load_relation("REPLACE_ONE"))
  assert not replaced.supports(event)
  with pytest.raises(UnsupportedEventError, match="neighboring_relation"):
    replaced.compose(event)
  silent = mixtures.Accountant()
  silent.compose(dp_event.MixtureOfGaussiansDpEvent(0.0, [0, 1], [0.5, 0.5]))
  assert silent.get_epsilon(1e-5) == np.inf


def test_a_few_losses_and_points_beyond_the_precision_of_floats_end():
  losses = mixtures._Mixture(
    **mixture(2, 0.5, 1e13), adjacency_type=mechanism.AdjacencyType.REMOVE
  )
  assert np.isfinite(losses.get_delta_for_epsilon(np.array([0.0, 1e-9]))).all()


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
