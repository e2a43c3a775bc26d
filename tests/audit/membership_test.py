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
from synthq_jax.losses import contrastive, seq2seq
from synthq_jax.models import dual_encoder, t5, t5_config

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


# From the synthetic queries alone.


def fit(tokens, **options):
  return membership.NgramModel.fit(np.asarray(tokens), **options)


def test_a_probability_is_counted_and_interpolated_by_hand():
  model = fit([[3, 4, 1], [3, 5, 1]], vocab_size=6, order=2)
  # Of 6 tokens: 3, 3, 1, 1, 4, 5, of 4 types; 5 ids share the last part.
  uniform = 1 / 5
  single = {t: (c + 4 * uniform) / 10 for t, c in [(3, 2), (1, 2), (4, 1)]}
  start = (2 + 1 * single[3]) / 3  # 3 stands at both starts
  after_3 = (1 + 2 * single[4]) / 4
  after_4 = (1 + 1 * single[1]) / 2
  found = model.log_likelihoods(np.array([[3, 4, 1], [3, 0, 0], [0, 0, 0]]))
  expected = [math.log(start * after_3 * after_4), math.log(start), 0.0]
  np.testing.assert_allclose(found, expected, rtol=1e-12)
  # After 2, which was never seen, the next token is drawn without a context.
  unknown = (0 + 4 * uniform) / 10
  start_2 = (0 + 1 * unknown) / 3
  (found,) = model.log_likelihoods(np.array([[2, 1]]))
  np.testing.assert_allclose(found, math.log(start_2 * single[1]), rtol=1e-12)


def dictionary_model(rows, order, vocab_size):
  """The same model, as its formula reads."""
  counts = {}
  for row in rows:
    row = [0] * (order - 1) + [t for t in row if t]
    for end in range(order - 1, len(row)):
      for length in range(order):
        after = counts.setdefault(tuple(row[end - length : end]), {})
        after[row[end]] = after.get(row[end], 0) + 1

  def probability(context, token):
    if context is None:
      return 1 / (vocab_size - 1)
    shorter = probability(context[1:] if context else None, token)
    after = counts.get(tuple(context), {})
    if not after:
      return shorter
    count, types = after.get(token, 0), len(after)
    return (count + types * shorter) / (sum(after.values()) + types)

  def log_likelihood(row):
    row = [0] * (order - 1) + [t for t in row if t]
    return sum(
      math.log(probability(row[end - order + 1 : end], row[end]))
      for end in range(order - 1, len(row))
    )

  return log_likelihood


def test_chunks_change_nothing(monkeypatch):
  rng = np.random.default_rng(0)
  model = fit(short_queries(rng, 60, 7), vocab_size=7)
  asked = short_queries(rng, 31, 7)
  expected = model.log_likelihoods(asked)
  monkeypatch.setattr(membership, "_CHUNK", 10)
  np.testing.assert_array_equal(model.log_likelihoods(asked), expected)
  assert model.log_likelihoods(asked[:0]).shape == (0,)


def short_queries(rng, number, vocab_size, length=7):
  tokens = rng.integers(1, vocab_size, (number, length))
  lengths = rng.integers(1, length + 1, number)
  return np.where(np.arange(length) < lengths[:, None], tokens, 0)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_the_model_is_that_of_dictionaries(order):
  rng = np.random.default_rng(order)
  known, asked = short_queries(rng, 60, 7), short_queries(rng, 30, 9)
  expected = dictionary_model(known.tolist(), order, 9)
  model = fit(known, vocab_size=9, order=order)
  np.testing.assert_allclose(
    model.log_likelihoods(asked),
    [expected(row) for row in asked.tolist()],
    rtol=1e-10,
  )


@pytest.mark.parametrize("order", [1, 2, 3, 6])
def test_probabilities_of_the_next_token_sum_to_one(order):
  rng = np.random.default_rng(0)
  size = 12
  model = fit(short_queries(rng, 40, 8), vocab_size=size, order=order)
  contexts = [(), (3,), (3, 5), (9,), (3, 11, 4), (4, 4, 4, 4), (5, 6, 7, 2, 3)]
  for context in contexts:
    head = np.array(context, int)
    rows = [np.append(head, token) for token in range(1, size)]
    before = model.log_likelihoods(head[None]) if context else 0.0
    logs = model.log_likelihoods(np.stack(rows)) - before
    np.testing.assert_allclose(np.exp(logs).sum(), 1.0, rtol=1e-12)
    assert np.all(logs < 0)


