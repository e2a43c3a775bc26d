"""Cheap measures of generated queries: about their document, copied, varied.

Applied to synthetic queries and public documents they are post-processing;
applied to real queries, what they return is private.
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from synthq_jax import checks, extras
from synthq_jax.data import word_patterns
from synthq_jax.retrieval import bm25

__all__ = [
  "Bleu",
  "bleu",
  "copy_rate",
  "distinct_n",
  "mean_length",
  "own_document_gauge",
  "signed_bleu",
  "words",
]

_QUERIES = 4096
"""Asked at once: what they found is in memory at the same time."""

_WORD = re.compile(word_patterns.WORD)


def words(text: str) -> list[str]:
  """Returns the words that the measures of this module count.

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
  """Scores whether BM25 finds each query's own document.

  nDCG@k of a search of the whole collection where a query's own document alone
  is relevant: 1 / log2(1 + rank), or 0 beyond rank k. It sees at once a
  generator that writes fluently about nothing. It doesn't see whether a query
  is one that people would ask, and copying from the document scores well: read
  it beside `copy_rate`, and compare with the gauge of real queries.

  Args:
    queries: the queries; an empty one scores 0.
    document_ids: the document that each query was written for.
    index: of the whole collection, from `bm25.BM25().build`.
    k: the cut, >= 1.

  Returns:
    One value in [0, 1] per query.

  Raises:
    ValueError: if lengths differ or the collection lacks a query's document.
  """
  _same_length("queries", queries, "document_ids", document_ids)
  missing = set(document_ids) - set(index.ids)
  if missing:
    raise ValueError(
      "the index must hold each query's document, got none with id"
      f" {min(missing)!r} ({len(missing)} missing)"
    )
  gains = np.zeros(len(queries))
  for start in range(0, len(queries), _QUERIES):
    part = slice(start, start + _QUERIES)
    _, found = index.search(queries[part], k)
    rows = zip(found, document_ids[part], strict=True)
    gains[part] = [_gain(row, own) for row, own in rows]
  return gains


def _gain(found: Sequence[str], own: str) -> float:
  """Returns nDCG where `own` alone is relevant."""
  if own not in found:
    return 0.0
  return float(1 / np.log2(2 + list(found).index(own)))


class Bleu(NamedTuple):
  """A BLEU score, and how sacrebleu computed it."""

  score: float  # 0 to 100
  signature: str  # sacrebleu's, e.g. "nrefs:1|case:lc|...|version:2.6.0"


def bleu(queries: Sequence[str], references: Sequence[Sequence[str]]) -> float:
  """Returns the score of `signed_bleu` alone, 0 to 100.

  >>> round(bleu(["return the sum of a and b"], [["Return the sum of a and b"]]))
  100
  """
  return signed_bleu(queries, references).score


def signed_bleu(
  queries: Sequence[str], references: Sequence[Sequence[str]]
) -> Bleu:
  """Returns the corpus BLEU of queries against the real ones, and how.

  Case does not count: the shipped vocabulary folds it.

  Args:
    queries: generated ones.
    references: for each, the real queries of the same document, at least one.

  Returns:
    BLEU-4 with sacrebleu's tokenizer ("13a") and exponential smoothing, 0 to
    100, with sacrebleu's signature; 0 and no signature for no queries.
    Computed from real queries, the score is private.

  Raises:
    ValueError: if lengths differ or a query has no reference.

  References:
    Post 2018, A Call for Clarity in Reporting BLEU Scores.

  >>> signed_bleu(["a b c d"], [["a b c d"]]).signature.split("|")[:4]
  ['nrefs:1', 'case:lc', 'eff:no', 'tok:13a']
  """
  with extras.required("run"):
    from sacrebleu import metrics

  _same_length("queries", queries, "references", references)
  if not queries:
    return Bleu(0.0, "")
  if not all(references):
    raise ValueError("every query needs a reference, got one without")
  columns = itertools.zip_longest(*references)
  metric = metrics.BLEU(lowercase=True)
  found = metric.corpus_score(list(queries), [list(one) for one in columns])
  return Bleu(float(found.score), str(metric.get_signature()))


def copy_rate(
  queries: Iterable[str], documents: Iterable[str], n: int = 1
) -> float:
  """Returns the share of the queries' n-grams that stand in their document.

  Pooled over all n-grams of all queries, so that long queries count more;
  queries of fewer than n words don't count. Real queries copy too: a rate far
  above theirs for n of 4 or more says that sentences are being copied.

  Args:
    queries: the queries.
    documents: the text that each was written for; both are read once.
    n: words per n-gram, at least 1.

  Returns:
    A share in [0, 1]; 0 where there is no n-gram at all.

  Raises:
    ValueError: if there are more of one than of the other, or n is below 1.

  >>> copy_rate(["red apples rot"], ["All red apples."], n=2)
  0.5
  """
  copied = total = 0
  for query, document in zip(queries, documents, strict=True):
    in_document = set(_ngrams(document, n))
    ngrams = _ngrams(query, n)
    copied += sum(ngram in in_document for ngram in ngrams)
    total += len(ngrams)
  return copied / total if total else 0.0


def mean_length(queries: Sequence[str]) -> float:
  """Returns the mean number of words of a query; 0 for no queries.

  >>> mean_length(["one", "two three"])
  1.5
  """
  if not queries:
    return 0.0
  return sum(len(words(query)) for query in queries) / len(queries)


def distinct_n(queries: Sequence[str], n: int = 1) -> float:
  """Returns the share of different n-grams among all n-grams of the queries.

  Near 0 for a generator that says the same thing everywhere. It falls with the
  number of queries by itself: compare sets of equal size only.

  Args:
    queries: the queries.
    n: words per n-gram, at least 1.

  Returns:
    A share in [0, 1]; 0 where there is no n-gram at all.

  Raises:
    ValueError: if n is below 1.

  References:
    Li et al. 2016, A Diversity-Promoting Objective Function for Neural
    Conversation Models, section 5.

  >>> distinct_n(["a b", "a c"])
  0.75
  """
  ngrams = [ngram for query in queries for ngram in _ngrams(query, n)]
  return len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def _ngrams(text: str, n: int) -> list[tuple[str, ...]]:
  checks.at_least(1, n=n)
  tokens = words(text)
  return list(zip(*(tokens[start:] for start in range(n)), strict=False))


def _same_length(
  first_name: str, first: Sequence, second_name: str, second: Sequence
) -> None:
  if len(first) != len(second):
    raise ValueError(
      f"{first_name} and {second_name} must have one length, got"
      f" {len(first)} and {len(second)}"
    )
