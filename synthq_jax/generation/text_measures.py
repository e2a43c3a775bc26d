"""Measures generated queries: relevance to their document, copying, diversity.

For synthetic queries and public documents the measures are post-processing. For
real queries their results are private.
"""

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from synthq_jax import extras
from synthq_jax.data import word_patterns
from synthq_jax.retrieval import bm25

__all__ = [
  "Bleu",
  "bleu",
  "copy_rate",
  "distinct_pairs",
  "mean_length",
  "own_document_gauge",
  "words",
]

_QUERIES = 4096
"""Queries of one search call, whose results are in memory together."""

_WORD = re.compile(word_patterns.WORD)


def words(text: str) -> list[str]:
  """Returns the case-folded words that the measures of this module count.

  >>> words("What's in JAX?")
  ['what', 's', 'in', 'jax']
  """
  return _WORD.findall(text.casefold())


def own_document_gauge(
  queries: Sequence[str],
  document_ids: Sequence[str],
  index: bm25.Index,
  *,
  k: int = 10,
) -> Float[np.ndarray, " query"]:
  """Scores each query by the rank that BM25 gives to the query's own document.

  The score is nDCG@k of a search in the whole collection, with the query's own
  document as the only relevant one: 1 / log2(1 + rank), or 0 beyond rank k. It
  exposes a generator that writes fluently about nothing. It does not measure
  whether people would ask such queries, and copies of the document score well. So
  read it together with `copy_rate`, and compare with the gauge of real queries.

  Args:
    queries: the queries; an empty query scores 0.
    document_ids: the id of each query's own document.
    index: an index of the whole collection, of `bm25.BM25().build`.
    k: the depth of the search, >= 1.

  Returns:
    One value in [0, 1] per query.

  Raises:
    ValueError: if lengths differ or the collection lacks a query's document.
  """
  _check_lengths("queries", queries, "document_ids", document_ids)
  missing = set(document_ids) - set(index.ids)
  if missing:
    raise ValueError(
      "the index must hold each query's document, got none with id"
      f" {min(missing)!r} ({len(missing)} missing)"
    )
  gains = np.zeros(len(queries))
  for start in range(0, len(queries), _QUERIES):
    part = slice(start, start + _QUERIES)
    _, results = index.search(queries[part], k)
    rows = zip(results, document_ids[part], strict=True)
    gains[part] = [_compute_gain(result, own) for result, own in rows]
  return gains


def _compute_gain(results: Sequence[str], own: str) -> float:
  """Computes the nDCG of results if `own` alone is relevant."""
  if own not in results:
    return 0.0
  return float(1 / np.log2(2 + list(results).index(own)))


class Bleu(NamedTuple):
  """A BLEU score with the signature of sacrebleu."""

  score: float  # 0 to 100; nan if no query has four words
  signature: str  # sacrebleu's, e.g. "nrefs:1|case:lc|...|version:2.6.0"


def bleu(queries: Sequence[str], references: Sequence[Sequence[str]]) -> Bleu:
  """Computes the corpus BLEU of queries against real queries, with its signature.

  Case does not count, since the shipped vocabulary folds it.

  Args:
    queries: generated queries.
    references: for each query, the real queries of the same document, at least
      one.

  Returns:
    BLEU-4 with sacrebleu's tokenizer ("13a") and exponential smoothing, 0 to
    100, with sacrebleu's signature. Without queries, 0 and an empty signature.
    If no query has the four words of a 4-gram, nan: sacrebleu says 0, even if
    each equals its reference. A score computed from real queries is private.

  Raises:
    ValueError: if lengths differ or a query has no reference.

  References:
    Post 2018, A Call for Clarity in Reporting BLEU Scores.

  >>> bleu(["a b c d"], [["a b c d"]]).signature.split("|")[:4]
  ['nrefs:1', 'case:lc', 'eff:no', 'tok:13a']
  """
  with extras.required("run"):
    from sacrebleu import metrics

  _check_lengths("queries", queries, "references", references)
  if not queries:
    return Bleu(0.0, "")
  if not all(references):
    raise ValueError("every query needs a reference, got one without")
  columns = itertools.zip_longest(*references)
  metric = metrics.BLEU(lowercase=True)
  result = metric.corpus_score(
    list(queries), [list(column) for column in columns]
  )
  score = float(result.score) if result.totals[-1] else math.nan
  return Bleu(score, str(metric.get_signature()))


def copy_rate(queries: Iterable[str], documents: Iterable[str]) -> float:
  """Computes the share of the queries' 4-grams that occur in their document.

  All 4-grams of all queries are pooled, so long queries count more, and queries of
  fewer words do not count. Real queries copy, too. A rate far above theirs shows
  that sentences are copied.

  Args:
    queries: the queries.
    documents: the document text of each query; both are read once.

  Returns:
    A share in [0, 1]; 0 if there is no 4-gram at all.

  Raises:
    ValueError: if lengths differ.

  >>> copy_rate(["red apples rot on trees"], ["All red apples rot on walls."])
  0.5
  """
  copied = total = 0
  for query, document in zip(queries, documents, strict=True):
    in_document = set(_split_ngrams(document, 4))
    ngrams = _split_ngrams(query, 4)
    copied += sum(ngram in in_document for ngram in ngrams)
    total += len(ngrams)
  return copied / total if total else 0.0


def mean_length(queries: Sequence[str]) -> float:
  """Computes the mean number of words of a query; 0 for no queries.

  >>> mean_length(["one", "two three"])
  1.5
  """
  if not queries:
    return 0.0
  return sum(len(words(query)) for query in queries) / len(queries)


def distinct_pairs(queries: Sequence[str]) -> float:
  """Computes the share of distinct pairs among all pairs of a query's next words.

  It is near 0 for a generator that repeats itself. It also falls with the number of
  queries, so compare sets of equal size only.

  Args:
    queries: the queries.

  Returns:
    A share in [0, 1]; 0 if there is no pair at all.

  References:
    Li et al. 2016, A Diversity-Promoting Objective Function for Neural
    Conversation Models, section 5.

  >>> distinct_pairs(["a b", "a b c"])
  0.6666666666666666
  """
  ngrams = [ngram for query in queries for ngram in _split_ngrams(query, 2)]
  return len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def _split_ngrams(text: str, n: int) -> list[tuple[str, ...]]:
  tokens = words(text)
  return list(zip(*(tokens[start:] for start in range(n)), strict=False))


def _check_lengths(
  first_name: str, first: Sequence, second_name: str, second: Sequence
) -> None:
  if len(first) != len(second):
    raise ValueError(
      f"{first_name} and {second_name} must have one length, got"
      f" {len(first)} and {len(second)}"
    )
