"""Lower bounds on epsilon: right values, kept promises, wrong ones noticed."""

import functools
import logging
import math
import pathlib

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from scipy.special import expit, ndtr, ndtri

from synthq_jax import optim
from synthq_jax.audit import lower_bounds
from synthq_jax.privacy import accounting, sampling

BOUNDS = ("epsilon_one_run", "epsilon_one_run_fdp")
DELTA = 1e-5
# A bound at 95% that keeps its promise covers fewer of 200 in 1% of cases.
LEAST = 184


def mu_of(epsilon, delta):
  """The shift, in standard deviations, of a Gaussian mechanism."""
  return 1 / dp_accounting.get_sigma_gaussian(epsilon, delta)


def gaussian_scores(rng, num, mu):
  """Scores of canaries whose coins decide about a shift."""
  coins = rng.integers(0, 2, num) == 1
  scores = rng.normal(size=num) + mu * coins
  return scores[coins], scores[~coins]


def randomized_response(rng, num, epsilon):
  """Scores whose signs tell coins with the greatest allowed probability."""
  coins = rng.integers(0, 2, num) == 1
  told = np.where(rng.random(num) < expit(epsilon), coins, ~coins)
  scores = np.where(told, 1, -1) * (1 + rng.random(num))
  return scores[coins], scores[~coins]


def run(scores, **changes):
  return lower_bounds.audit(*scores, **(dict(delta=DELTA, seed=0) | changes))


def least_rejected(rejects, low=0.0, high=64.0):
  """The end of the values, from 0 on, that a test rejects."""
  if not rejects(low):
    return low
  for _ in range(60):
    middle = (low + high) / 2
    low, high = (middle, high) if rejects(middle) else (low, middle)
  return low


def steinke(num, guesses, correct, delta, significance):
  """Theorem 5.2, summed term by term."""

  def rejects(epsilon):
    pmf = [
      math.comb(guesses, k)
      * expit(epsilon) ** k
      * expit(-epsilon) ** (guesses - k)
      for k in range(guesses + 1)
    ]
    beta = sum(pmf[correct:])
    alpha = max(
      (sum(pmf[correct - i : correct]) / i for i in range(1, correct + 1)),
      default=0,
    )
    return beta + 2 * num * delta * max(alpha, 0) <= significance

  return least_rejected(rejects)


def mahloujifar(num, guesses, correct, delta, significance):
  """Algorithm 3 in terms of mu; epsilon from mu in closed form."""

  def rejects(mu):
    right = [0.0] * correct + [significance * correct / num]
    wrong = [0.0] * correct + [significance * (guesses - correct) / num]
    for i in reversed(range(correct)):
      inverse = ndtr(ndtri(min(right[i + 1], 1)) - mu)
      wrong[i] = max(wrong[i + 1], inverse)
      gain = i / (guesses - i) * (wrong[i] - wrong[i + 1])
      right[i] = right[i + 1] + gain
    return right[0] + wrong[0] > guesses / num

  mu = least_rejected(rejects)
  if mu == 0:
    return 0.0

  def exceeds(epsilon):
    low, high = -epsilon / mu - mu / 2, -epsilon / mu + mu / 2
    return ndtr(high) - math.exp(epsilon) * ndtr(low) > delta

  return least_rejected(exceeds)


@pytest.mark.parametrize(
  ("num", "guesses", "correct"),
  [
    (100, 40, 35),
    (100, 40, 40),
    (60, 31, 25),
    (300, 90, 60),
    (30, 19, 10),
    (10, 5, 0),
  ],
)
@pytest.mark.parametrize("delta", [1e-5, 1e-3])
def test_the_one_run_bounds_are_those_of_the_papers(
  num, guesses, correct, delta
):
  found = lower_bounds._compute_one_run(num, guesses, correct, 0.05, delta)
  counts = num, guesses, correct, delta, 0.05
  expected = steinke(*counts), mahloujifar(*counts)
  np.testing.assert_allclose(found, expected, atol=2e-5)
  if correct == guesses:
    assert min(found) > 1


def binomial_upper(successes, trials, significance):
  """Clopper and Pearson's: where so few successes become that unlikely."""
  return least_rejected(
    lambda p: scipy.stats.binom.cdf(successes, trials, p) > significance,
    high=1.0,
  )


