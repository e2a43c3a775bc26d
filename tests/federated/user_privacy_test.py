"""User-level privacy: what one client moves, the noise, and the claim."""

import dataclasses
import functools

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize
import scipy.stats

from synthq_jax import artifacts
from synthq_jax.federated import (
  aggregation,
  cohorts,
  user_privacy,
)
from synthq_jax.privacy import ledger, statement, terms
from synthq_jax.privacy import sampling as private_sampling

KEY, NOISE_KEY = jax.random.key(1), jax.random.key(2)
CLIP = 0.7
RELATION = dp_accounting.NeighboringRelation
START = {"a": jnp.zeros((4, 3)), "b": jnp.ones(5)}


def send(params, batches, key):
  """A client that sends what it likes: its batches say what it changes."""
  del key
  sent = batches["sent"][0, 0]
  return {
    "a": params["a"] + sent[:12].reshape(4, 3),
    "b": params["b"] + sent[12:],
  }


def cohort_of(updates, ids=None, **options):
  clients = [
    {
      "sent": np.asarray(update, np.float32)[None, None],
      "is_padding": np.zeros((1, 1), bool),
    }
    for update in updates
  ]
  ids = range(len(clients)) if ids is None else ids
  return cohorts.stack(clients, ids, **options)


def settings(**changes):
  sampler = cohorts.poisson(num_clients=10_000, clients_per_round=200)
  known = {
    "sampler": sampler,
    "rounds": 50,
    "l2_clip_norm": CLIP,
    "noise_multiplier": 0.0,
    "delta": 1e-5,
  }
  return user_privacy.claim(**(known | changes))


@functools.cache
def made(noise_multiplier=0.0, clients_at_once=1):
  return user_privacy.fedavg(
    send,
    settings(noise_multiplier=noise_multiplier),
    noise_key=NOISE_KEY,
    clients_at_once=clients_at_once,
  )


def change(cohort, **options):
  """Returns what a round changes, as one vector, times the denominator."""
  functions = made(**options)
  state, _ = jax.jit(functions.apply)(functions.init(START), cohort, KEY)
  moved = jax.tree.map(lambda x, y: x - y, state.params, START)
  return 200.0 * np.concatenate([np.ravel(moved["a"]), moved["b"]])


def ordinary(number, size=0.3):
  return size * np.random.default_rng(6).normal(size=(number, 17)) / 17**0.5


ADVERSARIES = {
  "huge": 1e6 * np.eye(17)[3],
  "just at the norm": CLIP * np.ones(17) / 17**0.5,
  "a hundred times its norm, over all leaves": 70.0 * np.eye(17)[16],
  "as others, but larger": 50.0 * ordinary(1)[0],
}


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("name", ADVERSARIES)
def test_one_client_moves_the_sum_by_the_clip_norm_and_no_more(name, at_once):
  others = ordinary(6)
  without = change(cohort_of(others, size=8), clients_at_once=at_once)
  with_it = change(
    cohort_of([*others, ADVERSARIES[name]], size=8), clients_at_once=at_once
  )
  moved = np.linalg.norm(with_it - without)
  # Attained, so a smaller sensitivity would be a false claim.
  assert moved == pytest.approx(CLIP, rel=1e-4)
  assert aggregation.Sum(l2_clip_norm=settings().l2_clip_norm).sensitivity(
    RELATION.ADD_OR_REMOVE_ONE
  ) == pytest.approx(moved, rel=1e-4)


def test_a_replaced_client_moves_the_sum_by_twice_the_clip_norm():
  others, far = ordinary(6), 1e3 * np.eye(17)[2]
  moved = np.linalg.norm(
    change(cohort_of([*others, far])) - change(cohort_of([*others, -far]))
  )
  assert moved == pytest.approx(2 * CLIP, rel=1e-4)
  sums = aggregation.Sum(l2_clip_norm=settings().l2_clip_norm)
  assert sums.sensitivity(RELATION.REPLACE_ONE) == 2 * CLIP
  assert sums.sensitivity(RELATION.REPLACE_SPECIAL) == CLIP


def test_small_updates_are_not_stretched_and_the_sum_is_of_all():
  others = ordinary(6)
  np.testing.assert_allclose(
    change(cohort_of(others)), others.sum(axis=0), rtol=1e-4, atol=1e-5
  )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_an_update_that_is_not_finite_contributes_zero(value):
  others = ordinary(6)
  broken = np.where(np.arange(17) == 5, value, 0.1)
  found = change(cohort_of([*others, broken]))
  np.testing.assert_array_equal(found, change(cohort_of(others)))


