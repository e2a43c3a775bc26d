"""The inversion audit: it reads raw vectors, and chance where it must."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax.audit import (
  inversion,
  inversion_measures,
  vector_bounds,
  vector_secrets,
)
from synthq_jax.models import t5, t5_config
from synthq_jax.retrieval import encode
from synthq_jax.training import loop
from synthq_jax.training import recipe as recipe_lib

MODEL = dataclasses.replace(
  t5_config.get("tiny"),
  vocab_size=32,
  emb_dim=32,
  head_dim=16,
  mlp_dim=64,
  num_encoder_layers=1,
  num_decoder_layers=1,
)
INVERTER = inversion.Inverter(model=MODEL, vector_dim=32, memories=4)
WORDS, SYMBOLS = range(5, 15), range(20, 30)
CANDIDATES = 20
STEPS = 200
NOISED = 1.0
QUIET = loop.Settings(progress=False, log_every=50)


def sentences(rng, number):
  """'my code ... ..': two fixed tokens, two words, two symbols, EOS."""
  rows = np.zeros((number, 8), np.int32)
  rows[:, :2] = (3, 4)
  rows[:, 2:4] = rng.choice(WORDS, (number, 2))
  rows[:, 4:6] = rng.choice(SYMBOLS, (number, 2))
  rows[:, 6] = 1
  return rows


def plant(rng, number):
  """Sentences whose symbols are the secret, among other pairs of symbols."""
  rows = np.repeat(sentences(rng, number)[:, None], CANDIDATES, axis=1)
  pairs = np.array([(a, b) for a in SYMBOLS for b in SYMBOLS])
  for one in rows:
    others = pairs[np.any(pairs != one[0, 4:6], axis=1)]
    one[1:, 4:6] = rng.permutation(others)[: CANDIDATES - 1]
  secrets = tuple(map(tuple, rows[:, 0, 4:6].tolist()))
  return vector_secrets.Planted(rows=rows, secrets=secrets)


@pytest.fixture(name="victim", scope="module")
def _victim():
  """A public encoder, the attacker's text and vectors, the client's."""
  rng = np.random.default_rng(0)
  params = t5.init_params(MODEL, jax.random.key(0))
  own, client, planted = (
    sentences(rng, 3000),
    sentences(rng, 100),
    plant(rng, 60),
  )
  flat = encode.encode(params, MODEL, planted.rows.reshape(-1, 8))
  return {
    "params": params,
    "own": (encode.encode(params, MODEL, own), own),
    "client": (encode.encode(params, MODEL, client), client),
    "planted": (planted, flat.reshape(60, CANDIDATES, -1)),
  }


def fit(victim, folder, noise, **changes):
  vectors, tokens = victim["own"]
  sent = inversion.send(noise, vectors, jax.random.key(1))
  recipe = recipe_lib.Recipe(
    steps=STEPS,
    batch_size=128,
    learning_rate=5e-3,
    warmup_steps=20,
    settings=QUIET,
  )
  return inversion.train(
    INVERTER,
    INVERTER.init(victim["params"], sent, jax.random.key(2)),
    vectors,
    tokens,
    noise=noise,
    recipe=dataclasses.replace(recipe, **changes),
    files=loop.Files.below(folder, "inverter"),
  )


@pytest.fixture(name="decoders", scope="module")
def _decoders(victim, tmp_path_factory):
  folder = tmp_path_factory.mktemp("inverters")
  hidden = fit(victim, folder / "hidden", None)
  return {
    name: inversion_measures.Decoders(
      inverter=INVERTER,
      params=fit(victim, folder / name, noise),
      hidden=hidden,
      noise=noise,
    )
    for name, noise in {"raw": 0.0, "noised": NOISED}.items()
  }


def reading(decoders, vectors, tokens):
  return inversion_measures.reading(
    decoders,
    vectors,
    tokens,
    to_text=lambda row: " ".join(map(str, row)),
    key=jax.random.key(3),
  )


@pytest.mark.slow
def test_the_decoder_reads_raw_vectors(victim, decoders):
  found = reading(decoders["raw"], *victim["client"])
  # Two words and two symbols of ten each: 4 log2(10) bits, 13.3, over 7 tokens.
  assert found.perplexity_hidden == pytest.approx(10 ** (4 / 7), rel=0.05)
  assert found.perplexity < 2.0
  assert found.bits.low > 8.0 and found.bits.high < 4 * math.log2(10) + 0.5
  assert found.bleu > 30 > 15 > max(found.bleu_hidden, found.bleu_other)


@pytest.mark.slow
def test_the_vector_of_another_sentence_is_no_gain(victim, decoders):
  """The bug to catch: vectors in another order than their sentences."""
  found = reading(decoders["raw"], *victim["client"])
  assert found.perplexity_other > found.perplexity_hidden
  assert found.bits_other.high < 0
  vectors, tokens = victim["client"]
  shuffled = reading(decoders["raw"], np.roll(vectors, 1, axis=0), tokens)
  assert shuffled.bits.high < 0 and shuffled.bleu < 15


@pytest.mark.slow
def test_much_noise_leaves_nothing_to_read(victim, decoders):
  found = reading(decoders["noised"], *victim["client"])
  bound = vector_bounds.information_bits(
    dim=32, radius=1, standard_deviation=NOISED
  )
  assert found.bits.low < bound < 1
  assert abs(found.perplexity / found.perplexity_hidden - 1) < 0.1
  assert found.bleu < 15


@pytest.mark.slow
def test_planted_secrets_separate_raw_from_noised(victim, decoders):
  planted, vectors = victim["planted"]
  raw, noised = (
    inversion_measures.read_secrets(
      decoders[name], planted, vectors, key=jax.random.key(4)
    )
    for name in ("raw", "noised")
  )
  chance = 1 / CANDIDATES
  assert raw.nearest.first.low > 0.9
  assert raw.likelihood.first.low > 0.7
  assert raw.written.low > 0.3
  assert raw.likelihood.mean_rank.mean < 2
  assert raw.likelihood.mean_rank.high < (CANDIDATES + 1) / 4
  bound = vector_bounds.success(
    num_candidates=CANDIDATES,
    radius=float(vector_bounds.enclosing_radius(vectors).max()),
    standard_deviation=NOISED,
  )
  assert bound < 0.3
  assert noised.nearest.first.low < bound
  assert noised.likelihood.first.low < bound
  assert noised.likelihood.first.high < 0.3 < raw.likelihood.first.low
  assert noised.nearest.first.high < 0.3 < raw.nearest.first.low
  assert noised.written.high < 0.1 < raw.written.low
  for found in (raw, noised):
    for control in (found.nearest_other, found.likelihood_other):
      assert control.first.low <= chance + 0.03
      assert control.first.high < 0.3
      assert control.mean_rank.low < (CANDIDATES + 1) / 2 + 1
      assert control.mean_rank.high > (CANDIDATES + 1) / 2 - 1
    assert found.written_other.high < 0.1


def test_a_resumed_training_equals_an_uninterrupted_one(
  victim, tmp_path, monkeypatch
):
  """Noise included: it depends on the seed and the number of the step."""

  class Stop(Exception):
    pass

  short = dict(
    steps=6,
    warmup_steps=2,
    settings=dataclasses.replace(QUIET, save_seconds=0.0),
  )
  whole = fit(victim, tmp_path / "whole", NOISED, **short)
  train = loop.train

  def stopped(step_fn, state, batch_fn, *others, **options):
    def until(step):
      if step == 4:
        raise Stop
      return batch_fn(step)

    return train(step_fn, state, until, *others, **options)

  monkeypatch.setattr(loop, "train", stopped)
  with pytest.raises(Stop):
    fit(victim, tmp_path / "cut", NOISED, **short)
  monkeypatch.undo()
  resumed = fit(victim, tmp_path / "cut", NOISED, **short)
  jax.tree.map(np.testing.assert_array_equal, resumed, whole)


def test_the_noise_is_fresh_in_every_step(victim, tmp_path):
  """Each step sees all sentences, and nothing is learned in between."""
  vectors, tokens = victim["own"]
  few = {**victim, "own": (vectors[:128], tokens[:128])}
  fit(
    few,
    tmp_path,
    NOISED,
    steps=4,
    warmup_steps=1,
    learning_rate=0.0,
    settings=dataclasses.replace(QUIET, log_every=1),
  )
  lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
  losses = np.sort([json.loads(line)["loss"] for line in lines])
  assert np.diff(losses).min() > 1e-4  # rounding moves them by 1e-6


def test_training_starts_from_the_public_decoder(victim, tmp_path):
  sent = victim["own"][0]
  start = INVERTER.init(victim["params"], sent, jax.random.key(2))
  np.testing.assert_array_equal(
    start["decoder"]["decoder_norm"]["scale"],
    victim["params"]["decoder"]["decoder_norm"]["scale"],
  )
  memory = INVERTER.memory(start, jnp.asarray(sent))
  assert memory.shape == (3000, 4, 32)
  assert float(jnp.std(memory)) < 0.3  # what the decoder knows is not drowned
  # Coordinates have equal weight, whatever their place and scale.
  louder = INVERTER.init(victim["params"], 30 * sent + 7, jax.random.key(2))
  np.testing.assert_allclose(
    INVERTER.memory(louder, jnp.asarray(30 * sent + 7)), memory, atol=2e-3
  )
  trained = fit(victim, tmp_path, 0.0, steps=2, warmup_steps=1)
  after = INVERTER.init(trained, sent, jax.random.key(7))
  np.testing.assert_array_equal(
    after["reader"]["bias"], trained["reader"]["bias"]
  )
  assert (after["reader"]["kernel"] != trained["reader"]["kernel"]).any()
  for name in ("center", "spread"):  # the attacker's statistics stay
    np.testing.assert_array_equal(
      trained["reader"][name], start["reader"][name]
    )
  lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
  assert json.loads(lines[-1])["step"] == 2


def test_likelihoods_do_not_depend_on_the_batch(victim, monkeypatch):
  vectors, tokens = victim["client"]
  params = INVERTER.init(victim["params"], vectors, jax.random.key(2))
  whole = inversion.log_likelihoods(INVERTER, params, vectors, tokens)
  parts = inversion.log_likelihoods(
    INVERTER, params, vectors, tokens, batch_size=7
  )
  np.testing.assert_allclose(parts, whole, rtol=1e-5)
  written = inversion.write(INVERTER, params, vectors[:9], max_length=5)
  monkeypatch.setattr(inversion, "_ROWS", 4)
  np.testing.assert_array_equal(
    inversion.write(INVERTER, params, vectors[:9], max_length=5), written
  )


def test_what_is_sent_has_the_noise_or_is_hidden():
  vectors = np.ones((2000, 8), np.float32)
  key = jax.random.key(0)
  np.testing.assert_array_equal(inversion.send(0.0, vectors, key), vectors)
  assert not inversion.send(None, vectors, key).any()
  noise = inversion.send(0.3, vectors, key) - vectors
  assert np.std(noise) == pytest.approx(0.3, rel=0.03)
  assert abs(np.mean(noise)) < 0.01


@pytest.mark.parametrize(
  "make",
  [
    lambda: inversion.send(-1.0, np.ones((1, 2)), jax.random.key(0)),
    lambda: inversion.Inverter(model=MODEL, vector_dim=0),
    lambda: inversion.Inverter(
      model=dataclasses.replace(MODEL, scan_layers=True), vector_dim=2
    ),
    lambda: INVERTER.init({}, np.zeros((3, 5)), jax.random.key(0)),
    lambda: inversion.write(INVERTER, {}, np.zeros((1, 32)), max_length=0),
    lambda: inversion.log_likelihoods(
      INVERTER, {}, np.zeros((2, 32)), np.ones((3, 4), np.int32)
    ),
  ],
)
def test_what_makes_no_sense_is_refused(make):
  with pytest.raises(ValueError, match="expected|must be"):
    make()


def test_the_likeliest_token_is_written_each_time(victim):
  """Against logits of the whole text, without a cache."""
  vectors = 40 * victim["client"][0][:9]
  params = INVERTER.init(victim["params"], vectors, jax.random.key(2))
  written = np.zeros((9, 5), np.int32)
  for position in range(5):
    losses = [
      -inversion.log_likelihoods(
        INVERTER, params, vectors, _with(written, position, token)
      )
      for token in range(1, MODEL.vocab_size)
    ]
    ended = np.any(written == 1, axis=1)
    best = 1 + np.argmin(losses, axis=0)
    written[:, position] = np.where(ended, 0, best)
  found = inversion.write(INVERTER, params, vectors, max_length=5)
  np.testing.assert_array_equal(found, written)
  assert len(np.unique(found)) > 3


def _with(rows, position, token):
  rows = rows.copy()
  rows[:, position] = token
  return rows
