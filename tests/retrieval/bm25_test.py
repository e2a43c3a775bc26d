import collections
import math
import os
import pathlib
import time

import numpy as np
import pytest

from synthq_jax.data import beir
from synthq_jax.retrieval import bm25, measures

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


@pytest.mark.parametrize("k1, b", [(1.2, 0.75), (0.9, 0.4), (2.0, 0.0)])
@pytest.mark.parametrize(
  "query", ["red", "red apple", "sea red red", "by tree"]
)
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


@pytest.mark.parametrize("k", [1, 3, 7, 10, 50])
def test_ties_stand_in_the_order_of_the_documents(k):
  texts = ["same words"] * 5 + ["same words here"] + ["same words"] * 5
  ids = [f"d{i}" for i in range(11)]
  _, (found,) = PLAIN.build(ids, texts).search(["same"], k)
  assert found == [*ids[:5], *ids[6:], ids[5]][:k]


def test_forms_of_a_word_meet_in_their_stem_and_stop_words_do_not_count():
  index = bm25.BM25().build(["a", "b"], ["The retrievers are running", "the"])
  assert index.search(["a retriever runs", "the are"], k=2)[1] == [["a"], []]
  assert bm25.BM25().words(["Vitamin C"]) == [["vitamin", "c"]]


def test_a_run_holds_every_query_best_first():
  run = PLAIN.build(IDS, TEXTS).search_run(["q1", "q2"], ["red", "zebra"], k=1)
  assert list(run) == ["q1", "q2"]
  assert list(run["q1"]) == ["d0"] and run["q2"] == {}


def test_empty_documents_are_never_found():
  index = PLAIN.build(["a", "b", "c"], ["", "red", "..."])
  assert index.search(["red", "..."], k=3)[1] == [["b"], []]


def test_chunks_and_iterators_of_texts_change_nothing(monkeypatch):
  whole = bm25.BM25().build(IDS, TEXTS).search(["red apple", "sea"], k=4)
  monkeypatch.setattr(bm25, "_CHUNK", 1)
  parts = bm25.BM25().build(IDS, iter(TEXTS)).search(["red apple", "sea"], k=4)
  assert parts[1] == whole[1]
  for part, row in zip(parts[0], whole[0], strict=True):
    np.testing.assert_array_equal(part, row)


def test_it_is_silent(capfd):
  PLAIN.build(IDS, TEXTS).search(["red"], k=2)
  assert capfd.readouterr() == ("", "")


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


def test_thousands_of_documents_and_queries_take_seconds():
  rng = np.random.default_rng(0)
  words = np.array([f"w{i}" for i in range(20_000)])
  picks = np.minimum(rng.zipf(1.3, size=(3_000, 40)), len(words)) - 1
  texts = [" ".join(row) for row in words[picks]]
  started = time.process_time()
  index = bm25.BM25().build([str(i) for i in range(3_000)], texts)
  index.search([text[:40] for text in texts[:500]], k=100)
  assert time.process_time() - started < 6


def test_real_text_scores_as_measured_once():
  default = pathlib.Path(__file__).parents[3] / "shared" / "data"
  path = pathlib.Path(os.environ.get("SYNTHQ_SHARED_DATA", default)) / "cisi"
  if not path.is_dir():
    pytest.skip(f"no shared data at {path} (set SYNTHQ_SHARED_DATA)")
  read = beir.read_beir(path)
  index = bm25.BM25().build(
    [item.id for item in read.documents],
    [item.contents for item in read.documents],
  )
  queries = read.split_queries("test")
  run = index.search_run(
    [query.id for query in queries], [query.text for query in queries], k=10
  )
  mean = measures.evaluate(read.qrels["test"], run, ("nDCG@10", "RR@10")).mean
  # The same to four digits by the formula in plain Python (2026-11).
  assert mean == pytest.approx({"nDCG@10": 0.3711, "RR@10": 0.6155}, abs=1e-3)
