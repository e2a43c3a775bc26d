"""Reads collections of the package ir_datasets, such as Robust04 and Common Core.

The package (extra `ir-datasets`) downloads free data and names the folder for
licensed data, such as the documents of the TREC disks.
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
  """Reads a dataset; its documents stay on disk, in the store of ir_datasets.

  A query's text is its `default_text` in ir_datasets: a TREC topic's title.
  Queries without text are left out, and count as unknown in judgements.

  Args:
    name: the dataset's id, such as "trec-robust04", "nyt/trec-core-2017" or
      "wapo/v2/trec-core-2018".
    dangling: counts judgements of unknown ids, see `collection.judge`; None: they
      are refused.

  Returns:
    The collection, with one split, "test".

  Raises:
    ImportError: if the package is not installed.
    ValueError: if the dataset is unknown, it lacks documents, queries or judgements,
      or a judgement names an unknown id.
  """
  dataset = _load(name)
  for part in ("docs", "queries", "qrels"):
    if not getattr(dataset, f"has_{part}")():
      raise ValueError(
        f"ir_datasets:{name}: expected documents, queries and judgements, got no"
        f" {part}: give the id of a subset that has them"
      )
  streamed = collection_lib.StreamedDocuments(
    tuple(ids.read(each.doc_id, "document") for each in dataset.docs_iter()),
    lambda: _read_documents(dataset),
  )
  queries = tuple(
    collection_lib.Query(id=ids.read(each.query_id, "query"), text=text)
    for each in dataset.queries_iter()
    if (text := " ".join(each.default_text().split()))
  )
  query_ids, document_ids = {query.id for query in queries}, set(streamed.ids)
  rows = (
    (
      f"ir_datasets:{name}",
      ids.read(each.query_id, "query"),
      ids.read(each.doc_id, "document"),
      str(each.relevance),
    )
    for each in dataset.qrels_iter()
  )
  qrels = collection_lib.judge(rows, query_ids, document_ids, dangling=dangling)
  return collection_lib.collect(streamed, queries, {"test": qrels})


def queries(name: str) -> Iterator[tuple[str, str]]:
  """Yields the queries of a dataset without reading its documents.

  Args:
    name: the dataset's id, such as "msmarco-passage/train" or "trec-robust04".

  Yields:
    The id and text of a query; for a TREC topic, first its title, then its
    description.

  Raises:
    ImportError: if the package is not installed.
    ValueError: if the dataset is unknown or has no queries.
  """
  dataset = _load(name)
  if not dataset.has_queries():
    raise ValueError(
      f"ir_datasets:{name}: expected queries, got a set without any; give the"
      " id of a set that has them"
    )
  for each in dataset.queries_iter():
    texts = [getattr(each, field, "") for field in _FIELDS]
    for text in filter(
      str.strip, texts if any(texts) else [each.default_text()]
    ):
      yield ids.read(each.query_id, "query"), " ".join(text.split())


def num_documents(name: str) -> int | None:
  """Returns the number of documents in a dataset's metadata; None if it is missing.

  Nothing is downloaded.

  Args:
    name: the dataset's id.

  Raises:
    ImportError: if the package is not installed.
    ValueError: if the dataset is unknown.
  """
  return _load(name).metadata().get("docs", {}).get("count")


def _read_documents(dataset: Any) -> Iterator[collection_lib.Document]:
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
