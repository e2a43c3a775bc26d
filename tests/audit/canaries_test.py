"""Canaries: secrets at random, coins that keep the record, kinds as named."""

import types

import numpy as np
import pytest
import small_vocabularies
from scipy import stats

from synthq_jax.audit import canaries as canaries_lib
from synthq_jax.data import shipped
from synthq_jax.data import vocabulary as vocabulary_lib

TEXTS = [f"document number {i} tells of {w}" for i, w in enumerate("abcdefgh")]


@pytest.fixture(name="vocabulary", scope="module")
def _vocabulary():
  return vocabulary_lib.load(shipped.VOCABULARY, extra_ids=shipped.EXTRA_IDS)


def canary(**changes):
  given = {
    "kind": "own_query",
    "document": "d",
    "query": "q",
    "secret": (5, 6, 7),
    "spelled": "567",
    "repetitions": 1,
    "inserted": True,
  }
  return canaries_lib.Canary(**{**given, **changes})


def test_the_same_seed_gives_the_same_canaries(vocabulary):
  """The audit makes them again: other coins would compare other groups."""
  make = canaries_lib.make
  first = make(TEXTS, vocabulary, number=4, seed=[1, 2])
  assert first == make(TEXTS, vocabulary, number=4, seed=[1, 2])
  assert first != make(TEXTS, vocabulary, number=4, seed=[1, 3])


def test_text_and_secret_stand_where_the_kind_says(vocabulary):
  made = canaries_lib.make(
    TEXTS, vocabulary, number=1, repetitions=(1,), digits=4, seed=3
  )
  records = canaries_lib.tokenize(
    made, vocabulary, prefix="", document_length=20, query_length=20
  )
  for row, one in enumerate(made):
    kind = canaries_lib.KINDS[one.kind]
    sides = {"document": records["inputs"], "query": records["targets"]}
    found = {
      side: vocabulary.decode([t for t in tokens[row].tolist() if t > 1])
      for side, tokens in sides.items()
    }
    text = {"document": one.document, "query": one.query}
    for side, words in found.items():
      shown = one.spelled if side == kind.side else ""
      if kind.symbols == "new tokens" and side == kind.side:
        ids = [token for token in sides[side][row].tolist() if token > 1]
        assert tuple(ids[-3:]) == one.secret
        words, shown = words.partition("<")[0], ""
      packed = "".join(words.split())
      expected = "".join((text[side] + shown).lower().split())
      assert packed.startswith(expected), one
    if kind.query == "own":
      assert one.document.startswith(one.query)
    if kind.query == "other":
      assert not one.document.startswith(one.query)
    assert bool(one.query) == (kind.query != "none")
    assert bool(one.document) == kind.document


def test_a_fair_coin_decides_for_each_canary(vocabulary):
  made = canaries_lib.make(
    TEXTS, vocabulary, number=250, repetitions=(1,), seed=0
  )
  inserted = [one.inserted for one in made]
  assert len(inserted) == 2000
  assert stats.binomtest(sum(inserted), 2000, 0.5).pvalue > 1e-4
  assert stats.binomtest(sum(inserted), 2000, 0.4).pvalue < 1e-4
  changes = np.sum(np.diff(inserted))  # not in blocks, nor alternating
  assert stats.binomtest(int(changes), 1999, 0.5).pvalue > 1e-4


def test_secrets_are_uniform_with_leading_zeros(vocabulary):
  made = canaries_lib.make(
    TEXTS, vocabulary, number=2000, repetitions=(1,), kinds=("own_query",),
    digits=3, seed=1,
  )  # fmt: skip
  for place in range(3):
    digits = [int(one.spelled[place]) for one in made]
    counts = np.bincount(digits, minlength=10)
    assert stats.chisquare(counts).pvalue > 1e-4
    # A zero lost in two of three cases, as without leading zeros, is seen.
    lost = np.array([67, *[2000 / 9 * (1 - 67 / 2000)] * 9])
    assert stats.chisquare(counts, lost).pvalue < 1e-4
  assert len({one.secret for one in made}) > 800


def test_only_inserted_canaries_join_the_records_as_often_as_asked(vocabulary):
  made = canaries_lib.make(TEXTS, vocabulary, number=8, seed=0)
  rows = canaries_lib.repeated(made)
  counts = np.bincount(rows, minlength=len(made))
  expected = [one.repetitions if one.inserted else 0 for one in made]
  np.testing.assert_array_equal(counts, expected)
  assert 0 < sum(one.inserted for one in made) < len(made)
  assert not canaries_lib.repeated(()).size


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
  one = canary(spelled="1234")
  assert canaries_lib.Written.of([text]).tell(one) == leaks


