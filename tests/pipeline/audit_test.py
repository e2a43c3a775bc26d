"""The audit finds what a model knows by heart, and finds chance elsewhere."""

import dataclasses
import functools
import json
import math
import types

import jax
import numpy as np
import optax
import pytest

from synthq_jax import artifacts
from synthq_jax.audit import canaries as canaries_lib
from synthq_jax.losses import seq2seq
from synthq_jax.models import t5, t5_checkpoints, t5_config
from synthq_jax.pipeline import audit, inputs, results, workspace
from synthq_jax.privacy import statement

MODEL = dataclasses.replace(
  t5_config.get("tiny"), num_encoder_layers=1, num_decoder_layers=1
)
PREPARED = types.SimpleNamespace(document_length=30, query_length=16)
PREFIX = "ask: "
QUICK = {"xla_backend_optimization_level": 0}  # compiles in half the time


class WordVocabulary:
  """Splits at spaces, so that a test needs no SentencePiece model."""

  vocab_size, extra_ids = MODEL.vocab_size, 2

  def __init__(self, texts):
    words = dict.fromkeys(word for text in texts for word in text.split())
    self.words = ["", "", "?", *map(str, range(10)), *words]
    assert len(self.words) < self.vocab_size - self.extra_ids

  def encode(self, text):
    return [self.words.index(word) for word in text.split()]

  def decode(self, ids):
    return " ".join(self.words[i] for i in ids if i < len(self.words))


def untrained(seed):
  """Makes parameters with NumPy, which spares compiling an initializer."""
  rng = np.random.default_rng(seed)
  key = jax.random.key(0)
  shapes = jax.eval_shape(lambda: t5.init_params(MODEL, key))

  def draw(path, leaf):
    if path[-1].key == "scale":
      return np.ones(leaf.shape, np.float32)
    fan_in = 1 if path[-1].key == "embedding" else leaf.shape[0]
    return rng.normal(0, fan_in**-0.5, leaf.shape).astype(np.float32)

  return jax.tree_util.tree_map_with_path(draw, shapes)


def trained(params, records, steps):
  model = t5.Transformer(MODEL)

  def loss(params):
    logits = model.apply(
      {"params": params}, records["inputs"], t5.shift_right(records["targets"])
    )
    return seq2seq.cross_entropy(logits, records["targets"]).mean()

  tx = optax.adam(1e-2)

  @functools.partial(jax.jit, compiler_options=QUICK)
  def step(params, opt):
    updates, opt = tx.update(jax.grad(loss)(params), opt)
    return optax.apply_updates(params, updates), opt

  opt = tx.init(params)
  for _ in range(steps):
    params, opt = step(params, opt)
  return params


@pytest.fixture(name="audited")
def _audited(tmp_path, monkeypatch):
  """Returns a function that audits parameters with some canaries."""
  space = workspace.Workspace(tmp_path, secret_seed=7)

  def audited(params, canaries, vocabulary, **changes):
    monkeypatch.setattr(inputs, "vocabulary", lambda *_: vocabulary)
    t5_checkpoints.save(space.public("finetune_dp/eps8"), params, MODEL)
    checkpoint = results.Checkpoint(
      directory="finetune_dp/eps8",
      kind="generator",
      name="eps8",
      statement=statement.non_private(),
      steps=1,
      batch_size=1,
      num_parameters=1,
      metrics="",
      seconds=1.0,
    )
    config = audit.Config(prefix=PREFIX, **{"num_candidates": 20} | changes)
    return audit.run(
      config,
      space,
      "digest",
      prepared=PREPARED,
      checkpoint=checkpoint,
      canaries=canaries,
      repetitions=3,
    )

  return audited


def vocabulary_for(canaries):
  return WordVocabulary(
    [PREFIX, *(f"{one.document} {one.query}" for one in canaries)]
  )