@functools.cache
def simulate(kind, epsilon, delta, num, guesses=None):
  """Audits 200 mechanisms that are exactly (epsilon, delta)-DP."""
  rng = np.random.default_rng(0)
  draw = {
    "gaussian": lambda: gaussian_scores(rng, num, mu_of(epsilon, delta)),
    "response": lambda: randomized_response(rng, num, epsilon),
  }[kind]
  with pytest.MonkeyPatch.context() as patch:
    if guesses is not None:
      patch.setattr(lower_bounds, "default_num_guesses", lambda _: guesses)
    return [run(draw(), delta=delta) for _ in range(200)]


def covered(audits, name, truth, factor=1.0):
  return sum(factor * getattr(x, name) <= truth for x in audits)


@pytest.mark.parametrize("epsilon", [1, 8])
@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_cover_gaussian_mechanisms(name, epsilon):
  audits = simulate("gaussian", epsilon, DELTA, 500)
  assert covered(audits, name, epsilon) >= LEAST
  assert epsilon == 1 or np.median([getattr(x, name) for x in audits]) > 0.2


@pytest.mark.parametrize(
  ("name", "mechanism"),
  [
    ("epsilon_one_run_fdp", ("gaussian", 4, DELTA, 10_000, 200)),
    # Far from tight for Gaussian mechanisms, so here it has its own worst case.
    ("epsilon_one_run", ("response", 2, 1e-9, 1000)),
  ],
)
def test_a_bound_that_is_a_third_too_high_is_noticed(name, mechanism):
  audits = simulate(*mechanism)
  assert covered(audits, name, mechanism[1]) >= LEAST
  assert covered(audits, name, mechanism[1], 1.3) < LEAST


@pytest.mark.parametrize(
  ("mu", "num", "others"), [(0, 15, 15), (1, 40, 10), (2, 15, 15), (1, 900, 80)]
)
def test_the_interval_of_the_auroc_covers(mu, num, others):
  rng = np.random.default_rng(0)
  truth = ndtr(mu / math.sqrt(2))
  hits = wrong = 0
  for _ in range(200):
    sides = rng.normal(size=num) + mu, rng.normal(size=others)
    found = lower_bounds.auroc(*sides)
    hits += found.low <= truth <= found.high
    wrong += found.low <= 1 - (1 - truth) / 4 <= found.high
  assert hits >= LEAST
  assert wrong < LEAST


def test_the_auroc_counts_pairs_and_halves_ties():
  rng = np.random.default_rng(0)
  inserted, held_out = rng.integers(0, 9, 40), rng.integers(0, 7, 30)
  above = inserted[:, None] > held_out
  equal = inserted[:, None] == held_out
  expected = np.mean(above + 0.5 * equal)
  assert run((inserted, held_out)).auroc.mean == pytest.approx(expected)


@pytest.mark.parametrize("mu", [0.0, 2.0, 4.0])
@pytest.mark.parametrize("others", [15, 1000])
def test_the_interval_of_the_true_positives_covers(mu, others):
  rng = np.random.default_rng(0)
  truth = ndtr(mu - ndtri(0.99))
  hits, widths = 0, []
  for _ in range(200):
    sides = rng.normal(size=400) + mu, rng.normal(size=others)
    found = lower_bounds.tpr_at_fpr(*sides, fpr=0.01)
    assert found.low <= found.mean <= found.high
    hits += found.low <= truth <= found.high
    widths.append(found.high - found.low)
  assert hits >= LEAST
  assert np.median(widths) < 0.45 or others == 15


def test_two_ranks_and_two_shares_have_a_quarter_of_the_doubt_each():
  """Four things may go wrong, and together at most as often as is said."""
  rng = np.random.default_rng(0)
  inserted, held_out = rng.normal(size=300) + 2.0, rng.normal(size=1000)
  found = lower_bounds.tpr_at_fpr(inserted, held_out, fpr=0.01)
  each, down = 0.05 / 4, np.sort(held_out)[::-1]
  # The rate of false alarms at the j-th highest is Beta(j, 1000 - j + 1).
  below = [scipy.stats.beta.cdf(0.01, j, 1001 - j) for j in range(1, 1000)]
  strict = down[max(j for j, p in enumerate(below) if p >= 1 - each)]
  lax = down[min(j for j, p in enumerate(below) if p <= each)]
  missed = np.sum(inserted <= strict), np.sum(inserted < lax)
  assert found.low == pytest.approx(1 - binomial_upper(missed[0], 300, each))
  more = 300 - missed[1]
  assert found.high == pytest.approx(binomial_upper(more, 300, each))


