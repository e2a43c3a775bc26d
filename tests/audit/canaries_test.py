"""Canaries: secrets at random, coins that keep the record, candidates alike."""

import numpy as np
import pytest
from scipy import stats

from synthq_jax.audit import canaries as canaries_lib


class WordVocabulary:
  """Splits at spaces; ids by first appearance, from 3."""

  def __init__(self):
    self.words = {}

  def encode(self, text):
    return [self.words.setdefault(w, len(self.words) + 3) for w in text.split()]


def test_a_query_tells_the_secret_and_its_document_does_not():
  for canary in canaries_lib.make(50, seed=3):
    assert len(canary.secret) == 6
    assert canaries_lib.stands_in(canary, canary.query)
    assert not any(letter.isdigit() for letter in canary.document)


def test_names_differ_and_the_same_seed_gives_the_same_canaries():
  made = canaries_lib.make(2048, seed=[1, 2])
  assert len({canary.document for canary in made}) == 2048
  assert made == canaries_lib.make(2048, seed=[1, 2])
  assert made != canaries_lib.make(2048, seed=[1, 3])


def test_a_fair_coin_decides_for_each_canary():
  inserted = [canary.inserted for canary in canaries_lib.make(2000, seed=0)]
  assert stats.binomtest(sum(inserted), 2000, 0.5).pvalue > 1e-4
  assert stats.binomtest(sum(inserted), 2000, 0.4).pvalue < 1e-4
  changes = np.sum(np.diff(inserted))  # not in blocks, nor alternating
  assert stats.binomtest(int(changes), 1999, 0.5).pvalue > 1e-4


def test_secrets_are_uniform_with_leading_zeros():
  made = canaries_lib.make(2000, seed=1, digits=3)
  first = np.bincount([int(canary.secret[0]) for canary in made], minlength=10)
  assert stats.chisquare(first).pvalue > 1e-4
  assert stats.chisquare(first, np.roll(first, 1)).pvalue < 0.9


def test_only_inserted_canaries_join_the_records_as_often_as_asked():
  made = canaries_lib.make(20, seed=0)
  kept = [canary for canary in made if canary.inserted]
  assert 0 < len(kept) < 20
  pairs = canaries_lib.pairs(made, 3)
  assert len(pairs) == 3 * len(kept)
  assert pairs[:3] == ((kept[0].query, kept[0].document),) * 3
  held_out = {canary.query for canary in made if not canary.inserted}
  assert not held_out & {query for query, _ in pairs}


def test_candidates_are_different_and_the_secret_comes_first():
  canary = canaries_lib.make(1, seed=0, digits=2)[0]
  rng = np.random.default_rng(0)
  every = canaries_lib.candidates(canary, 100, rng)
  assert every[0] == canary.secret
  assert sorted(every) == [f"{number:02d}" for number in range(100)]


def test_another_secret_takes_the_place_of_the_own_one():
  canary = canaries_lib.Canary(
    document="d", query="the code of 7 7 is 1 2", secret="12", inserted=True
  )
  assert canaries_lib.query_with(canary, "09") == "the code of 7 7 is 0 9"


@pytest.mark.parametrize(
  ("text", "leaks"),
  [
    ("code 1 2 3 4", True),
    ("1234", True),
    ("91-2-345", True),
    ("1 2 4 3", False),
    ("1 of 2 and 3 4", False),
    ("", False),
  ],
)
def test_a_leak_is_seen_however_digits_are_spaced(text, leaks):
  canary = canaries_lib.Canary(
    document="d", query="q 1 2 3 4", secret="1234", inserted=True
  )
  assert canaries_lib.stands_in(canary, text) == leaks


def test_records_hold_prefix_document_and_query_with_their_ends():
  records = canaries_lib.tokenize(
    WordVocabulary(),
    [("q a", "d e f g"), ("q b", "d")],
    prefix="ask",
    document_length=3,
    query_length=4,
  )
  # Ids by first appearance: q 3, a 4, b 5, ask 6, d 7, e 8.
  np.testing.assert_array_equal(
    records["targets"], [[3, 4, 1, 0], [3, 5, 1, 0]]
  )
  np.testing.assert_array_equal(records["inputs"], [[6, 7, 8, 1], [6, 7, 1, 0]])


def test_a_secret_that_would_be_cut_off_is_refused():
  arguments = {"prefix": "", "document_length": 4}
  text = [("one two three", "d")]
  fits = canaries_lib.tokenize(
    WordVocabulary(), text, query_length=4, **arguments
  )
  np.testing.assert_array_equal(fits["targets"], [[3, 4, 5, 1]])
  with pytest.raises(ValueError, match="query_length=3 .* of 4"):
    canaries_lib.tokenize(WordVocabulary(), text, query_length=3, **arguments)


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: canaries_lib.make(2049, seed=0), "num=2049"),
    (lambda: canaries_lib.make(0, seed=0), "num=0"),
    (lambda: canaries_lib.make(1, seed=0, digits=0), "digits=0"),
    (lambda: canaries_lib.pairs((), 0), "repetitions=0"),
    (
      lambda: canaries_lib.candidates(
        canaries_lib.make(1, seed=0, digits=1)[0], 11, np.random.default_rng(0)
      ),
      "num=11",
    ),
  ],
)
def test_what_cannot_be_made_is_refused(call, message):
  with pytest.raises(ValueError, match=message):
    call()