def test_a_model_that_knows_a_canary_by_heart_ranks_it_first(audited, tmp_path):
  canaries = [one for one in canaries_lib.make(8, seed=5) if one.inserted][:2]
  held_out = canaries_lib.make(12, seed=6)[8:]
  held_out = [
    canaries_lib.Canary(
      document=one.document, query=one.query, secret=one.secret, inserted=False
    )
    for one in held_out
  ]
  everybody = [*canaries, *held_out]
  vocabulary = vocabulary_for(everybody)
  records = canaries_lib.tokenize(
    vocabulary,
    canaries_lib.pairs(canaries),
    prefix=PREFIX,
    document_length=PREPARED.document_length,
    query_length=PREPARED.query_length,
  )
  params = trained(untrained(0), records, 200)
  report = audited(params, everybody, vocabulary)
  assert report.mean_rank == 1
  assert report.mean_exposure == math.log2(20)
  assert report.leaked == 2
  assert (report.num_canaries, report.repetitions) == (6, 3)
  assert report.claimed_epsilon == math.inf
  assert report.directory == "private/audit/eps8"
  directory = tmp_path / report.directory
  assert artifacts.load(directory, results.AuditReport) == report
  summary = json.loads((directory / "summary.json").read_text())
  assert summary["inserted"]["canaries"] == 2
  assert summary["held_out"]["canaries"] == 4
  assert summary["held_out"]["leaked"] == 0
  assert summary["held_out"]["mean"] > 1
  lines = (directory / "canaries.jsonl").read_text().splitlines()
  assert [json.loads(line)["rank"] for line in lines[:2]] == [1, 1]


def test_an_untrained_model_ranks_by_chance_and_leaks_nothing(audited):
  canaries = canaries_lib.make(60, seed=1)
  params = untrained(1)
  report = audited(params, canaries, vocabulary_for(canaries), num_candidates=9)
  # Uniform ranks in 1..9: mean 5, deviation 2.58 / sqrt(30).
  assert abs(report.mean_rank - 5) < 4 * 2.58 / math.sqrt(30)
  assert 0 < report.mean_exposure < 0.8 * math.log2(9)
  assert report.leaked == 0


def test_the_score_is_the_log_likelihood_of_the_whole_query():
  params = untrained(2)
  sources = np.array([[5, 6, 1, 0], [7, 1, 0, 0]])
  targets = np.array([[9, 8, 1], [4, 1, 0]])
  scored = audit._score(params, sources, targets, model_config=MODEL)
  shifted = np.array([[0, 9, 8], [0, 4, 1]])
  logits = jax.jit(t5.Transformer(MODEL).apply, compiler_options=QUICK)(
    {"params": params}, sources, shifted
  )
  logs = np.asarray(jax.nn.log_softmax(logits))
  expected = [
    logs[0, 0, 9] + logs[0, 1, 8] + logs[0, 2, 1],
    logs[1, 0, 4] + logs[1, 1, 1],
  ]
  np.testing.assert_allclose(scored, expected, rtol=1e-5)


def test_batches_have_one_shape_and_hold_every_row():
  records = {"inputs": np.arange(5)[:, None], "targets": np.arange(5)[:, None]}
  batches = list(audit._batches(records, 3))
  assert [batch[0].shape for batch in batches] == [(3, 1), (3, 1)]
  flat = np.concatenate([batch[1] for batch in batches])[:5, 0]
  np.testing.assert_array_equal(flat, np.arange(5))


def test_a_vocabulary_without_digits_is_refused(audited):
  canaries = [canaries_lib.make(1, seed=0)[0]]
  vocabulary = vocabulary_for(canaries)
  vocabulary.encode = lambda text: [
    2 if word.isdigit() else 20 for word in text.split()
  ]
  canaries = [one for one in canaries_lib.make(8, seed=0) if one.inserted][:1]
  params = untrained(0)
  with pytest.raises(ValueError, match="20 candidates .* got 1"):
    audited(params, canaries, vocabulary)


def test_an_audit_without_inserted_canaries_is_refused(audited):
  canaries = [one for one in canaries_lib.make(8, seed=0) if not one.inserted]
  params = untrained(0)
  with pytest.raises(ValueError, match="expected inserted canaries"):
    audited(params, canaries, vocabulary_for(canaries))


@pytest.mark.parametrize(
  "name", ["num_candidates", "queries_per_canary", "batch_size"]
)
def test_settings_that_make_no_sense_are_refused(name):
  with pytest.raises(ValueError, match=f"{name}=0"):
    audit.Config(**{name: 0})
