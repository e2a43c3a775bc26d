"""Planted bugs of private training: caught by the audit, and by a named test.

How many canaries each needs: `python tests/benchmarks/audit_bugs.py`.
"""

import dataclasses
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from synthq_jax import optim
from synthq_jax.audit import exposure, mechanism
from synthq_jax.privacy import accounting, sampling
from synthq_jax.training import dp_step, loop

TESTS = pathlib.Path(__file__).resolve().parents[1]


def load(name):
  path = TESTS / name
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


bugs = load("benchmarks/audit_bugs.py")


@pytest.mark.parametrize("epsilon", [1.0, 4.0, 8.0])
@pytest.mark.parametrize("training", [bugs.one_shot, bugs.poisson])
def test_the_correct_training_passes_and_still_gives_something_away(
  training, epsilon
):
  made = training(epsilon, 2000)
  found = [mechanism.audit(made, num_canaries=2000, seed=s) for s in range(3)]
  assert not any(one.violates for one in found)
  least = 0.2 if training is bugs.one_shot else 0.05
  if epsilon > 1:  # the audit is awake
    assert np.median([f.bounds.epsilon_one_run_fdp for f in found]) > (
      least * epsilon
    )


def test_the_releases_are_the_coins_and_the_noise_that_was_claimed():
  made = bugs.one_shot(4.0, 4000)
  found = mechanism.audit(made, num_canaries=3000, seed=5)
  noise = (found.releases[0] - found.inserted) / made.noise_multiplier
  assert stats.kstest(noise, "norm").pvalue > 1e-4
  assert stats.kstest(noise / 1.1, "norm").pvalue < 0.05
  assert abs(found.inserted.mean() - 0.5) < 0.05


def test_the_clip_norm_is_a_unit_and_changes_nothing_else():
  made = bugs.one_shot(4.0, 100)
  small = dataclasses.replace(made, l2_clip_norm=0.01)
  one, other = (
    mechanism.audit(m, num_canaries=100, seed=1).releases for m in (made, small)
  )
  np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


# At epsilon 4, with at least twice the canaries that 9 of 10 seeds need.
ENOUGH = {
  "no noise": 400,
  "one key for all leaves": 400,
  "clipping after averaging": 400,
  "half the sensitivity": 3200,
}


@pytest.mark.parametrize("name", ENOUGH)
def test_the_audit_catches(name):
  canaries = ENOUGH[name]
  bounds = [bugs.BUGS[name].bound(4.0, canaries, seed) for seed in range(3)]
  assert min(bounds) > 4.0
  right = [bugs.BUGS["no bug"].bound(4.0, canaries, seed) for seed in range(3)]
  assert max(right) < 4.0


def test_the_audit_catches_fixed_batches_accounted_as_poisson():
  # In the order of the file, and by an attacker who knows it: this claim of 1
  # would be one of 4.1 without amplification.
  name = "fixed batches as Poisson, in the order of the file"
  assert min(bugs.BUGS[name].bound(1.0, 6400, s) for s in range(2)) > 1.0


def test_the_gaussian_that_the_bound_assumes_covers_poisson_batches():
  made = bugs.poisson(4.0, 2000)
  at = {"sampler": made.sampler, "steps": made.steps, "delta": None}
  one_step = sampling.FixedOrder(num_examples=1000, batch_size=1000)
  gaussian = accounting.noise_multiplier(
    epsilon=4.0,
    delta=made.delta,
    sampler=one_step,
    steps=1,
    relation="REPLACE_SPECIAL",
  )
  for delta in (1e-4, 4e-4):
    at["delta"] = delta
    ours = accounting.epsilon(noise_multiplier=made.noise_multiplier, **at)
    assumed = accounting.epsilon(
      noise_multiplier=gaussian,
      delta=delta,
      sampler=one_step,
      steps=1,
      relation="REPLACE_SPECIAL",
    )
    assert ours <= assumed + 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True])
def test_a_whole_training_is_audited_as_its_pieces_are(
  tmp_path, monkeypatch, bug
):
  privatize = bugs.privatize_without_noise if bug else optim.privatize

  def sums(learning_rate, **arguments):
    del learning_rate
    return privatize(**arguments)

  monkeypatch.setattr(optim, "dp_adam", sums)
  number = 400
  made = bugs.one_shot(4.0, number)
  records, inserted = mechanism.make_records(number, number, 3)
  params = dp_step.train(
    optim.clipped_grad(mechanism.loss_fn, l2_clip_norm=1.0),
    {"first": np.zeros(number + 1, np.float32)},
    records,
    sampler=made.sampler,
    noise_multiplier=made.noise_multiplier,
    optimizer=dp_step.Optimizer(name="dp_adam", learning_rate=1.0, steps=1),
    batch_seed=(3,),
    noise_key=jax.random.key(3),
    directory=tmp_path / "state",
    metrics_path=tmp_path / "metrics.jsonl",
    description="audit",
    settings=loop.Settings(progress=False),
  )
  scores = params["first"][:number].astype(float)
  bound = bugs.lower_bounds.audit(
    scores[inserted], scores[~inserted], delta=made.delta, seed=0
  ).epsilon_one_run_fdp
  assert (bound > made.epsilon) == bug


