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
) -> Kept:
  """Drops empty and truncated queries, and repeats for the same document.

  Each dropped query counts once, under the first reason that fits; of equal
  queries for a document the first is kept.

  Args:
    queries: the generated queries.
    document_ids: the document of each query.
    ended: whether each query ended by itself (`has_ended`); None keeps the
      truncated ones.

  Returns:
    The indices of the kept queries and the count of each outcome: "kept",
    "empty", "truncated", "duplicate".

  Raises:
    ValueError: if the arguments differ in length.

  >>> keep(["a b", "", "A  b"], ["d1", "d1", "d1"]).indices.tolist()
  [0]
  """
  if ended is None:
    ended = [True] * len(queries)
  if not len(queries) == len(document_ids) == len(ended):
    raise ValueError(
      "queries, document_ids and ended must have one length, got"
      f" {len(queries)}, {len(document_ids)} and {len(ended)}"
    )
  counts = dict.fromkeys(("kept", "empty", "truncated", "duplicate"), 0)
  seen = set()
  kept = []
  rows = zip(queries, document_ids, ended, strict=True)
  for index, (query, document_id, complete) in enumerate(rows):
    text = normalize(query)
    reason = _outcome(text, complete, (document_id, text) in seen)
    counts[reason] += 1
    if reason == "kept":
      kept.append(index)
      seen.add((document_id, text))
  return Kept(np.array(kept, np.int64), counts)


def _outcome(text: str, complete: bool, repeated: bool) -> str:
  if not text:
    return "empty"
  if not complete:
    return "truncated"
  return "duplicate" if repeated else "kept"
