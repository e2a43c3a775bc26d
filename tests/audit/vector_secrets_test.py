"""Planted secrets: made of canaries, ranked by vectors, found in texts."""

import numpy as np
import pytest
from scipy import stats

from synthq_jax import intervals
from synthq_jax.audit import canaries, exposure, vector_secrets
from synthq_jax.data import shipped, vocabulary

TEXTS = [f"the {word} is a word among others of a text" for word in "abcdefgh"]


@pytest.fixture(name="words", scope="module")
def _words():
  return vocabulary.load(shipped.VOCABULARY, extra_ids=shipped.EXTRA_IDS)


def test_a_planted_sentence_is_the_canary_and_its_candidates(words):
  made = canaries.make(
    TEXTS,
    words,
    number=3,
    kinds=("own_query", "rare_words"),
    repetitions=(1,),
    digits=4,
    seed=0,
  )
  planted = vector_secrets.plant(
    made, words, length=24, num_candidates=10, seed=1
  )
  assert planted.rows.shape == (6, 10, 24)
  assert planted.secrets == tuple(canary.secret for canary in made)
  for canary, rows in zip(made, planted.rows, strict=True):
    text = words.decode([token for token in rows[0].tolist() if token > 1])
    assert text.startswith(canary.query)
    assert len({tuple(row) for row in rows.tolist()}) == 10
    head = len(words.encode(canary.query))
    np.testing.assert_array_equal(rows[:, :head], rows[[0] * 10, :head])
    at = head + len(canary.secret)
    np.testing.assert_array_equal(rows[0, head:at], canary.secret)
    assert (rows[:, at] == 1).all() and not rows[:, at + 1 :].any()
  again = vector_secrets.plant(
    made, words, length=24, num_candidates=10, seed=2
  )
  np.testing.assert_array_equal(again.rows[:, 0], planted.rows[:, 0])
  assert (again.rows != planted.rows).any()


def test_secrets_in_documents_are_refused(words):
  made = canaries.make(
    TEXTS, words, number=1, kinds=("own_document",), repetitions=(1,), seed=0
  )
  with pytest.raises(ValueError, match="own_document"):
    vector_secrets.plant(made, words, length=24, num_candidates=10, seed=0)


def test_the_nearest_vector_is_the_likeliest_under_gaussian_noise():
  rng = np.random.default_rng(0)
  candidates = rng.normal(size=(4, 7, 5))
  sent = rng.normal(size=(4, 5))
  deviation = 0.7
  logs = np.sum(
    stats.norm.logpdf(sent[:, None], candidates, deviation), axis=-1
  )
  found = vector_secrets.nearest(sent, candidates) / (2 * deviation**2)
  # They differ by a constant of each row.
  np.testing.assert_allclose(
    found - found[:, :1], logs - logs[:, :1], rtol=1e-9
  )


def unit(rng, shape):
  values = rng.normal(size=shape)
  return values / np.linalg.norm(values, axis=-1, keepdims=True)


def test_among_unit_vectors_the_scale_of_what_is_sent_does_not_matter():
  rng = np.random.default_rng(0)
  candidates, sent = unit(rng, (50, 9, 4)), rng.normal(size=(50, 4))
  ranks = [
    exposure.ranks(vector_secrets.nearest(scale * sent, candidates))
    for scale in (0.1, 1.0, 30.0)
  ]
  np.testing.assert_array_equal(ranks[0], ranks[1])
  np.testing.assert_array_equal(ranks[2], ranks[1])


def test_the_nearest_vector_separates_raw_from_noised_and_from_another():
  rng = np.random.default_rng(0)
  candidates = unit(rng, (300, 20, 16))
  true = candidates[:, 0]
  found = {
    name: vector_secrets.recovery(vector_secrets.nearest(sent, candidates))
    for name, sent in {
      "raw": true,
      "noised": true + 2.0 * rng.normal(size=true.shape),
      "other": true[vector_secrets.others(300, 0)],
    }.items()
  }
  assert found["raw"].first.mean == 1 and found["raw"].first.low > 0.98
  assert found["raw"].mean_rank.mean == 1
  assert found["noised"].first.high < 0.25
  assert found["other"].first.low <= 1 / 20 <= found["other"].first.high
  middle = found["other"].mean_rank
  assert middle.low < 10.5 < middle.high


def test_a_secret_must_stand_whole_and_in_order():
  written = np.array([[9, 4, 5, 6], [4, 9, 5, 6], [4, 5, 1, 0], [6, 5, 4, 1]])
  found = vector_secrets.holds(written, [(4, 5)] * 4)
  assert found.tolist() == [True, False, True, False]
  assert not vector_secrets.holds(written[:1], [(9, 4, 5, 6, 1)])[0]


@pytest.mark.parametrize("number", [2, 3, 50])
def test_no_row_is_its_own_control(number):
  for seed in range(20):
    other = vector_secrets.others(number, seed)
    assert sorted(other.tolist()) == list(range(number))
    assert (other != np.arange(number)).all()
  with pytest.raises(ValueError, match="number >= 2"):
    vector_secrets.others(1, 0)


@pytest.mark.parametrize("total", [1, 7, 40])
def test_shares_have_clopper_and_pearsons_interval(total):
  for hits in range(total + 1):
    found = intervals.clopper_pearson(hits, total, confidence=0.9)
    expected = stats.binomtest(hits, total).proportion_ci(0.9, "exact")
    np.testing.assert_allclose(
      (found.mean, found.low, found.high),
      (hits / total, expected.low, expected.high),
      atol=1e-12,
    )


def test_shapes_that_do_not_belong_together_are_refused():
  with pytest.raises(ValueError, match=r"\(3, 4\)"):
    vector_secrets.nearest(np.zeros((3, 4)), np.zeros((2, 5, 4)))