PRIVATIZE = "optim/privatize_test.py"
STD = "test_the_noise_has_the_std_of_multiplier_times_sensitivity"
LEAVES = "test_leaves_of_equal_shape_and_steps_get_independent_noise"


@pytest.mark.parametrize(
  ("bug", "test"),
  [
    (bugs.privatize_without_noise, STD),
    (bugs.privatize_with_half_the_sensitivity, STD),
    (bugs.privatize_with_one_key, LEAVES),
  ],
)
def test_a_deterministic_test_catches_wrong_noise(monkeypatch, bug, test):
  named = getattr(load(PRIVATIZE), test)
  named()
  wrong = _making(bug, optim.privatize)
  monkeypatch.setattr(optim, "privatize", wrong)
  with pytest.raises(AssertionError):
    named()


def _making(bug, privatize):
  """The bugs call `optim.privatize`: give them the right one."""

  def wrong(**arguments):
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(optim, "privatize", privatize)
      return bug(**arguments)

  return wrong


def test_a_deterministic_test_catches_clipping_after_averaging(monkeypatch):
  module = load("optim/clipping_test.py")

  def clipped_grad(loss_fn, *, l2_clip_norm, strategy):
    del strategy
    return bugs.ClippedMean(loss_fn, l2_clip_norm=l2_clip_norm)

  monkeypatch.setattr(module.clipping, "clipped_grad", clipped_grad)
  with pytest.raises(AssertionError):
    module.test_the_sum_is_that_of_gradients_clipped_one_by_one("vmap")
  with pytest.raises(AssertionError):
    module.test_an_adversarial_neighbour_attains_the_sensitivity("vmap")


def test_deterministic_tests_catch_fixed_batches():
  module = load("privacy/sampling_test.py")
  fixed = bugs.FixedAsPoisson(
    num_examples=module.NUM, expected_batch_size=module.MEAN, max_batch_size=80
  )
  found = module.memberships(fixed)
  with pytest.raises(AssertionError):
    module.test_batch_sizes_vary_as_a_binomial_does(found)
  with pytest.raises(AssertionError):
    module.test_consecutive_steps_are_independent(found)


# The canary also in pre-training. A model of secrets: for each canary's name a
# softmax over candidates, "pre-trained" by gradient descent on some canaries.
CANARIES, CANDIDATES = 400, 100


def pretrained(seen, seed):
  """Logits [canary, candidate]; the secret is candidate 0."""
  rng = np.random.default_rng(seed)
  logits = rng.normal(size=(CANARIES, CANDIDATES)).astype(np.float32)
  for _ in range(20):
    gradient = jax.nn.softmax(logits)
    gradient = gradient.at[:, 0].add(-1.0)
    logits = logits - 0.15 * jnp.where(seen[:, None], gradient, 0.0)
  return np.asarray(logits)


def finetuned(logits, inserted, epsilon):
  """One noisy sum of the inserted canaries' clipped gradients."""

  def nll(params, batch):
    log_p = jax.nn.log_softmax(params["logits"][batch["name"]])
    return jnp.where(batch["inserted"], -log_p[:, 0], 0.0)

  grad_fn = optim.clipped_grad(nll, l2_clip_norm=1.0)
  made = bugs.one_shot(epsilon, CANARIES)
  tx = optax.chain(
    optim.privatize(
      l2_sensitivity=1.0,
      noise_multiplier=made.noise_multiplier,
      denominator=1.0,
      key=jax.random.key(7),
    ),
    optax.scale(-1.0),
  )
  params = {"logits": jnp.asarray(logits)}
  batch = {"name": np.arange(CANARIES), "inserted": inserted}
  state = dp_step.State(params, tx.init(params))
  step = jax.jit(dp_step.step(grad_fn, tx))
  state, _ = step(state, batch, np.zeros(CANARIES, bool))
  return np.asarray(state.params["logits"])


def p_value(logits, rows):
  return exposure.uniform_ranks_p_value(
    exposure.ranks(logits[rows]), CANDIDATES
  )


def test_the_control_group_tells_of_canaries_in_the_pretraining():
  inserted = np.random.default_rng(1).random(CANARIES) < 0.5
  nobody = np.zeros(CANARIES, bool)
  clean = pretrained(nobody, 2)
  tuned = finetuned(clean, inserted, 8.0)
  assert p_value(tuned, ~inserted) > 0.01
  assert p_value(clean, inserted) > 0.01
  both = pretrained(~nobody, 2)
  tuned = finetuned(both, inserted, 8.0)
  assert p_value(tuned, ~inserted) < 1e-4


def test_the_public_checkpoint_tells_of_inserted_canaries_alone():
  inserted = np.random.default_rng(1).random(CANARIES) < 0.5
  public = pretrained(inserted, 2)
  tuned = finetuned(public, inserted, 1.0)
  assert p_value(tuned, ~inserted) > 0.01  # the control group sees nothing
  assert p_value(public, inserted) < 1e-4
