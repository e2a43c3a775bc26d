"""MS MARCO's layout: collection.tsv, queries.SPLIT.tsv and qrels.SPLIT.tsv.

References:
  Bajaj et al., "MS MARCO: A Human Generated MAchine Reading COmprehension
  Dataset", 2016.
"""

import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from synthq_jax.data import collection as collection_lib
from synthq_jax.data import files

__all__ = ["read_msmarco"]


def read_msmarco(
  directory: str | os.PathLike,
  splits: Sequence[str] | None = None,
  *,
  in_memory: bool = True,
) -> collection_lib.Collection:
  """Reads a folder of MS MARCO style tables; each file may be gzipped.

  collection.tsv holds "pid TAB text", queries.SPLIT.tsv "qid TAB text" and
  qrels.SPLIT.tsv "qid TAB 0 TAB pid TAB grade" (any white space between them),
  all without a header.

  Args:
    directory: the folder.
    splits: the splits to read, such as ("train", "dev.small"); None reads all
      that have judgements. The official "dev.small" is a part of "dev".
    in_memory: whether the passages are kept; if not, each is checked all the
      same, and read again by each loop over them.

  Returns:
    The collection, with the queries that are judged in these splits.

  Raises:
    ValueError: if a file is missing or malformed, an id stands twice, a text is
      empty, or a judgement names an unknown id; the message says file:line.
  """
  directory = pathlib.Path(directory)
  passages = files.find(directory, "collection.tsv")
  documents, ids = collection_lib.read_documents(
    passages, lambda: _items(passages, "document"), in_memory=in_memory
  )
  queries: dict[str, collection_lib.Query] = {}
  qrels = {}
  for split in files.splits(directory, "qrels.") if splits is None else splits:
    path = files.find(directory, f"queries.{split}.tsv")
    asked = collection_lib.by_id(path, "query", _items(path, "query"))
    rows = _rows(files.find(directory, f"qrels.{split}.tsv"))
    qrels[split] = collection_lib.judge(rows, asked, ids)
    for id_, query in asked.items():
      if id_ in qrels[split] and queries.setdefault(id_, query) != query:
        raise ValueError(
          f"{path}: expected one text for query {id_!r}, got another than in an"
          " earlier split; correct one"
        )
  return collection_lib.Collection(documents, tuple(queries.values()), qrels)


def _items(path: pathlib.Path, kind: str) -> Iterator[tuple[str, Any]]:
  make = {"document": collection_lib.Document, "query": collection_lib.Query}
  for where, (id_, text) in files.table(path, columns=2):
    collection_lib.check_id(kind, id_, where)
    collection_lib.check_text(where, kind, id_, text)
    yield where, make[kind](id_, text)


def _rows(path: pathlib.Path) -> Iterator[tuple[str, str, str, str]]:
  for where, line in files.lines(path):
    cells = line.split()
    if len(cells) != 4:
      raise ValueError(
        f"{where}: expected query id, 0, passage id and grade, got "
        f"{line[:40]!r}; correct the line"
      )
    query, _, document, grade = cells
    yield where, query, document, grade
