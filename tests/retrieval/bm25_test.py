import collections
import dataclasses
import functools
import math
import re
import sys
import unicodedata

import numpy as np
import pytest
import shared_data

from synthq_jax.data import beir, splits, word_patterns
from synthq_jax.retrieval import bm25, measures, ranking

PLAIN = bm25.BM25(stemmer="", stopwords="")
TEXTS = ["red red apple", "green apple tree by the sea", "blue sea", "red"]
IDS = ["d0", "d1", "d2", "d3"]


def oracle(texts, query, k1, b):
  """BM25 with Lucene's idf, word by word."""
  counts = [collections.Counter(text.split()) for text in texts]
  lengths = [sum(count.values()) for count in counts]
  average = sum(lengths) / len(texts)
  scores = np.zeros(len(texts))
  for word in query.split():
    df = sum(word in count for count in counts)
    idf = math.log(1 + (len(texts) - df + 0.5) / (df + 0.5))
    for i, count in enumerate(counts):
      norm = k1 * (1 - b + b * lengths[i] / average)
      scores[i] += idf * count[word] / (count[word] + norm)
  return scores


@pytest.mark.parametrize("k1, b", [(1.2, 0.75), (2.0, 0.0)])
@pytest.mark.parametrize("query", ["red apple", "sea red red"])
def test_scores_are_those_of_the_formula(k1, b, query):
  config = bm25.BM25(k1=k1, b=b, stemmer="", stopwords="")
  (scores,), (ids,) = config.build(IDS, TEXTS).search([query], k=4)
  expected = oracle(TEXTS, query, k1, b)
  order = np.argsort(-expected, kind="stable")[: np.sum(expected > 0)]
  assert ids == [IDS[i] for i in order]
  np.testing.assert_allclose(scores, expected[order], rtol=1e-5)


def test_documents_without_a_common_word_are_no_results():
  scores, ids = PLAIN.build(IDS, TEXTS).search(["blue", "zebra", ""], k=4)
  assert ids == [["d2"], [], []]
  assert [len(row) for row in scores] == [1, 0, 0]


@pytest.mark.parametrize("k", [3, 10, 50])
def test_ties_stand_in_the_order_of_the_documents(k):
  texts = ["same words"] * 5 + ["same words here"] + ["same words"] * 5
  ids = [f"d{i}" for i in range(11)]
  _, (found,) = PLAIN.build(ids, texts).search(["same"], k)
  assert found == [*ids[:5], *ids[6:], ids[5]][:k]


def test_forms_of_a_word_meet_in_their_stem_and_stop_words_do_not_count():
  index = bm25.BM25().build(["a", "b"], ["The retrievers are running", "the"])
  assert index.search(["a retriever runs", "the are"], k=2)[1] == [["a"], []]
  assert bm25.BM25().words(["Vitamin C"]) == [["vitamin", "c"]]


def test_chunks_and_iterators_of_texts_change_nothing(monkeypatch):
  whole = bm25.BM25().build(IDS, TEXTS).search(["red apple", "sea"], k=4)
  monkeypatch.setattr(bm25, "_CHUNK", 1)
  parts = bm25.BM25().build(IDS, iter(TEXTS)).search(["red apple", "sea"], k=4)
  assert parts[1] == whole[1]
  for part, row in zip(parts[0], whole[0], strict=True):
    np.testing.assert_array_equal(part, row)


@pytest.mark.parametrize(
  "change, message",
  [
    ({"k1": -1}, "k1=-1"),
    ({"b": 1.5}, "b=1.5"),
    ({"stemmer": "klingon"}, "stemmer='klingon'"),
  ],
)
def test_a_field_out_of_range_is_named(change, message):
  with pytest.raises(ValueError, match=message):
    bm25.BM25(**change)


def test_bad_input_is_refused():
  with pytest.raises(ValueError, match="got 1 ids and 2 documents"):
    PLAIN.build(["a"], ["x", "y"])
  with pytest.raises(ValueError, match="a word somewhere"):
    PLAIN.build(["a"], ["..."])
  with pytest.raises(ValueError, match="k >= 1, got k=0"):
    PLAIN.build(IDS, TEXTS).search(["red"], k=0)


@pytest.mark.parametrize("few", [0, len(IDS)], ids=["looked up", "all scored"])
@pytest.mark.parametrize("query", ["red green red zzz", "zzz"])
def test_scores_of_chosen_documents_are_those_of_the_search(
  query, few, monkeypatch
):
  monkeypatch.setattr(bm25, "_FEW", few)
  index = PLAIN.build(IDS, TEXTS)
  (found,), (ids,) = index.search([query], k=len(IDS))
  places = np.random.default_rng(0).permutation(len(IDS))
  [words] = PLAIN.words([query])
  scores = index.scores_at(words, places)
  assert scores.dtype == np.float32 and scores.shape == (len(IDS),)
  listed = {IDS[at]: x for at, x in zip(places, scores, strict=True) if x}
  assert listed == dict(zip(ids, found, strict=True))
  assert index.scores_at(words, places[:0]).shape == (0,)


