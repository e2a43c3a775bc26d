"""Membership scores: exact values, and that they find what was trained on."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
import random_t5
import scipy.special
import scipy.stats

from synthq_jax.audit import membership
from synthq_jax.losses import seq2seq
from synthq_jax.models import t5, t5_config

MODEL = dataclasses.replace(
  t5_config.get("tiny"), num_encoder_layers=1, num_decoder_layers=1
)
EOS = 1


untrained = functools.partial(random_t5.params, MODEL, spread=0.0)


def random_records(seed, number=40):
  """Queries and documents of random tokens, of random lengths."""
  rng = np.random.default_rng(seed)

  def rows(longest):
    tokens = rng.integers(3, MODEL.vocab_size, (number, longest))
    lengths = rng.integers(longest // 2, longest, number)
    place = np.arange(longest)
    tokens = np.where(place == lengths[:, None], EOS, tokens)
    return np.where(place > lengths[:, None], 0, tokens).astype(np.int32)

  return {"inputs": rows(10), "targets": rows(8)}


def auroc(scores, inserted):
  """How often an inserted record scores above one that is not."""
  above = scores[inserted][:, None] - scores[~inserted][None, :]
  return np.mean((above > 0) + 0.5 * (above == 0))


def is_chance(area, inserted, p=1e-4):
  """Whether Mann and Whitney's test accepts that scores say nothing."""
  m, n = np.sum(inserted), np.sum(~inserted)
  deviation = math.sqrt((m + n + 1) / (12 * m * n))
  return abs(area - 0.5) < scipy.stats.norm.isf(p / 2) * deviation


HALF = np.random.default_rng(1).permutation(40) < 20


# Under the generator.


def test_the_score_is_the_log_likelihood_of_the_whole_query():
  params = untrained(seed=2)
  inputs = np.array([[5, 6, 1, 0], [7, 1, 0, 0]])
  targets = np.array([[9, 8, 1], [4, 1, 0]])
  scored = membership.log_likelihoods(
    params, MODEL, inputs, targets, batch_size=2
  )
  shifted = np.array([[0, 9, 8], [0, 4, 1]])
  logits = jax.jit(t5.Transformer(MODEL).apply)(
    {"params": params}, inputs, shifted
  )
  logs = scipy.special.log_softmax(np.asarray(logits, np.float64), axis=-1)
  expected = [
    logs[0, 0, 9] + logs[0, 1, 8] + logs[0, 2, 1],
    logs[1, 0, 4] + logs[1, 1, 1],
  ]
  np.testing.assert_allclose(scored, expected, rtol=1e-5)
  assert scored.dtype == np.float64


@pytest.mark.parametrize("number", [1, 4, 5])
def test_batches_have_one_shape_and_every_record_its_own_score(
  number, monkeypatch
):
  shapes = []

  def fake(params, inputs, targets, *, model_config):
    del params, model_config
    shapes.append((inputs.shape, targets.shape))
    return inputs[:, 0] * 10.0 + targets[:, 0]

  monkeypatch.setattr(membership, "_score", fake)
  rows = np.arange(1, number + 1)
  scored = membership.log_likelihoods(
    {}, MODEL, np.stack([rows, rows], 1), rows[:, None], batch_size=2
  )
  np.testing.assert_array_equal(scored, 11.0 * rows)
  size = min(number, 2)
  assert shapes == [((size, 2), (size, 1))] * math.ceil(number / 2)


def test_the_generator_tells_what_it_was_trained_on_from_what_it_was_not():
  records = random_records(0)
  mine = {name: rows[HALF] for name, rows in records.items()}
  model = t5.Transformer(MODEL)

  def loss(params):
    logits = model.apply(
      {"params": params}, mine["inputs"], t5.shift_right(mine["targets"])
    )
    return seq2seq.cross_entropy(logits, mine["targets"]).mean()

  start = untrained(seed=3)
  score = functools.partial(
    membership.log_likelihoods, model_config=MODEL, batch_size=20, **records
  )
  before = score(start)
  after = score(random_t5.trained(loss, start, 60))
  calibrated = membership.calibrated(after, before)
  assert auroc(calibrated, HALF) > 0.95
  assert np.all(calibrated[HALF] > 0)
  assert is_chance(auroc(before, HALF), HALF)
  other = membership.calibrated(score(untrained(seed=4)), before)
  assert is_chance(auroc(other, HALF), HALF)
  assert not is_chance(auroc(calibrated, HALF), HALF)


ONE = np.array([[3, 1]])


@pytest.mark.parametrize(
  ("inputs", "targets", "message"),
  [
    (ONE[0], ONE, r"integer inputs .* shape \(2,\)"),
    (ONE, ONE + 0.5, "integer targets .* float64"),
    (ONE, np.repeat(ONE, 2, 0), "got 1 and 2"),
    (ONE[:0], ONE[:0], "at least one, got 0 and 0"),
    (ONE, 0 * ONE, "got 1 of padding alone"),
    (ONE, ONE - 2, "got -1 to 1"),
    (ONE * MODEL.vocab_size, ONE, "inputs in .*vocab_size="),
  ],
)
def test_what_are_no_records_is_refused(inputs, targets, message):
  with pytest.raises(ValueError, match=message):
    membership.log_likelihoods({}, MODEL, inputs, targets, batch_size=2)


def test_a_batch_of_nothing_and_a_model_of_nan_are_refused(monkeypatch):
  with pytest.raises(ValueError, match="batch_size=0"):
    membership.log_likelihoods({}, MODEL, ONE, ONE, batch_size=0)
  monkeypatch.setattr(membership, "_score", lambda *_, **__: [np.nan])
  with pytest.raises(ValueError, match="others for 1 of 1 records"):
    membership.log_likelihoods({}, MODEL, ONE, ONE, batch_size=1)


# Calibration.


def test_calibration_brings_out_what_common_records_hide():
  rng = np.random.default_rng(0)
  inserted = rng.random(400) < 0.5
  easy = rng.normal(0, 10, 400)  # what every model finds likely
  scores = easy + rng.normal(0, 1, 400) + 2.0 * inserted
  reference = easy + rng.normal(0, 1, 400)
  assert auroc(scores, inserted) < 0.65
  found = membership.calibrated(scores, reference)
  np.testing.assert_array_equal(found, scores - reference)
  assert auroc(found, inserted) > 0.8


@pytest.mark.parametrize(
  ("scores", "reference", "message"),
  [
    (np.zeros(3), np.zeros(2), r"shapes \(3,\) and \(2,\)"),
    (np.zeros((3, 1)), np.zeros((3, 1)), r"shapes \(3, 1\)"),
    (np.array([0.0, np.nan]), np.zeros(2), "finite scores, got 1 others of 2"),
    (np.zeros(2), np.array([-np.inf, 0]), "finite reference, got 1 others"),
  ],
)
def test_what_cannot_be_compared_is_refused(scores, reference, message):
  with pytest.raises(ValueError, match=message):
    membership.calibrated(scores, reference)