@pytest.mark.parametrize(
  ("text", "leaks"),
  [
    ("a red house", True),
    ("red  house", True),
    ("red houses", False),
    ("house red", False),
    ("bored house", False),
  ],
)
def test_rare_words_leak_as_whole_words_in_their_order(text, leaks):
  one = canary(kind="rare_words", spelled="red house")
  assert canaries_lib.Written.of([text]).tell(one) == leaks


def test_texts_are_searched_each_by_itself():
  written = canaries_lib.Written.of(["a 1 2", "3 4", "7-8 x 9", "red", "house"])
  for spelled, found in (("12", 1), ("123", 0), ("34", 1), ("789", 0)):
    assert written.tell(canary(spelled=spelled)) == found
  for spelled, found in (("red", 1), ("red house", 0)):
    assert written.tell(canary(kind="rare_words", spelled=spelled)) == found


def test_long_text_is_cut_and_the_secret_never_is(vocabulary):
  one = canary(query="tells of " * 50, document="a b c " * 50)
  for length in (4, 5, 9):
    records = canaries_lib.tokenize(
      [one], vocabulary, prefix="ask", document_length=6, query_length=length
    )
    assert records["targets"].shape == (1, length)
    assert records["targets"][0, -4:].tolist() == [5, 6, 7, 1]
  head = vocabulary.encode("ask")
  assert records["inputs"][0, : len(head)].tolist() == head
  assert records["inputs"].shape == (1, len(head) + 6)
  assert records["inputs"][0, -1] == 1
  with pytest.raises(ValueError, match="query_length=3 .* of 3 tokens"):
    canaries_lib.tokenize(
      [one], vocabulary, prefix="", document_length=6, query_length=3
    )


def test_alphabets_are_single_tokens_read_as_themselves(vocabulary):
  digits = canaries_lib.alphabet("digits", vocabulary)
  assert sorted(vocabulary.decode([i]) for i in digits.tolist()) == [
    *"0123456789"
  ]
  words = canaries_lib.alphabet("words", vocabulary)
  assert len(words) > 1000
  for token in words[::97].tolist():
    assert vocabulary.encode(vocabulary.decode([token])) == [token]
  new = canaries_lib.alphabet("new tokens", vocabulary)
  assert len(new) == shipped.EXTRA_IDS
  assert new.min() == vocabulary.vocab_size - shipped.EXTRA_IDS


def test_t5s_own_zero_of_two_tokens_is_one_symbol():
  # T5's vocabulary writes "0" as a space of its own and a digit.
  pieces = {str(d): [50 + d] for d in range(1, 10)} | {"0": [3, 50]}
  stub = types.SimpleNamespace(
    vocab_size=100,
    extra_ids=0,
    encode=pieces.__getitem__,
    decode=lambda ids: "" if ids == [3] else str(ids[0] - 50),
  )
  found = canaries_lib.alphabet("digits", stub)
  assert found.tolist() == list(range(50, 60))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"number": 0}, "number=0"),
    ({"repetitions": (1, 0)}, "repetitions=0"),
    ({"repetitions": ()}, "repetitions=0"),
    ({"digits": 1}, "digits=1"),
    ({"kinds": ("own",)}, "kinds=.'own'"),
    ({"texts": ["one"]}, "at least 2 public documents"),
  ],
)
def test_what_cannot_be_made_is_refused(vocabulary, changes, message):
  given = {"texts": TEXTS, "number": 1, **changes}
  with pytest.raises(ValueError, match=message):
    canaries_lib.make(given.pop("texts"), vocabulary, seed=0, **given)


def test_a_vocabulary_without_symbols_is_refused():
  stub = types.SimpleNamespace(
    vocab_size=20, extra_ids=0, encode=lambda _: [2], decode=lambda _: "?"
  )
  for symbols in ("digits", "words", "new tokens"):
    with pytest.raises(ValueError, match=f"at least 10 {symbols}.* got 0"):
      canaries_lib.alphabet(symbols, stub)


def test_records_end_with_the_end_of_their_own_vocabulary(tmp_path):
  """ruT5: <s> 1, </s> 2, <unk> 3; none of them is a word."""
  path = small_vocabularies.write(
    tmp_path / "v", small_vocabularies.RUT5, vocab_size=140
  )
  words = vocabulary_lib.load(path)
  records = canaries_lib.tokenize(
    [canary()], words, prefix="", document_length=6, query_length=9
  )
  assert records["targets"][0][records["targets"][0] > 0][-4:].tolist() == [
    5, 6, 7, 2,
  ]  # fmt: skip
  assert canaries_lib.alphabet("digits", words).min() > 3
