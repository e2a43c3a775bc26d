import math

import numpy as np
import pytest

from synthq_jax.generation import text_measures
from synthq_jax.retrieval import bm25

_TEXTS = [
  "red apples grow on trees",
  "green pears grow on trees and on walls of the old garden",
  "gradients flow through a graph",
  "noise hides a query",
]
_INDEX = bm25.BM25().build(["a", "b", "c", "d"], _TEXTS)


def test_the_gauge_is_ndcg_of_the_own_document():
  queries = ["red apples", "green pears", "trees grow", "apples", "", "zebra"]
  own = ["a", "b", "b", "d", "a", "c"]
  gauge = text_measures.own_document_gauge(queries, own, _INDEX)
  # "b" is the longer of the two documents about trees: rank 2.
  np.testing.assert_allclose(gauge, [1, 1, 1 / np.log2(3), 0, 0, 0])


def test_the_gauge_refuses_documents_that_the_collection_lacks():
  with pytest.raises(ValueError, match="'z'"):
    text_measures.own_document_gauge(["q"], ["z"], _INDEX)
  with pytest.raises(ValueError, match="got 1 and 2"):
    text_measures.own_document_gauge(["q"], ["a", "b"], _INDEX)


def test_copy_rate_counts_ngrams_found_in_the_own_document_only():
  queries = ["Red apples grow on walls", "red apples grow on", "grow on trees"]
  documents = [_TEXTS[0], _TEXTS[1], _TEXTS[0]]
  assert text_measures.copy_rate(queries, documents) == 1 / 3
  assert text_measures.copy_rate(queries[2:], documents[2:]) == 0.0


def test_distinct_pairs_are_the_share_of_different_pairs():
  queries = ["a b a b", "A B"]
  assert text_measures.distinct_pairs(queries) == 2 / 4
  assert text_measures.distinct_pairs([]) == 0.0


def test_mean_length_counts_words_and_empty_queries():
  assert text_measures.mean_length(["what is jax?", ""]) == 1.5
  assert text_measures.mean_length([]) == 0.0


def test_bleu_of_a_corpus_is_the_formula():
  """One query of 5 words, 4 of them right: precisions 4/5, 3/4, 2/3, 1/2."""
  expected = 100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25
  got = text_measures.bleu(
    ["the sum of a list"], [["The sum of a tuple"]]
  ).score
  np.testing.assert_allclose(got, expected)


def test_bleu_of_queries_below_four_words_is_unknown():
  """Log queries are short, and sacrebleu gives the same ones 0."""
  short = ["boat to island", "red shoes"]
  assert math.isnan(
    text_measures.bleu(short, [[query] for query in short]).score
  )
  longer = [*short, "how to tie a tie"]
  same = [[query] for query in longer]
  assert text_measures.bleu(longer, same).score == pytest.approx(100)


def test_bleu_refuses_queries_without_a_reference():
  with pytest.raises(ValueError, match="every query needs a reference"):
    text_measures.bleu(["a"], [[]])
  with pytest.raises(ValueError, match="one length"):
    text_measures.bleu(["a"], [])
  assert text_measures.bleu([], []).score == 0


def test_the_score_is_that_of_the_function_that_papers_call():
  import sacrebleu

  queries = ["the sum of a list", "return the mean"]
  references = [["The sum of a tuple"], ["Return a mean of it"]]
  expected = sacrebleu.corpus_bleu(
    queries, [[one[0] for one in references]], lowercase=True
  )
  assert text_measures.bleu(queries, references).score == expected.score