@functools.cache
def shared(name):
  """Reads a shared collection, or skips the test."""
  data = beir.read_beir(shared_data.folder(name))
  return dataclasses.replace(data, documents=tuple(data.documents))


def searched(data, config):
  """Runs BM25 for the test queries, title and text of the documents."""
  index = config.build(
    [item.id for item in data.documents],
    [item.contents for item in data.documents],
  )
  queries = [q for q in data.queries if q.id in data.qrels["test"]]
  return index.search_run(
    [item.id for item in queries], [item.text for item in queries], k=100
  )


# With the defaults: words \w+ in lower case, Snowball's English stemmer, the
# English stop words of bm25s, k1 1.2, b .75, every word of a query as often as
# it stands there (November 2026). CISI the same in plain Python.
MEASURED = {
  "cisi": {"nDCG@10": 0.3711, "RR@10": 0.6155, "R@100": 0.4330, "MFR": 5.724},
  "boolq": {"nDCG@10": 0.8155, "RR@10": 0.7781, "R@100": 0.9883, "MFR": 4.746},
  "medquad": {
    "nDCG@10": 0.5441, "RR@10": 0.4719, "R@100": 0.8869, "MFR": 14.868
  },
  "msmarco_dl19_mini": {
    "nDCG@10": 0.7269, "RR@10": 0.9845, "R@100": 0.7784, "MFR": 1.0465
  },
}  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
def test_real_text_scores_as_measured_once(name):
  data = shared(name)
  run = searched(data, bm25.BM25())
  got = measures.evaluate(
    data.qrels["test"], run, tuple(MEASURED[name]), drop_identical=False
  )
  assert got.mean == pytest.approx(MEASURED[name], rel=1e-3)


def test_letters_are_the_same_in_both_forms_of_unicode():
  """Decomposed accents are no part of a word to `\\w`: words were torn."""
  whole = "prix du café à la crème"
  apart = unicodedata.normalize("NFD", whole)
  assert apart != whole
  first, second = bm25.BM25().words([whole, apart])
  assert first == second and "café" in first
  built = bm25.BM25().build(["a", "b"], [apart, "the price of tea"])
  assert built.search([whole], k=1)[1] == [["a"]]
  assert ranking._space_words(apart) == whole
  assert splits.token_set(apart) == splits.token_set(whole)


HINDI = {
  "water": "पानी में मछली",
  "letter": "चिट्ठी का उत्तर",
  "north": "उत्तरी हवा",
  "joined": "क्\u200dया है",
}


def test_pairs_and_parts_of_words_keep_their_vowel_signs():
  """What ranking learned read a word of Hindi as several of a letter or two."""
  spaced = ranking._space_words(f"({HINDI['letter']})")
  assert spaced == HINDI["letter"]
  fields = {field.name: field.reads for field in ranking.FIELDS}
  [pairs] = fields["pairs of words"].words([spaced])
  one, two, three = spaced.split()
  assert pairs == [f"{one} {two}", f"{two} {three}"]
  [parts] = fields["four letters"].words(["ab cdefg"])
  assert parts == ["cdef", "defg"]


def test_marks_belong_to_their_words():
  """Cut at vowel signs, all words of Hindi came down to a few consonants."""
  index = bm25.BM25().build(list(HINDI), HINDI.values())
  words = bm25.BM25().words([*HINDI.values(), "e\u0301t\u00e9 na\u00efve"])
  assert words[0] == ["पानी", "में", "मछली"]
  assert words[3] == ["क्या", "है"]
  assert words[4] == ["été", "naïv"]
  queries = ["मछली", "उत्तर", "उत्तरी", "क्या"]
  assert index.search(queries, k=10)[1] == [
    ["water"], ["letter"], ["north"], ["joined"]
  ]  # fmt: skip


def test_the_pattern_has_every_mark_of_unicode():
  marks = {
    chr(code)
    for code in range(sys.maxunicode + 1)
    if unicodedata.category(chr(code)) in ("Mn", "Mc")
    and "VARIATION SELECTOR" not in unicodedata.name(chr(code), "")
  }
  held = {m for m in marks if re.fullmatch(word_patterns.WORD, f"a{m}b")}
  assert marks - held == {"\u034f"}


def test_empty_documents_are_never_found():
  index = PLAIN.build(["a", "b", "c"], ["", "red", "..."])
  assert index.search(["red", "..."], k=3)[1] == [["b"], []]
