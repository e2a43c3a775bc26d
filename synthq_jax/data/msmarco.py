"""Reads the layout of MS MARCO.

References:
  Bajaj et al., "MS MARCO: A Human Generated MAchine Reading COmprehension
  Dataset", 2016.
"""

import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from synthq_jax.data import collection as collection_lib
from synthq_jax.data import files, ids, query_pairs

__all__ = ["read_msmarco"]

_UNUSED = ("0", "Q0")  # what tools write into the second column of judgements


def read_msmarco(
  directory: str | os.PathLike,
  *,
  dangling: collection_lib.Dangling | None = None,
) -> collection_lib.Collection:
  """Reads a folder of MS MARCO style tables; each file may be compressed.

  collection.tsv holds "pid TAB text", queries.SPLIT.tsv "qid TAB text" and
  qrels.SPLIT.tsv "qid TAB 0 TAB pid TAB grade" (any white space between them, and
  "Q0" may stand for 0). A header is skipped (`query_pairs.is_header`).

  Args:
    directory: the folder.
    dangling: counts judgements of unknown ids, see `collection.judge`; None:
      they are refused.

  Returns:
    The collection, with only the judged queries; passages stay on disk.

  Raises:
    ValueError: if a file is missing or malformed, an id occurs twice, a query
      is empty, or a judgement names an unknown id; the message says file:line.
  """
  directory = pathlib.Path(directory)
  passages = files.find(directory, "collection.tsv")
  documents, ids = collection_lib.read_documents(
    passages, lambda: _read_items(passages, "document")
  )
  queries: dict[str, collection_lib.Query] = {}
  qrels = {}
  for split in files.splits(directory, "qrels."):
    path = files.find(directory, f"queries.{split}.tsv")
    split_queries = collection_lib.by_id(
      path, "query", _read_items(path, "query")
    )
    rows = _read_rows(files.find(directory, f"qrels.{split}.tsv"))
    qrels[split] = collection_lib.judge(
      rows, split_queries, ids, dangling=dangling
    )
    _add_queries(
      queries,
      [split_queries[id_] for id_ in split_queries if id_ in qrels[split]],
      path,
    )
  return collection_lib.collect(documents, queries.values(), qrels)


def _add_queries(
  queries: dict[str, collection_lib.Query],
  added: Iterable[collection_lib.Query],
  path: pathlib.Path,
) -> None:
  """Adds the queries of a split; refuses an id with another text in two
  splits."""
  for query in added:
    if queries.setdefault(query.id, query) != query:
      raise ValueError(
        f"{path}: expected one text for each query, got another than in an"
        " earlier split; correct one"
      )


def _read_items(path: pathlib.Path, kind: str) -> Iterator[tuple[str, Any]]:
  make = {"document": collection_lib.Document, "query": collection_lib.Query}
  for number, (where, (id_, text)) in enumerate(files.table(path, columns=2)):
    if number == 0 and query_pairs.is_header((id_, text)):
      continue
    id_ = collection_lib.check_id(kind, ids.read(id_, kind, where), where)
    if kind == "query":
      collection_lib.check_text(where, text)
    yield where, make[kind](id_, text)


def _read_rows(path: pathlib.Path) -> Iterator[tuple[str, str, str, str]]:
  rows = files.columns(path, "query 0 passage grade")
  for number, (where, (query, unused, document, grade)) in enumerate(rows):
    if number == 0 and query_pairs.is_header((query, document)):
      continue
    if unused not in _UNUSED:  # "qid pid rank score" would be read in silence
      raise ValueError(
        f"{where}: expected 'query 0 passage grade', got {unused!r} in place of"
        " 0; if this is a ranking, give judgements"
      )
    query = ids.read(query, "query", where)
    yield where, query, ids.read(document, "document", where), grade
