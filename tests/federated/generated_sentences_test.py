"""A client's private generator: one record per passage, the planned noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax.federated import generated_sentences
from synthq_jax.models import t5, t5_config
from synthq_jax.privacy import accounting
from synthq_jax.training import dp_step

CONFIG = t5_config.T5Config(
  vocab_size=16, emb_dim=8, num_heads=1, head_dim=8, mlp_dim=8,
  num_encoder_layers=1, num_decoder_layers=1,
)  # fmt: skip
SETTINGS = generated_sentences.Settings(
  epsilon=8.0, batch_size=8, steps=3, clip_norm=0.5
)
RECORDS = 20
IDS = [f"passage {number}" for number in range(12)]
UNITS = np.repeat(np.arange(12), np.arange(12) % 5 + 1)


def draw(units, ids, seed=0):
  return generated_sentences.one_per_unit(units, ids, seed=seed)


def test_every_unit_gives_one_of_its_sentences():
  drawn = draw(UNITS, IDS)
  np.testing.assert_array_equal(UNITS[drawn], np.arange(12))
  draws = np.array([draw(UNITS, IDS, seed) for seed in range(200)])
  for number in range(12):
    assert set(draws[:, number]) == set(np.flatnonzero(UNITS == number))


def check_removal(make):
  """A unit that is removed changes no other unit's draw."""
  drawn = make(UNITS, IDS)
  kept = UNITS != 3
  shorter = UNITS[kept] - (UNITS[kept] > 3)
  again = make(shorter, IDS[:3] + IDS[4:])
  np.testing.assert_array_equal(
    np.flatnonzero(kept)[again], np.delete(drawn, 3)
  )


def test_a_removed_unit_changes_no_other_record():
  check_removal(draw)


def test_draws_by_number_are_caught():
  names = [str(number) for number in range(12)]
  with pytest.raises(AssertionError):
    check_removal(lambda units, ids: draw(units, names[: len(ids)]))


def claim(**changes):
  options = dict(num_records=RECORDS, unit="passage")
  return generated_sentences.claim(SETTINGS, **(options | changes))


def test_the_claim_states_what_its_noise_earns():
  made = claim()
  statement = made.statement("run/a")
  again = accounting.epsilon(
    noise_multiplier=made.noise_multiplier,
    delta=1 / (2 * RECORDS),
    sampler=made.sampler,
    steps=SETTINGS.steps,
  )
  assert statement.epsilon == again
  assert 7.9 < again <= 8.0
  assert statement.unit == "passage"
  [release] = statement.ledger
  assert release.l2_clip_norm == 0.5
  assert release.noise_multiplier == made.noise_multiplier


@pytest.fixture(scope="module")
def params():
  tokens = jnp.ones((1, 4), jnp.int32)
  return t5.Transformer(CONFIG).init(jax.random.key(0), tokens, tokens)[
    "params"
  ]


def make_records(count=RECORDS):
  rng = np.random.default_rng(0)
  targets = rng.integers(2, 16, (count, 5)).astype(np.int32)
  targets[:, -1] = 1
  return {"inputs": np.full((count, 3), 7, np.int32), "targets": targets}


def fine_tune(params, directory, records=None):
  return generated_sentences.fine_tune(
    claim(), SETTINGS, params, CONFIG, records or make_records(),
    key=jax.random.key(1), batch_seed=(1, 2), directory=directory,
  )  # fmt: skip


@pytest.mark.slow
def test_training_runs_with_the_planned_noise_and_clip_norm(
  params, tmp_path, monkeypatch
):
  seen = {}

  def spy(grad_fn, start, records, **options):
    seen.update(options, clip_norm=grad_fn.l2_clip_norm)
    return train(grad_fn, start, records, **options)

  train = dp_step.train
  monkeypatch.setattr(dp_step, "train", spy)
  trained = fine_tune(params, tmp_path)
  made = claim()
  assert seen["noise_multiplier"] == made.noise_multiplier > 0
  assert seen["sampler"] == made.sampler
  assert seen["optimizer"].steps == made.steps == SETTINGS.steps
  assert seen["clip_norm"] == made.l2_clip_norm
  moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), trained, params)
  assert max(jax.tree.leaves(moved)) > 1e-4


@pytest.mark.slow
def test_another_training_begins_anew_in_the_same_folder(params, tmp_path):
  """Or the claim of one would stand beside the generator of another."""
  first = fine_tune(params, tmp_path)
  other = make_records()
  other["targets"] = other["targets"][::-1].copy()
  second = fine_tune(params, tmp_path, other)
  apart = fine_tune(params, tmp_path / "apart", other)
  again = fine_tune(params, tmp_path)

  def same(one, two):
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return all(np.array_equal(x, y) for x, y in leaves)

  assert same(second, apart) and same(first, again)
  assert not same(first, second)


def test_records_that_were_not_planned_for_are_refused(params, tmp_path):
  with pytest.raises(ValueError, match="the claim has, 20, got 19"):
    fine_tune(params, tmp_path, make_records(19))


def test_sentences_end_and_stand_once(params):
  prompts = np.full((40, 3), 7, np.int32)
  options = dict(key=jax.random.key(3), max_length=6, forbidden=(2,))
  rows = generated_sentences.write(params, CONFIG, prompts, **options)
  assert 1 < len(rows) < 40
  assert len(np.unique(rows, axis=0)) == len(rows)
  assert np.all(np.any(rows == 1, axis=1))
  assert np.all(rows[:, 0] > 1)
  assert not np.any(rows == 2)
  again = generated_sentences.write(params, CONFIG, prompts, **options)
  np.testing.assert_array_equal(rows, again)
