"""Queries that a generator wrote: queries.jsonl with the document of each."""

import os
from collections.abc import Iterator
from typing import Any

from synthq_jax.data import _beir_rows, files
from synthq_jax.data import collection as collection_lib

__all__ = ["read_written"]


def read_written(
  queries: str | os.PathLike, corpus: str | os.PathLike
) -> collection_lib.Collection:
  """Reads written queries as a collection whose split "train" they are.

  Args:
    queries: JSON lines with _id, text and document, the id of the document that
      the query was written for.
    corpus: corpus.jsonl with these documents; they stay on disk.

  Returns:
    The collection; every grade is 1.

  Raises:
    ValueError: if a line is malformed, an id stands twice, a text is empty or
      there is no such document; the message says file:line.
  """

  def stream():
    return _beir_rows.lines(corpus, _beir_rows.document)

  documents = _beir_rows.by_id(corpus, "document", stream(), keep=False)
  owners: dict[str, str] = {}
  found = _beir_rows.by_id(queries, "query", _queries(queries, owners))
  for query, document in owners.items():
    if document not in documents:
      raise ValueError(
        f"{queries}: expected queries for documents of {corpus}, got query"
        f" {query!r} for {document!r}; give the corpus they were written for"
      )
  return collection_lib.Collection(
    collection_lib.StreamedDocuments(
      tuple(documents), lambda: (item for _, item in stream())
    ),
    tuple(found.values()),
    {"train": {query: {document: 1} for query, document in owners.items()}},
  )


def _queries(
  path, owners: dict[str, str]
) -> Iterator[tuple[str, collection_lib.Query]]:
  """Yields the queries, and notes the document of each."""
  for where, line in files.json_lines(path):
    query = _beir_rows.query(where, line)
    owners[query.id] = _owner(where, line)
    yield where, query


def _owner(where: str, line: dict[str, Any]) -> str:
  owner = line.get("document")
  if not isinstance(owner, str):
    raise ValueError(
      f'{where}: expected the id of a document under "document", got {owner!r};'
      " give the queries.jsonl that generate wrote"
    )
  return owner