def test_a_dropped_client_contributes_zero_and_the_denominator_stays():
  others = ordinary(6)
  away = cohorts.drop(
    cohort_of([*others, ADVERSARIES["huge"]]), np.arange(7) == 6
  )
  np.testing.assert_array_equal(change(away), change(cohort_of(others)))
  # Were it a mean over those who answered, one of two would count for both.
  one, two = ordinary(1), ordinary(2)
  np.testing.assert_allclose(
    change(cohort_of(one)), ordinary(1)[0], rtol=1e-4, atol=1e-5
  )
  np.testing.assert_allclose(
    change(cohort_of(two)), two.sum(axis=0), rtol=1e-4, atol=1e-5
  )


def test_weights_are_refused_because_they_move_the_sensitivity():
  weighted = cohort_of(ordinary(2), weights=[1.0, 1.0])
  functions = made()
  with pytest.raises(ValueError, match="expected Cohort.weights=None") as error:
    functions.apply(functions.init(START), weighted, KEY)
  assert "\n" not in str(error.value)


def test_a_weight_that_gets_through_does_not_count():
  sums = aggregation.Sum(l2_clip_norm=CLIP)
  far = jax.tree.map(lambda x: x + 100.0, START)
  heavy, plain = sums.of(START, far, 50.0), sums.of(START, far)
  jax.tree.map(np.testing.assert_array_equal, heavy, plain)


def has_std(values, std, confidence=1 - 1e-6):
  """Whether a chi-squared test of the variance accepts the value `std`."""
  statistic = np.sum((np.asarray(values, np.float64) / std) ** 2)
  low, high = scipy.stats.chi2.interval(confidence, np.size(values))
  return low <= statistic <= high


def test_the_noise_has_the_std_of_multiplier_times_clip_norm():
  """Of the sum, per coordinate and round: 20,000 of them."""
  wide = jnp.zeros(20_000)
  privacy = settings(noise_multiplier=1.3)
  functions = user_privacy.fedavg(
    lambda params, batches, key: params, privacy, noise_key=NOISE_KEY
  )
  nobody = cohort_of(ordinary(1))
  apply, state = jax.jit(functions.apply), functions.init(wide)
  noise, before = [], wide
  for _ in range(2):
    state, _ = apply(state, nobody, KEY)
    noise.append(200.0 * np.asarray(state.params - before))
    before = state.params
  for drawn in noise:
    assert has_std(drawn, 1.3 * CLIP)
    assert not has_std(drawn, 1.1 * 1.3 * CLIP)
    assert not has_std(drawn, 0.9 * 1.3 * CLIP)
  # Rounds have noise of their own.
  assert abs(np.corrcoef(*noise)[0, 1]) < 5 / 20_000**0.5


def test_chunks_and_meshes_draw_the_same_noise_once():
  from synthq_jax.training import mesh

  cohort = cohort_of(ordinary(6), size=8)
  privacy = settings(noise_multiplier=1.3)
  expected = change(cohort, noise_multiplier=1.3)
  functions = user_privacy.fedavg(
    send, privacy, noise_key=NOISE_KEY, mesh=mesh.make(mesh.Shape())
  )
  state, _ = jax.jit(functions.apply)(functions.init(START), cohort, KEY)
  moved = np.ravel(state.params["a"]) * 200.0
  np.testing.assert_allclose(moved, expected[:12], rtol=1e-4, atol=1e-4)


def test_a_server_optimizer_sees_the_noisy_mean_alone():
  cohort, functions = cohort_of(ordinary(6)), {}
  for name, server in (("plain", None), ("momentum", optax.sgd(0.5, 0.9))):
    functions[name] = user_privacy.fedavg(
      send,
      settings(noise_multiplier=1.0),
      noise_key=NOISE_KEY,
      server=server,
    )
  states = {
    name: jax.jit(one.apply)(one.init(START), cohort, KEY)[0]
    for name, one in functions.items()
  }
  moved = {
    name: np.asarray(state.params["b"] - START["b"])
    for name, state in states.items()
  }
  np.testing.assert_allclose(moved["momentum"], moved["plain"] / 2, rtol=1e-4)


def gaussian_epsilon(mu, delta):
  """The epsilon of a Gaussian mechanism of noise 1 / mu, in closed form."""
  cdf = scipy.stats.norm.cdf

  def excess(epsilon):
    left = cdf(mu / 2 - epsilon / mu)
    return left - np.exp(epsilon) * cdf(-mu / 2 - epsilon / mu) - delta

  return scipy.optimize.brentq(excess, 0.0, 200.0)


