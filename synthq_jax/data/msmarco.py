"""Reads the layouts of MS MARCO and of Anserini.

References:
  Bajaj et al., "MS MARCO: A Human Generated MAchine Reading COmprehension
  Dataset", 2016.
"""

import os
import pathlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from synthq_jax.data import collection as collection_lib
from synthq_jax.data import (
  compression,
  files,
  ids,
  query_pairs,
  table_files,
  trec_topics,
)

__all__ = ["read_anserini", "read_msmarco"]


def read_msmarco(
  directory: str | os.PathLike,
  *,
  in_memory: bool = True,
  dangling: collection_lib.Dangling | None = None,
) -> collection_lib.Collection:
  """Reads a folder of MS MARCO style tables; each file may be compressed.

  collection.tsv holds "pid TAB text", queries.SPLIT.tsv "qid TAB text" and
  qrels.SPLIT.tsv "qid TAB 0 TAB pid TAB grade" (any white space between them). A
  header is skipped (`query_pairs.is_header`).

  Args:
    directory: the folder.
    in_memory: whether to keep the passages. If not, each is checked once and read
      again by each loop over them.
    dangling: counts judgements of unknown ids, see `collection.judge`; None:
      they are refused.

  Returns:
    The collection, with only the judged queries.

  Raises:
    ValueError: if a file is missing or malformed, an id occurs twice, a query
      is empty, or a judgement names an unknown id; the message says file:line.
  """
  directory = pathlib.Path(directory)
  passages = files.find(directory, "collection.tsv")
  documents, ids = collection_lib.read_documents(
    passages, lambda: _read_items(passages, "document"), in_memory=in_memory
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
  return collection_lib.Collection(
    documents,
    tuple(queries.values()),
    qrels,
    lacking=collection_lib.find_lacking(qrels, ids),
  )


def read_anserini(
  directory: str | os.PathLike,
  *,
  dangling: collection_lib.Dangling | None = None,
) -> collection_lib.Collection:
  """Reads a folder in the layout of Anserini and Pyserini.

  corpus/ holds JSON lines with "id" and "contents". topics.SPLIT.tsv holds "qid TAB
  text"; topics.SPLIT.txt or .xml holds the same or TREC topics (`trec_topics`).
  qrels.SPLIT.txt holds "qid 0 docid grade". Each file may be compressed.

  Args:
    directory: the folder.
    dangling: as in `read_msmarco`.

  Returns:
    The collection; documents stay on disk.

  Raises:
    ValueError: as `read_msmarco`.
  """
  directory = pathlib.Path(directory)
  corpus = directory / "corpus"
  documents, ids = collection_lib.read_documents(
    corpus, lambda: _read_contents(corpus)
  )
  queries, qrels = {}, {}
  for path in sorted(directory.glob("topics.*")):
    split = files.remove_suffix(
      path.name.removeprefix("topics."),
      *compression.variants(".tsv"),
      *compression.variants(".txt"),
      *compression.variants(".xml"),
    )
    if split is None:  # another file, such as an editor's copy
      continue
    judged = files.find(directory, f"qrels.{split}.txt")
    split_queries, rows = _read_topics(path, [*_read_rows(judged)])
    qrels[split] = collection_lib.judge(
      rows, split_queries, ids, dangling=dangling
    )
    if rows and not any(query in split_queries for _, query, *_ in rows):
      raise ValueError(
        f"{path}: expected topics that are judged, got none of the judgements'"
        " numbers; give the topics of the judgements"
      )
    _add_queries(queries, split_queries.values(), path)
  if not queries:
    raise ValueError(
      f"{directory}: expected topics.SPLIT.tsv or topics.SPLIT.txt, got none"
    )
  return collection_lib.Collection(
    documents,
    tuple(queries.values()),
    qrels,
    lacking=collection_lib.find_lacking(qrels, ids),
  )


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


def _read_contents(corpus: pathlib.Path) -> Iterator[tuple[str, Any]]:
  for where, line in table_files.rows(corpus):
    id_ = ids.get_field(where, line, "id", "document")
    text = files.field(where, line, "contents")
    yield where, collection_lib.Document(id_, text)


def _read_topics(
  path: pathlib.Path, rows: list[tuple[str, str, str, str]]
) -> tuple[dict[str, collection_lib.Query], list[tuple[str, str, str, str]]]:
  """Reads topics and gives them the same ids as their judgements."""
  if ".tsv" in path.name or not trec_topics.is_topics(path):
    topics = _read_items(path, "query")
  else:
    rows = [
      (where, trec_topics.remove_zeros(query), *rest)
      for where, query, *rest in rows
    ]
    judged = {query for _, query, *_ in rows}
    topics = trec_topics.match_judged_ids(trec_topics.read(path), judged)
    if not topics.have_titles:
      print(
        f"synthq: note: {path}: a topic without a title has its description as"
        " the query",
        file=sys.stderr,
      )
  return collection_lib.by_id(path, "query", topics), rows


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
  for number, (where, (query, _, document, grade)) in enumerate(rows):
    if number == 0 and query_pairs.is_header((query, document)):
      continue
    query = ids.read(query, "query", where)
    yield where, query, ids.read(document, "document", where), grade
