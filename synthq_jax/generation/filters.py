"""Filters of synthetic queries: which to keep, and why the others went.

They see generated queries and public documents only.

Formal guarantee:
  Post-processing: what they keep is as private as the queries they are given,
  for the same unit and relation, as long as nothing private is passed in.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

__all__ = ["Kept", "has_ended", "keep", "normalize"]

_EOS = 1


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
  tokens: Int[np.ndarray, "*query length"],
) -> Bool[np.ndarray, "*query"]:
  """Returns which queries end with an EOS rather than cut at full length.

  >>> has_ended(np.array([[5, 1, 0], [5, 6, 7]])).tolist()
  [True, False]
  """
  return np.any(np.asarray(tokens) == _EOS, axis=-1)


def keep(
  queries: Sequence[str],
  document_ids: Sequence[str],
  *,
  ended: Sequence[bool] | None = None,
  found: Sequence[bool] | None = None,
) -> Kept:
  """Drops empty, truncated, repeated and pointless queries.

  Each dropped query counts once, under the first reason that fits; of equal
  queries for a document the first is kept.

  Args:
    queries: the generated queries.
    document_ids: the document of each query.
    ended: whether each query ended by itself (`has_ended`); None keeps the
      truncated ones.
    found: whether a public search engine finds each query's document, for
      example `text_measures.own_document_gauge(...) > 0`; None keeps all. It
      takes out queries about nothing, and those that BM25 cannot answer.

  Returns:
    The indices of the kept queries and the count of each outcome: "kept",
    "empty", "truncated", "duplicate", "not found".

  References:
    Dai et al. 2022, Promptagator, section 3.2, for `found`.

  Raises:
    ValueError: if the arguments differ in length.

  >>> keep(["a b", "", "A  b"], ["d1", "d1", "d1"]).indices.tolist()
  [0]
  """
  if ended is None:
    ended = [True] * len(queries)
  if found is None:
    found = [True] * len(queries)
  lengths = {len(queries), len(document_ids), len(ended), len(found)}
  if len(lengths) > 1:
    raise ValueError(
      "queries, document_ids, ended and found must have one length, got"
      f" {len(queries)}, {len(document_ids)}, {len(ended)} and {len(found)}"
    )
  counts = dict.fromkeys(
    ("kept", "empty", "truncated", "duplicate", "not found"), 0
  )
  seen = set()
  kept = []
  rows = zip(queries, document_ids, ended, found, strict=True)
  for index, (query, document_id, complete, useful) in enumerate(rows):
    text = normalize(query)
    reason = _outcome(text, complete, (document_id, text) in seen, useful)
    counts[reason] += 1
    if reason == "kept":
      kept.append(index)
      seen.add((document_id, text))
  return Kept(np.array(kept, np.int64), counts)


def _outcome(text: str, complete: bool, repeated: bool, useful: bool) -> str:
  if not text:
    return "empty"
  if not complete:
    return "truncated"
  if repeated:
    return "duplicate"
  return "kept" if useful else "not found"
