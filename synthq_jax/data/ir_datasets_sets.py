"""Collections that the package ir_datasets knows: Robust04, Common Core, more.

The package (extra `ir-datasets`) downloads what is free and says where to put
what is licensed, such as the documents of the TREC disks.
"""

from collections.abc import Iterator
from typing import Any

from synthq_jax import extras
from synthq_jax.data import collection as collection_lib
from synthq_jax.data import ids

__all__ = ["num_documents", "queries", "read"]

_FIELDS = ("title", "description")


def read(
  name: str, *, dangling: collection_lib.Dangling | None = None
) -> collection_lib.Collection:
  """Reads a dataset; its documents stay where ir_datasets keeps them.

  A query's text is what ir_datasets calls its default: a TREC topic's title.

  Args:
    name: its id, such as "trec-robust04", "nyt/trec-core-2017" or
      "wapo/v2/trec-core-2018".
    dangling: counts judgements of unknown ids, see `collection.judge`; queries
      without text are left out; None: they are refused.

  Returns:
    The collection, with one split, "test".

  Raises:
    ImportError: if the package is not installed.
    ValueError: if there is no such dataset, or it lacks documents, queries or
      judgements, or a judgement names an unknown id.
  """
  dataset = _load(name)
  for what in ("docs", "queries", "qrels"):
    if not getattr(dataset, f"has_{what}")():
      raise ValueError(
        f"ir_datasets:{name}: expected documents, queries and judgements, got no"
        f" {what}: give the id of a subset that has them"
      )
  streamed = collection_lib.StreamedDocuments(
    tuple(ids.read(each.doc_id, "document") for each in dataset.docs_iter()),
    lambda: _documents(dataset),
  )
  queries = tuple(
    collection_lib.Query(id=ids.read(each.query_id, "query"), text=text)
    for each in dataset.queries_iter()
    if (text := " ".join(each.default_text().split()))
  )
  asked, known = {query.id for query in queries}, set(streamed.ids)
  rows = (
    (
      f"ir_datasets:{name}",
      ids.read(each.query_id, "query"),
      ids.read(each.doc_id, "document"),
      str(each.relevance),
    )
    for each in dataset.qrels_iter()
  )
  qrels = collection_lib.judge(rows, asked, known, dangling=dangling)
  judged = {"test": qrels}
  return collection_lib.Collection(
    streamed, queries, judged, lacking=collection_lib.lacking(judged, known)
  )


def queries(name: str) -> Iterator[tuple[str, str]]:
  """Yields the queries of a dataset, without its documents.

  Args:
    name: its id, such as "msmarco-passage/train" or "trec-robust04".

  Yields:
    Ids and texts: of a TREC topic title and description, one after the other.

  Raises:
    ImportError: if the package is not installed.
    ValueError: if there is no such dataset, or it has no queries.
  """
  dataset = _load(name)
  if not dataset.has_queries():
    raise ValueError(
      f"ir_datasets:{name}: expected queries, got a set without; give the id of"
      " one that has them"
    )
  for each in dataset.queries_iter():
    texts = [getattr(each, field, "") for field in _FIELDS]
    for text in filter(
      str.strip, texts if any(texts) else [each.default_text()]
    ):
      yield ids.read(each.query_id, "query"), " ".join(text.split())


def num_documents(name: str) -> int | None:
  """Returns how many documents the package says a dataset has; None: it is silent.

  Nothing is downloaded.

  Args:
    name: its id.

  Raises:
    ImportError: if the package is not installed.
    ValueError: if there is no such dataset.
  """
  return _load(name).metadata().get("docs", {}).get("count")


def _documents(dataset: Any) -> Iterator[collection_lib.Document]:
  for each in dataset.docs_iter():
    id_ = ids.read(each.doc_id, "document")
    yield collection_lib.Document(id=id_, text=each.default_text())


def _load(name: str) -> Any:
  with extras.required("ir-datasets"):
    import ir_datasets

  try:
    return ir_datasets.load(name)
  except KeyError as error:
    raise ValueError(
      f"ir_datasets:{name}: expected the id of a dataset, got {name!r}; see"
      " https://ir-datasets.com"
    ) from error
