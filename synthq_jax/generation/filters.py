"""Filters of synthetic queries: which to keep, and why the others went.

They see generated queries and public documents only.

Formal guarantee:
  Post-processing: what they keep is as private as the queries they are given,
  for the same unit and relation, as long as nothing private is passed in.
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
"""Why a query went, in the order of the tests."""


class Kept(NamedTuple):
  """What the filters kept, and how many queries each took out."""

  indices: np.ndarray  # [kept], ascending
  counts: dict[str, int]  # by reason, "kept" among them


def normalize(query: str) -> str:
  """Returns what makes two queries the same: their words, lower-cased.

  >>> normalize("  What is  JAX?")
  'what is jax?'
  """
  return " ".join(query.casefold().split())


def has_ended(
  tokens: Int[np.ndarray, "*query length"], eos: int
) -> Bool[np.ndarray, "*query"]:
  """Returns which queries end with an EOS rather than cut at full length.

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
  found: Sequence[bool] | np.ndarray | None = None,
  retrieved: Sequence[bool] | np.ndarray | None = None,
) -> Kept:
  """Drops empty, truncated, repeated, copied and pointless queries.

  Each dropped query counts once, under the first reason that fits; of equal
  queries for a document the first is kept.

  Args:
    queries: the generated queries.
    document_ids: the document of each query.
    ended: whether each query ended by itself (`has_ended`); None keeps the
      truncated ones.
    copied: whether each query was copied from its document
      (`are_copies`); None keeps the copies.
    found: whether a public search engine finds each query's document, for
      example `text_measures.own_document_gauge(...) > 0`; None keeps all. It
      takes out queries about nothing, and those that BM25 cannot answer.
    retrieved: whether a retriever that was trained on the synthetic queries
      themselves finds each query's document (`stages.filter_queries`); None
      keeps all.

  Returns:
    The indices of the kept queries and the count of each outcome: "kept",
    "empty", "truncated", "duplicate", "copied", "not found", "round trip".

  References:
    Dai et al. 2022, Promptagator, section 3.2, for `found` and `retrieved`.

  Raises:
    ValueError: if the arguments differ in length.

  >>> keep(["a b", "", "A  b"], ["d1", "d1", "d1"]).indices.tolist()
  [0]
  """
  count = len(queries)
  passes = _columns(count, document_ids, ended, copied, found, retrieved)
  counts = dict.fromkeys(_OUTCOMES, 0)
  seen = set()
  kept = []
  for index, (query, document_id, *passed) in enumerate(
    zip(queries, document_ids, *passes, strict=True)
  ):
    text = normalize(query)
    reason = _outcome(text, (document_id, text) in seen, *passed)
    counts[reason] += 1
    if reason == "kept":
      kept.append(index)
      seen.add((document_id, text))
  return Kept(np.array(kept, np.int64), counts)


def are_copies(
  queries: Sequence[str],
  documents: Iterable[str],
  *,
  share: float,
  min_words: int,
) -> Bool[np.ndarray, " query"]:
  """Says which queries are, for the most part, one run of their document.

  A query is a copy if the longest run of consecutive words that stands in its
  document, too, has at least `min_words` words and makes up at least `share` of
  the query. Words are those of `text_measures.words`: case and punctuation do
  not count. A copy teaches a retriever to look for equal words, and a query of
  a few words (a name, a title) is none, however it came about.

  Args:
    queries: the queries.
    documents: the text that each was written for; read once.
    share: in (0, 1]; 1 names the queries that were copied as a whole.
    min_words: of the run, >= 1.

  Returns:
    One value per query; False for a query without words.

  Raises:
    ValueError: if there are more of one than of the other, or a setting is out
      of range.

  >>> are_copies(
  ...   ["all red apples rot", "why do apples rot"],
  ...   ["All red apples rot."] * 2, share=0.75, min_words=3,
  ... ).tolist()
  [True, False]
  """
  checks.within("(0, 1]", share=share)
  checks.at_least(1, min_words=min_words)
  found = []
  for query, document in zip(queries, documents, strict=True):
    own = text_measures.words(query)
    run = longest_run(own, text_measures.words(document))
    found.append(run >= min_words and run >= share * len(own))
  return np.array(found, bool)


def longest_run(query: Sequence[str], document: Sequence[str]) -> int:
  """Returns the length of the longest run of consecutive words that both have.

  >>> longest_run("the red apples".split(), "all the red pears".split())
  2
  """
  matcher = difflib.SequenceMatcher(None, document, query, autojunk=False)
  return matcher.find_longest_match().size


def removed(*kept: Kept) -> dict[str, int]:
  """Returns how many queries each filter took out, added up over stages.

  >>> removed(keep(["a", ""], ["d", "d"]), keep(["a"], ["d"], found=[False]))[
  ...   "not found"
  ... ]
  1
  """
  return {
    reason: sum(one.counts[reason] for one in kept) for reason in _OUTCOMES[1:]
  }


def _columns(count: int, document_ids, ended, copied, found, retrieved):
  """Returns what each optional test says of each query; True lets it pass."""
  given = {
    "document_ids": document_ids,
    "ended": ended,
    "copied": copied,
    "found": found,
    "retrieved": retrieved,
  }
  for name, values in given.items():
    if values is not None and len(values) != count:
      raise ValueError(
        f"expected {name} of one length with the queries, {count}, got"
        f" {len(values)}"
      )
  own = [not one for one in copied] if copied is not None else None
  return [
    column if column is not None else [True] * count
    for column in (ended, own, found, retrieved)
  ]


def _outcome(
  text: str, repeated: bool, ended: bool, own: bool, found: bool, back: bool
) -> str:
  """Returns the first reason to drop a query, or "kept"."""
  reasons = (not text, not ended, repeated, not own, not found, not back)
  named = zip(_OUTCOMES[1:], reasons, strict=True)
  return next((name for name, holds in named if holds), "kept")
