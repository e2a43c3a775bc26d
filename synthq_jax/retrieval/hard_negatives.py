"""Documents that a run ranks high and nobody judged relevant.

References:
  Xiong et al., "Approximate Nearest Neighbor Negative Contrastive Learning for
  Dense Text Retrieval", ICLR 2021.
"""

import os

from synthq_jax import checks
from synthq_jax.data import beir
from synthq_jax.retrieval import trec

__all__ = ["mine", "write"]


def mine(
  run: trec.Run, qrels: trec.Qrels, *, per_query: int = 1, skip: int = 0
) -> dict[str, list[str]]:
  """Picks negatives for every judged query of a run.

  Where few documents are judged, some of the highest ranked are relevant all
  the same: `skip` passes over them. A query's own id is never its negative.

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

  Returns:
    Query id -> document ids, best first; queries without any are left out.

  Raises:
    ValueError: if `per_query` < 1 or `skip` < 0.
  """
  checks.at_least(1, per_query=per_query)
  checks.at_least(0, skip=skip)
  found = {}
  for query, grades in qrels.items():
    others = [
      document
      for document in trec.ranking(run.get(query, {}))
      if grades.get(document, 0) <= 0 and document != query
    ]
    if chosen := others[skip : skip + per_query]:
      found[query] = chosen
  return found


def write(path: str | os.PathLike, negatives: dict[str, list[str]]) -> None:
  """Writes the table that `task_sources.Folder` reads.

  Args:
    path: the file; it appears only when complete.
    negatives: from `mine`.
  """
  beir.write_negatives(
    path,
    (
      (query, document)
      for query, documents in negatives.items()
      for document in documents
    ),
  )