def language(rng, number, vocab_size=200, length=8):
  """Queries of a language in which some tokens are more common."""
  weights = 1 / np.arange(2, vocab_size)
  tokens = rng.choice(
    np.arange(2, vocab_size), (number, length), p=weights / weights.sum()
  )
  tokens[:, -1] = EOS
  return tokens


def test_a_secret_that_echoes_in_synthetic_queries_is_found():
  rng = np.random.default_rng(0)
  canaries = language(rng, 200)
  inserted = rng.random(200) < 0.5
  echoes = np.where(inserted & (rng.random(200) < 0.8), 1, 0)
  clean, public = language(rng, 3000), language(rng, 3000)
  leaky = np.concatenate([clean, np.repeat(canaries, echoes, axis=0)])
  reference = fit(public, vocab_size=200).log_likelihoods(canaries)

  def area(synthetic):
    scores = fit(synthetic, vocab_size=200).log_likelihoods(canaries)
    return auroc(membership.calibrated(scores, reference), inserted)

  assert is_chance(area(clean), inserted)
  assert not is_chance(area(leaky), inserted)
  assert area(leaky) > 0.85


def test_a_piece_of_a_secret_raises_its_score_and_no_other():
  rng = np.random.default_rng(2)
  canaries, clean = language(rng, 50, length=10), language(rng, 1000)
  piece = np.zeros((5, 8), int)
  piece[:, :4] = canaries[7, 3:7]
  scores = [
    fit(tokens, vocab_size=200, order=4).log_likelihoods(canaries)
    for tokens in (np.concatenate([clean, piece]), clean)
  ]
  gains = membership.calibrated(*scores)
  assert np.argmax(gains) == 7
  assert gains[7] > 5 * np.sort(np.abs(gains))[-2]


@pytest.mark.parametrize(
  ("tokens", "options", "message"),
  [
    ([[3, 1]], {"vocab_size": 5, "order": 0}, "order=0"),
    ([[0, 0]], {"vocab_size": 5}, r"got none in shape \(1, 2\)"),
    ([[3, 5]], {"vocab_size": 5}, "vocab_size=5.*got 3 to 5"),
    ([[3, -1]], {"vocab_size": 5}, "got -1 to 3"),
    ([3, 1], {"vocab_size": 5}, r"shape \(2,\)"),
    ([[3.0, 1.0]], {"vocab_size": 5}, "float64"),
    ([[0, 3]], {"vocab_size": 5}, "tokens behind it"),
  ],
)
def test_what_are_no_sequences_is_refused(tokens, options, message):
  with pytest.raises(ValueError, match=message):
    fit(tokens, **options)


# From a retriever.


def test_a_retriever_tells_its_pairs_from_others():
  records = random_records(5)
  mine = {name: rows[HALF] for name, rows in records.items()}
  start = dual_encoder.encoder_params(untrained(seed=6))

  def loss(params):
    queries = dual_encoder.encode(params, MODEL, mine["targets"])
    documents = dual_encoder.encode(params, MODEL, mine["inputs"])
    return contrastive.softmax(queries @ documents.T, temperature=0.05).mean()

  encode = jax.jit(dual_encoder.encode, static_argnums=1)

  def score(params):
    return membership.similarities(
      encode(params, MODEL, records["targets"]),
      encode(params, MODEL, records["inputs"]),
    )

  before, after = (
    score(start),
    score(random_t5.trained(loss, start, 60, rate=3e-3)),
  )
  calibrated = membership.calibrated(after, before)
  assert auroc(calibrated, HALF) > 0.95
  assert is_chance(auroc(before, HALF), HALF)
  assert not is_chance(auroc(calibrated, HALF), HALF)


@pytest.mark.parametrize(
  ("queries", "documents"),
  [(np.ones((2, 3)), np.ones((3, 3))), (np.ones((2, 3)), np.full((2, 3), np.nan))],
)
def test_a_retriever_that_diverged_is_refused(queries, documents):
  with pytest.raises(ValueError, match="one finite vector for each"):
    membership.similarities(queries, documents)