def test_perfect_scores_leave_a_doubt():
  high, low = np.arange(50.0) + 100, np.arange(50.0)
  found = run((high, low))
  assert found.num_correct == found.num_guesses == 43
  assert found.auroc.mean == found.auroc.high == 1
  assert 0.9 < found.auroc.low < 1
  assert found.tpr_at_1_fpr.mean == found.tpr_at_1_fpr.high == 1
  assert 2 < found.epsilon_one_run < found.epsilon_one_run_fdp < 30
  wrong = lower_bounds.auroc(low, high)
  assert wrong.mean == wrong.low == 0 < wrong.high < 0.1


@pytest.mark.parametrize(
  "change", [np.exp, lambda x: np.where(x > 1.5, np.inf, x), lambda x: x - 1e3]
)
def test_only_the_order_of_scores_matters(change):
  inserted, held_out = gaussian_scores(np.random.default_rng(0), 500, 1.5)
  # One score above the cut and one below: the order stays as it was.
  keep = [np.where(x > 1.5, 9.0, x) for x in (inserted, held_out)]
  assert run([change(x) for x in keep]) == run(keep)


def test_losses_in_the_place_of_scores_are_logged(caplog):
  """They found nothing where every coin is told, without a word."""
  low, high = np.arange(100.0), np.arange(200.0, 300.0)
  with caplog.at_level(logging.WARNING):
    right = lower_bounds.audit(high, low, delta=1e-5, seed=0)
    lower_bounds.audit(low, low + 0.5, delta=1e-5, seed=0)  # as chance has it
    assert not caplog.records
    wrong = lower_bounds.audit(low, high, delta=1e-5, seed=0)
  assert right.epsilon_one_run > 3 and wrong.epsilon_one_run == 0
  (record,) = caplog.records
  assert "such as minus the loss" in record.getMessage()


def test_ties_are_broken_by_the_seed_and_not_by_the_coin():
  same = np.zeros(200), np.zeros(200)
  guesses = lower_bounds.default_num_guesses(400)
  correct = [
    lower_bounds._count_correct(np.ones(400), 200, guesses, seed)
    for seed in range(100)
  ]
  assert abs(np.mean(correct) - guesses / 2) < 3 * math.sqrt(guesses / 400)
  found = run(same, seed=1)
  assert found == run(same, seed=1)
  assert found.auroc.mean == 0.5
  assert found.tpr_at_1_fpr.mean == 0


@pytest.mark.parametrize(
  ("sides", "changes", "message"),
  [
    (([], [1.0]), {}, "got 0 and 1"),
    (([1.0], []), {}, "got 1 and 0"),
    (([1.0, math.nan], [math.nan]), {}, "nan for 2 of 3 canaries"),
    (([[1.0]], [1.0]), {}, r"got shapes \(1, 1\) and \(1,\)"),
    (([1.0], [1.0]), {"delta": 0.0}, "delta=0.0"),
    (([1.0], [1.0]), {"confidence": 0.5}, "confidence=0.5"),
  ],
)
def test_what_cannot_be_audited_is_refused_in_one_line(sides, changes, message):
  with pytest.raises(ValueError, match=message) as caught:
    run([np.array(side) for side in sides], **changes)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sides", [([1.0, math.nan], [0.0]), ([], [0.0])])
def test_areas_and_rates_refuse_what_an_audit_refuses(sides):
  """A held-out nan gave a rate of 0 with the interval [0, 1]."""
  for inserted, held_out in (sides, sides[::-1]):
    with pytest.raises(ValueError, match="got (nan for 1 of 3|[01] and [01])"):
      lower_bounds.auroc(np.array(inserted), np.array(held_out))
    with pytest.raises(ValueError, match="got (nan for 1 of 3|[01] and [01])"):
      lower_bounds.tpr_at_fpr(np.array(inserted), np.array(held_out), fpr=0.1)
  for fpr in (0.0, 1.0):
    with pytest.raises(ValueError, match="expected fpr in"):
      lower_bounds.tpr_at_fpr(np.ones(2), np.zeros(2), fpr=fpr)
  with pytest.raises(ValueError, match="num_canaries"):
    lower_bounds.ceiling(1, delta=1e-5)


