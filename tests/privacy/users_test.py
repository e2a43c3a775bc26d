"""User-level privacy: what one client moves, the noise, and the claim."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax import optim
from synthq_jax.privacy import ledger, sampling, statement, users
from synthq_jax.storage import artifacts

CLIP = 0.7


def settings(**changes):
  known = {
    "sampler": users.sampler(num_users=10_000, users_per_step=200),
    "rounds": 50,
    "l2_clip_norm": CLIP,
    "noise_multiplier": 0.0,
    "delta": 1e-5,
  }
  return users.claim(**(known | changes))


def change(updates, is_padding=None, privacy=None):
  """Returns what a step changes, as one vector, times the denominator."""
  privacy = privacy or settings()
  rows = jnp.asarray(np.asarray(updates, np.float32))
  stacked = {"a": rows[:, :12].reshape(-1, 4, 3), "b": rows[:, 12:]}
  tx = optim.dp_aggregate(
    l2_clip_norm=privacy.l2_clip_norm,
    noise_multiplier=privacy.noise_multiplier,
    denominator=privacy.sampler.expected_batch_size,
    key=jax.random.key(2),
  )
  moved, _ = tx.update(stacked, tx.init({}), is_padding_example=is_padding)
  return 200.0 * np.concatenate([np.ravel(moved["a"]), moved["b"]])


def ordinary(number, size=0.3):
  return size * np.random.default_rng(6).normal(size=(number, 17)) / 17**0.5


ADVERSARIES = {
  "huge": 1e6 * np.eye(17)[3],
  "just at the norm": CLIP * np.ones(17) / 17**0.5,
  "a hundred times its norm, over all leaves": 70.0 * np.eye(17)[16],
  "as others, but larger": 50.0 * ordinary(1)[0],
}


@pytest.mark.parametrize("name", ADVERSARIES)
def test_one_client_moves_the_sum_by_the_clip_norm_and_no_more(name):
  others = ordinary(6)
  with_it = change([*others, ADVERSARIES[name]])
  moved = np.linalg.norm(with_it - change(others))
  # Attained, so a smaller sensitivity would be a false claim.
  assert moved == pytest.approx(CLIP, rel=1e-4)
  assert settings().l2_sensitivity == pytest.approx(moved, rel=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_an_update_that_is_not_finite_contributes_zero(value):
  others = ordinary(6)
  broken = np.where(np.arange(17) == 5, value, 0.1)
  np.testing.assert_array_equal(change([*others, broken]), change(others))


def test_a_client_that_stays_away_adds_zero_and_the_denominator_stays():
  others = ordinary(6)
  away = change([*others, ADVERSARIES["huge"]], np.arange(7) == 6)
  np.testing.assert_array_equal(away, change(others))
  # Were it a mean over those who answered, one of two would count for both.
  for number in (1, 2):
    np.testing.assert_allclose(
      change(ordinary(number)),
      ordinary(number).sum(axis=0),
      rtol=1e-4,
      atol=1e-5,
    )


def test_the_ledger_holds_a_claim_for_clients(tmp_path):
  privacy = settings(noise_multiplier=1.0)
  claim = privacy.statement("federated/abc")
  assert (str(claim.unit), claim.relation) == ("client", "ADD_OR_REMOVE_ONE")
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


@pytest.mark.parametrize("clip", [0.0, -1.0, np.inf, np.nan])
def test_no_clipping_is_refused(clip):
  with pytest.raises(ValueError, match=r"l2_clip_norm in .0, inf., got"):
    settings(l2_clip_norm=clip)


def test_draws_that_nothing_is_claimed_for_are_refused():
  fixed = sampling.FixedOrder(num_examples=100, batch_size=10)
  with pytest.raises(ValueError, match=r"privacy\.users\.sampler"):
    settings(sampler=fixed)
