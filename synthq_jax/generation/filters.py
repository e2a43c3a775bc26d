"""Filters synthetic queries, and counts the dropped queries by reason.

Filters see generated queries and public documents only.

Formal guarantee:
  Post-processing: the remaining queries are as private as the input queries, for
  the same unit and relation, as long as no private data is passed in.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from synthq_jax import checks
from synthq_jax.generation import text_measures

__all__ = [
  "Kept",
  "are_copies",
  "has_ended",
  "keep",
  "longest_run",
  "normalize",
  "removed",
]

_OUTCOMES = (
  "kept",
  "empty",
  "truncated",
  "duplicate",
  "copied",
  "not found",
  "round trip",
)
"""Outcomes of a query: "kept", or the reason to drop it in the order of tests."""


class Kept(NamedTuple):
  """The remaining queries, and the number of queries with each outcome."""

  indices: np.ndarray  # [kept], ascending
  counts: dict[str, int]  # by outcome, "kept" among them


def normalize(query: str) -> str:
  """Case-folds a query and its white space; equal results are duplicates.

  >>> normalize("  What is  JAX?")
  'what is jax?'
  """
  return " ".join(query.casefold().split())


def has_ended(
  tokens: Int[np.ndarray, "*query length"], eos: int
) -> Bool[np.ndarray, "*query"]:
  """Returns the mask of queries that end with an EOS; the others were cut.

  >>> has_ended(np.array([[5, 1, 0], [5, 6, 7]]), eos=1).tolist()
  [True, False]
  """
  return np.any(np.asarray(tokens) == eos, axis=-1)


def keep(
  queries: Sequence[str],
  document_ids: Sequence[str],
  *,
  ended: Sequence[bool] | np.ndarray | None = None,
  copied: Sequence[bool] | np.ndarray | None = None,
  answerable: Sequence[bool] | np.ndarray | None = None,
  retrieved: Sequence[bool] | np.ndarray | None = None,
) -> Kept:
  """Drops empty, truncated, repeated, copied and unanswerable queries.

  Each dropped query counts once, under the first reason that applies. Of equal
  queries for a document the first that passes all tests is kept.

  Args:
    queries: the generated queries.
    document_ids: the document of each query.
    ended: whether each query ended by itself (`has_ended`); None keeps truncated
      queries.
    copied: whether each query was copied from its document
      (`are_copies`); None keeps the copies.
    answerable: whether a public search engine finds each query's document, for
      example `text_measures.own_document_gauge(...) > 0`; None keeps all. It
      drops meaningless queries, and queries that BM25 cannot answer.
    retrieved: whether a retriever that was trained on the synthetic queries
      themselves finds each query's document (`stages.filter_queries`); None
      keeps all.

  Returns:
    The indices of the kept queries and the count of each outcome: "kept",
    "empty", "truncated", "duplicate", "copied", "not found", "round trip".

  References:
    Dai et al. 2022, Promptagator, section 3.2, for `answerable` and `retrieved`.

  Raises:
    ValueError: if the arguments differ in length.

  >>> keep(["a b", "", "A  b"], ["d1", "d1", "d1"]).indices.tolist()
  [0]
  """
  columns = {
    "document_ids": document_ids,
    "ended": ended,
    "copied": copied,
    "answerable": answerable,
    "retrieved": retrieved,
  }
  for name, values in columns.items():
    if values is not None and len(values) != len(queries):
      raise ValueError(
        f"expected {name} of one length with the queries, {len(queries)}, got"
        f" {len(values)}"
      )
  counts = dict.fromkeys(_OUTCOMES, 0)
  seen = set()
  indices = []
  for index, (query, document_id) in enumerate(
    zip(queries, document_ids, strict=True)
  ):
    text = normalize(query)
    reasons = {
      "empty": not text,
      "truncated": ended is not None and not ended[index],
      "duplicate": (document_id, text) in seen,
      "copied": copied is not None and copied[index],
      "not found": answerable is not None and not answerable[index],
      "round trip": retrieved is not None and not retrieved[index],
    }
    outcome = next((name for name, holds in reasons.items() if holds), "kept")
    counts[outcome] += 1
    if outcome == "kept":
      indices.append(index)
      seen.add((document_id, text))
  return Kept(np.array(indices, np.int64), counts)


def are_copies(
  queries: Sequence[str],
  documents: Iterable[str],
  *,
  share: float,
  min_words: int,
) -> Bool[np.ndarray, " query"]:
  """Detects queries that are mostly one run of words of their document.

  Take the longest run of consecutive words that query and document share. The
  query is a copy if the run has at least `min_words` words and makes up at least
  `share` of the query. Words are those of `text_measures.words`: case and
  punctuation do not count. A copy teaches a retriever to look for equal words. A
  query of fewer words than `min_words`, such as a name or a title, is no copy.

  Args:
    queries: the queries.
    documents: the document text of each query; read once.
    share: the least share of the query, in (0, 1]; 1: the query as a whole.
    min_words: the least number of words of the run, >= 1.

  Returns:
    A mask of the queries; False for a query without words.

  Raises:
    ValueError: if lengths differ, or a setting is out of range.

  >>> are_copies(
  ...   ["all red apples rot", "why do apples rot"],
  ...   ["All red apples rot."] * 2, share=0.75, min_words=3,
  ... ).tolist()
  [True, False]
  """
  checks.within("(0, 1]", share=share)
  checks.at_least(1, min_words=min_words)
  are_copied = []
  for query, document in zip(queries, documents, strict=True):
    words = text_measures.words(query)
    run = longest_run(words, text_measures.words(document))
    are_copied.append(run >= min_words and run >= share * len(words))
  return np.array(are_copied, bool)


def longest_run(query: Sequence[str], document: Sequence[str]) -> int:
  """Returns the length of the longest run of consecutive words in both.

  >>> longest_run("the red apples".split(), "all the red pears".split())
  2
  """
  matcher = difflib.SequenceMatcher(None, document, query, autojunk=False)
  return matcher.find_longest_match().size


def removed(*stages: Kept) -> dict[str, int]:
  """Adds up the number of dropped queries by reason, over stages.

  >>> first = keep(["a", ""], ["d", "d"])
  >>> removed(first, keep(["a"], ["d"], answerable=[False]))["not found"]
  1
  """
  return {
    reason: sum(stage.counts[reason] for stage in stages)
    for reason in _OUTCOMES[1:]
  }