def test_the_ceilings_are_those_that_audits_md_says():
  page = pathlib.Path(__file__).parents[2] / "docs" / "audits.md"
  text = " ".join(page.read_text().split())
  one = [
    f"{lower_bounds.ceiling(number, delta=1e-7):.1f}"
    for number in (512, 1_000, 10_000)
  ]
  said = "{} with 512 canaries, {} with 1,000, {} with 10,000".format(*one)
  assert f"{said} (small delta)" in text


NUM = 10_000
CLIP = 0.5


def loss(params, batch):
  """Least squares with one-hot features: a coordinate for each canary."""
  return 0.5 * (params[batch["feature"]] - 1.0) ** 2


@functools.cache
def one_step(epsilon):
  """One private step over all records, as the project takes it."""
  noise = accounting.noise_multiplier(
    epsilon=epsilon,
    delta=DELTA,
    sampler=sampling.FixedOrder(num_examples=NUM, batch_size=NUM),
    steps=1,
    relation="REPLACE_SPECIAL",
  )
  grad_fn = optim.clipped_grad(
    loss, l2_clip_norm=CLIP, strategy="bookkeeping", microbatch_size=1000
  )
  relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL

  @jax.jit
  def step(is_inserted, key):
    params = jnp.zeros(NUM)
    batch = {"feature": jnp.arange(NUM)}
    total, _ = grad_fn(params, batch, is_padding_example=~is_inserted)
    transform = optim.privatize(
      l2_sensitivity=grad_fn.sensitivity(relation),
      noise_multiplier=noise,
      denominator=float(NUM),
      key=key,
    )
    return transform.update(total, transform.init(params))[0]

  return noise, step


@functools.cache
def audits_of_one_step(epsilon, seeds=20):
  _, step = one_step(epsilon)
  audits = []
  for seed in range(seeds):
    coins = np.random.default_rng([seed, 1]).integers(0, 2, NUM) == 1
    released = np.asarray(step(coins, jax.random.key(seed)))
    scores = -released  # each gradient is minus its canary's feature
    audits.append(run((scores[coins], scores[~coins]), seed=seed))
  return audits


@pytest.mark.parametrize(("epsilon", "least"), [(1, 0.3), (8, 3.2)])
def test_an_audit_of_one_private_step_comes_near_its_claim(epsilon, least):
  audits = audits_of_one_step(epsilon)
  found = [x.epsilon_one_run_fdp for x in audits]
  assert np.median(found) >= least
  for name in BOUNDS:
    # More than 3 of 20 would be above in 1.6% of cases.
    assert covered(audits, name, epsilon) >= 17


def test_an_audit_of_one_step_notices_half_the_noise():
  """What the step claims at epsilon 4 while its noise is that of about 9."""
  honest, _ = one_step(4)
  careless, _ = one_step(9)
  assert careless < 0.53 * honest
  assert covered(audits_of_one_step(9, 5), "epsilon_one_run_fdp", 4) == 0


def test_a_rate_that_no_float_holds_exactly_keeps_its_last_rank():
  """29% of 100 held-out scores are 29 of them, though 100 * .29 is below 29."""
  inserted, held_out = np.full(10, 70.5), np.arange(100.0)
  found = lower_bounds.tpr_at_fpr(inserted, held_out, fpr=0.29)
  assert found.mean == 1.0


def test_nothing_is_found_where_nothing_is():
  rng = np.random.default_rng(3)
  audits = [run(gaussian_scores(rng, 300, 0.0)) for _ in range(200)]
  for name in BOUNDS:
    assert covered(audits, name, 0.0) >= LEAST
  assert sum(x.auroc.low <= 0.5 <= x.auroc.high for x in audits) >= LEAST


def test_the_best_of_many_vain_attacks_keeps_the_joint_promise():
  """Without the correction ten attacks find something in most runs."""
  rng = np.random.default_rng(0)
  joint = single = 0
  for _ in range(200):
    attacks = [gaussian_scores(rng, 40, 0.0) for _ in range(10)]
    found = [run(x, delta=1e-9, confidence=1 - 0.05 / 10) for x in attacks]
    joint += max(x.epsilon_one_run for x in found) == 0
    alone = [
      lower_bounds._compute_one_run(
        40, x.num_guesses, x.num_correct, 0.05, 1e-9
      )[0]
      for x in found
    ]
    single += max(alone) == 0
  assert joint >= LEAST
  assert single < 150