def test_epsilon_is_the_closed_form_where_everybody_takes_part():
  """All rounds together are one Gaussian mechanism of less noise.

  Balle and Wang (2018), arXiv:1805.06530, theorem 8.
  """
  privacy = settings(
    sampler=cohorts.poisson(num_clients=2000, clients_per_round=2000),
    noise_multiplier=8.0,
    rounds=36,
    delta=1e-4,
  )
  exact = gaussian_epsilon(36**0.5 / 8.0, 1e-4)
  assert exact <= privacy.epsilon < 1.001 * exact


def test_sampling_clients_amplifies():
  sampled = settings(noise_multiplier=1.0).epsilon
  everybody = settings(
    sampler=cohorts.poisson(num_clients=10_000, clients_per_round=10_000),
    noise_multiplier=1.0,
  ).epsilon
  assert 0 < sampled < everybody / 10


def test_the_ledger_holds_a_claim_for_clients(tmp_path):
  privacy = settings(noise_multiplier=1.0)
  claim = privacy.statement("federated/abc")
  assert (claim.unit, claim.relation) == ("client", "ADD_OR_REMOVE_ONE")
  assert (claim.epsilon, claim.delta) == (privacy.epsilon, 1e-5)
  assert claim.ledger[0].sampler() == privacy.sampler
  assert claim.ledger[0].l2_sensitivity == CLIP
  path = tmp_path / "ledger.jsonl"
  ledger.enter(path, "federated/abc", claim)
  assert ledger.read(path) == {"federated/abc": claim}
  assert "for one client (ADD_OR_REMOVE_ONE)" in ledger.describe(path)
  artifacts.save(tmp_path / "result", claim, "digest")
  loaded = artifacts.load(tmp_path / "result", statement.PrivacyStatement)
  assert loaded == claim


def test_the_words_are_about_clients_and_name_what_is_assumed():
  words = statement.in_words(settings(noise_multiplier=1.0).statement("a"))
  assert "The unit of protection is one client." in words
  assert "when one client is added or removed" in words
  assert "per-client updates, clipped" in words
  assert "a client that is missing adds zero" in words
  assert "query" not in words and "document" not in words


@pytest.mark.parametrize("clip", [0.0, -1.0, np.inf, np.nan])
def test_no_clipping_is_refused(clip):
  with pytest.raises(ValueError, match=r"l2_clip_norm in .0, inf., got"):
    settings(l2_clip_norm=clip)


@pytest.mark.parametrize(
  "sampler",
  [
    private_sampling.FixedOrder(num_examples=100, batch_size=10),
  ],
)
def test_draws_that_nothing_is_claimed_for_are_refused(sampler):
  with pytest.raises(ValueError, match="federated.cohorts.poisson"):
    settings(sampler=sampler)


def test_noise_goes_on_where_the_rounds_do():
  """A noise that is drawn twice falls out of the difference of two models."""
  functions = made(noise_multiplier=1.0)
  apply = jax.jit(functions.apply)
  nobody = cohort_of([np.zeros(17)])
  states = [functions.init(START)]
  for _ in range(3):
    states.append(apply(states[-1], nobody, KEY)[0])
  resumed = functions.init(states[1].params)._replace(round=states[1].round)
  resumed = apply(apply(resumed, nobody, KEY)[0], nobody, KEY)[0]
  for name in START:
    np.testing.assert_array_equal(resumed.params[name], states[3].params[name])
    moved = [
      one.params[name] - other.params[name]
      for one, other in zip(states[1:], states[:-1], strict=True)
    ]
    assert np.abs(moved[0] - moved[1]).max() > 1e-4


@pytest.mark.parametrize(
  "change",
  [
    {"relation": "REPLACE_SPECIAL"},
    {"l2_sensitivity": 2 * CLIP},
    {"words": terms.silo("public")},
    {
      "noise_bands": 4,
      "sampler": private_sampling.CyclicPoisson(
        num_examples=10_000,
        expected_batch_size=200,
        max_batch_size=400,
        cycle_length=4,
      ),
    },
  ],
  ids=str,
)
def test_a_claim_about_another_training_is_refused(change):
  other = dataclasses.replace(settings(noise_multiplier=1.0), **change)
  with pytest.raises(ValueError, match="expected a claim for Poisson"):
    user_privacy.fedavg(send, other, noise_key=NOISE_KEY)
