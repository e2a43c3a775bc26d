"""The inversion: it reads raw vectors, and nothing out of another's."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax.audit import inversion
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
INVERTER = inversion.Inverter(model=MODEL, vector_dim=32)
WORDS, SYMBOLS = range(5, 15), range(20, 30)
QUIET = loop.Settings(log_every=50)


def sentences(rng, number):
  """'my code ... ..': two fixed tokens, two words, two symbols, EOS."""
  rows = np.zeros((number, 8), np.int32)
  rows[:, :2] = (3, 4)
  rows[:, 2:4] = rng.choice(WORDS, (number, 2))
  rows[:, 4:6] = rng.choice(SYMBOLS, (number, 2))
  rows[:, 6] = 1
  return rows


@pytest.fixture(name="victim", scope="module")
def _victim():
  """A public encoder, the attacker's text and vectors, the client's."""
  rng = np.random.default_rng(0)
  init = jax.jit(t5.init_params, static_argnums=0)
  params = init(MODEL, jax.random.key(0))
  own, client = sentences(rng, 3000), sentences(rng, 100)
  return {
    "params": params,
    "own": (encode.encode(params, MODEL, own), own),
    "client": (encode.encode(params, MODEL, client), client),
  }


def fit(victim, folder, *, hidden=False, **changes):
  vectors, tokens = victim["own"]
  vectors = np.zeros_like(vectors) if hidden else vectors
  recipe = recipe_lib.Recipe(
    steps=200,
    batch_size=128,
    learning_rate=5e-3,
    warmup_steps=20,
    settings=QUIET,
  )
  return inversion.train(
    INVERTER,
    INVERTER.init(victim["params"], vectors, jax.random.key(2)),
    vectors,
    tokens,
    recipe=dataclasses.replace(recipe, **changes),
    files=loop.Files.below(folder, "inverter"),
  )


def perplexity(params, vectors, tokens):
  logs = inversion.log_likelihoods(INVERTER, params, vectors, tokens)
  return np.exp(-logs.sum() / np.sum(tokens > 0))


@pytest.mark.slow
def test_the_decoder_reads_raw_vectors_and_no_other_sentences(victim, tmp_path):
  vectors, tokens = victim["client"]
  blind = fit(victim, tmp_path / "hidden", hidden=True)
  params = fit(victim, tmp_path / "raw")
  hidden = perplexity(blind, np.zeros_like(vectors), tokens)
  # Two words and two symbols of ten each: 4 log2(10) bits, 13.3, over 7 tokens.
  assert hidden == pytest.approx(10 ** (4 / 7), rel=0.05)
  assert perplexity(params, vectors, tokens) < 2.0
  other = np.roll(vectors, 1, axis=0)
  assert perplexity(params, other, tokens) > hidden
  own, wrong = (
    (inversion.write(INVERTER, params, sent, max_length=8) == tokens)[:, 2:6]
    for sent in (vectors, other)
  )
  assert own.mean() > 0.4 > 0.2 > wrong.mean()  # 0.1 is chance


def test_a_resumed_training_equals_an_uninterrupted_one(
  victim, tmp_path, monkeypatch
):
  class Stop(Exception):
    pass

  short = dict(
    steps=6,
    warmup_steps=2,
    settings=dataclasses.replace(QUIET, save_seconds=0.0),
  )
  whole = fit(victim, tmp_path / "whole", **short)
  train = loop.train

  def stopped(step_fn, state, batch_fn, *others, **options):
    def until(step):
      if step == 4:
        raise Stop
      return batch_fn(step)

    return train(step_fn, state, until, *others, **options)

  monkeypatch.setattr(loop, "train", stopped)
  with pytest.raises(Stop):
    fit(victim, tmp_path / "cut", **short)
  monkeypatch.undo()
  resumed = fit(victim, tmp_path / "cut", **short)
  jax.tree.map(np.testing.assert_array_equal, resumed, whole)


def test_training_starts_from_the_public_decoder(victim, tmp_path):
  vectors = victim["own"][0]
  start = INVERTER.init(victim["params"], vectors, jax.random.key(2))
  np.testing.assert_array_equal(
    start["decoder"]["decoder_norm"]["scale"],
    victim["params"]["decoder"]["decoder_norm"]["scale"],
  )
  memory = INVERTER.memory(start, jnp.asarray(vectors))
  assert memory.shape == (3000, 8, 32)
  assert float(jnp.std(memory)) < 0.3  # what the decoder knows is not drowned
  # Coordinates have equal weight, whatever their place and scale.
  louder = INVERTER.init(victim["params"], 30 * vectors + 7, jax.random.key(2))
  np.testing.assert_allclose(
    INVERTER.memory(louder, jnp.asarray(30 * vectors + 7)), memory, atol=2e-3
  )
  trained = fit(victim, tmp_path, steps=2, warmup_steps=1)
  after = INVERTER.init(trained, vectors, jax.random.key(7))
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
