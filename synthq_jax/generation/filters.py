"""Filters synthetic queries, and counts the dropped queries by reason.

Filters see generated queries and public documents only.

Formal guarantee:
  Post-processing: the remaining queries are as private as the input queries, for
  the same unit and relation, as long as no private data is passed in.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Kept", "keep", "normalize"]

_REASONS = ("empty", "duplicate", "not found")
"""Reasons to drop a query, in the order of tests."""


class Kept(NamedTuple):
  """The remaining queries, and the number of dropped ones by reason."""

  indices: np.ndarray  # [kept], ascending
  removed: dict[str, int]


def normalize(query: str) -> str:
  """Case-folds a query and its white space; equal results are duplicates.

  >>> normalize("  What is  JAX?")
  'what is jax?'
  """
  return " ".join(query.casefold().split())


def keep(
  queries: Sequence[str],
  document_ids: Sequence[str],
  *,
  answerable: Sequence[bool] | np.ndarray | None = None,
) -> Kept:
  """Drops empty, repeated and unanswerable queries.

  Each dropped query counts once, under the first reason that applies. Of equal
  queries for a document the first that passes all tests is kept.

  Args:
    queries: the generated queries.
    document_ids: the document of each query.
    answerable: whether a public search engine finds each query's document, for
      example `text_measures.own_document_gauge(...) > 0`; None keeps all. It
      drops meaningless queries, and queries that BM25 cannot answer.

  Returns:
    The indices of the kept queries, and the number of dropped ones by reason:
    "empty", "duplicate", "not found".

  References:
    Dai et al. 2022, Promptagator, section 3.2, for `answerable`.

  Raises:
    ValueError: if the arguments differ in length.

  >>> keep(["a b", "", "A  b"], ["d1", "d1", "d1"]).indices.tolist()
  [0]
  """
  columns = {"document_ids": document_ids, "answerable": answerable}
  for name, values in columns.items():
    if values is not None and len(values) != len(queries):
      raise ValueError(
        f"expected {name} of one length with the queries, {len(queries)}, got"
        f" {len(values)}"
      )
  removed = dict.fromkeys(_REASONS, 0)
  seen = set()
  indices = []
  for index, (query, document_id) in enumerate(
    zip(queries, document_ids, strict=True)
  ):
    text = normalize(query)
    reasons = {
      "empty": not text,
      "duplicate": (document_id, text) in seen,
      "not found": answerable is not None and not answerable[index],
    }
    reason = next((name for name, holds in reasons.items() if holds), None)
    if reason is None:
      indices.append(index)
      seen.add((document_id, text))
    else:
      removed[reason] += 1
  return Kept(np.array(indices, np.int64), removed)
