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
  calibrated = after - before
  assert auroc(calibrated, HALF) > 0.95
  assert np.all(calibrated[HALF] > 0)
  assert is_chance(auroc(before, HALF), HALF)
  other = score(untrained(seed=4)) - before
  assert is_chance(auroc(other, HALF), HALF)
  assert not is_chance(auroc(calibrated, HALF), HALF)


def test_ids_outside_of_the_vocabulary_are_refused():
  records = random_records(0, number=3)
  records["inputs"][1, 0] = MODEL.vocab_size
  with pytest.raises(ValueError, match="others for 1 of 3 records"):
    membership.log_likelihoods(untrained(seed=2), MODEL, **records)


ONE = np.array([[3, 1]])


@pytest.mark.parametrize(
  ("inputs", "targets", "message"),
  [
    (np.repeat(ONE, 2, 0), ONE, "got 2 and 1"),
    (ONE[:0], ONE[:0], "at least one, got 0 and 0"),
    (ONE, 0 * ONE, "got 1 of padding alone"),
    (ONE - 2, ONE, "negative"),
    (ONE, ONE - 2, "negative"),
  ],
)
def test_what_are_no_records_is_refused(inputs, targets, message):
  """Each would get a number, and an empty query that of a sure member."""
  with pytest.raises(ValueError, match=message):
    membership.log_likelihoods({}, MODEL, inputs, targets)
