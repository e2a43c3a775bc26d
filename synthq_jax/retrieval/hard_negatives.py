"""Documents that a run ranks high and nobody judged relevant.

References:
  Xiong et al., "Approximate Nearest Neighbor Negative Contrastive Learning for
  Dense Text Retrieval", ICLR 2021.
"""

import math
import os
from collections.abc import Mapping

from synthq_jax import checks
from synthq_jax.data import beir, files
from synthq_jax.retrieval import trec

__all__ = ["mine", "write"]


def mine(
  run: trec.Run,
  qrels: trec.Qrels,
  *,
  per_query: int = 1,
  skip: int = 0,
  below: float | None = None,
) -> dict[str, list[str]]:
  """Picks negatives for every judged query of a run.

  Where few documents are judged, some of the highest ranked are relevant all
  the same: `skip` passes over them, and `below` over all that come near to what
  is known to be relevant. A query's own id is never its negative.

  Formal guarantee: none. Negatives are a function of the queries: those of
  private queries are private, and a gradient that uses them is of one record
  only if each query's negatives come from public documents and itself alone.

  >>> mine({"q": {"a": 3.0, "b": 2.0, "c": 1.0}}, {"q": {"a": 1}})
  {'q': ['b']}

  Args:
    run: query id -> document id -> score, e.g. of BM25.
    qrels: query id -> document id -> grade; above 0 is relevant.
    per_query: how many at most, >= 1.
    skip: how many of the best that are not judged relevant are passed over.
    below: a negative's score is below this share, in (0, 1], of the best score
      of a relevant document (of its size above it, where that is negative); a
      query whose relevant documents the run does not hold has none. None: any.

  Returns:
    Query id -> document ids, best first; queries without any are left out.

  Raises:
    ValueError: if `per_query` < 1, `skip` < 0 or `below` is no share.

  References:
    Moreira et al., NV-Retriever, arXiv:2407.15831, section 3.3 (a share of the
    positive's score).
  """
  checks.at_least(1, per_query=per_query)
  checks.at_least(0, skip=skip)
  if below is not None:
    checks.within("(0, 1]", below=below)
  found = {}
  for query, grades in qrels.items():
    scores = run.get(query, {})
    bound = _bound(scores, grades, below)
    others = [
      document
      for document in trec.ranking(scores)
      if grades.get(document, 0) <= 0
      and document != query
      and scores[document] < bound
    ]
    if chosen := others[skip : skip + per_query]:
      found[query] = chosen
  return found


def _bound(
  scores: Mapping[str, float], grades: Mapping[str, int], below: float | None
) -> float:
  """Returns what a negative's score has to be below."""
  if below is None:
    return math.inf
  own = [scores[d] for d, grade in grades.items() if grade > 0 and d in scores]
  best = max(own, default=-math.inf)
  return best - (1 - below) * abs(best) if own else -math.inf


def write(path: str | os.PathLike, negatives: dict[str, list[str]]) -> None:
  """Writes the table that `task_sources.Folder` reads.

  Args:
    path: the file; it appears only when complete.
    negatives: from `mine`.
  """
  pairs = [(q, d) for q, found in negatives.items() for d in found]
  files.write_lines(path, map("\t".join, [beir.NEGATIVES_HEADER, *pairs]))
