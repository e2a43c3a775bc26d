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
from synthq_jax.data import files, judgements

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
  documents = _texts(passages, "document", keep=in_memory)
  queries: dict[str, str] = {}
  qrels = {}
  for split in files.splits(directory, "qrels.") if splits is None else splits:
    path = files.find(directory, f"queries.{split}.tsv")
    texts = _texts(path, "query")
    rows = _rows(files.find(directory, f"qrels.{split}.tsv"))
    qrels[split] = judgements.from_rows(rows, texts, documents)
    judged = {id_: text for id_, text in texts.items() if id_ in qrels[split]}
    _merge(path, queries, judged)
  streamed = collection_lib.StreamedDocuments(
    tuple(documents),
    lambda: (
      collection_lib.Document(id_, text)
      for _, (id_, text) in files.table(passages, columns=2)
    ),
  )
  return collection_lib.Collection(
    _make(collection_lib.Document, documents) if in_memory else streamed,
    _make(collection_lib.Query, queries),
    qrels,
  )


def _texts(path: pathlib.Path, kind: str, keep: bool = True) -> dict[str, str]:
  """Reads texts by id; without `keep` the texts are checked and dropped."""
  texts: dict[str, str] = {}
  for where, (id_, text) in files.table(path, columns=2):
    collection_lib.check_id(kind, id_, where)
    if id_ in texts:
      raise ValueError(
        f"{where}: expected distinct {kind} ids, got {id_!r} again; rename or"
        " remove one"
      )
    if not text.strip():
      raise ValueError(
        f"{where}: expected text in {kind} {id_!r}, got none; fill it, or "
        "remove the line and its judgements"
      )
    texts[id_] = text if keep else ""
  return texts


def _rows(path: pathlib.Path) -> Iterator[tuple[str, str, str, str]]:
  """Yields where, query, document and grade."""
  for where, line in files.lines(path):
    cells = line.split()
    if len(cells) != 4:
      raise ValueError(
        f"{where}: expected query id, 0, passage id and grade, got "
        f"{line[:40]!r}; correct the line"
      )
    query, _, document, grade = cells
    yield where, query, document, grade


def _merge(
  path: pathlib.Path, queries: dict[str, str], more: dict[str, str]
) -> None:
  """Adds the queries of a split; one of two splits has one text."""
  for id_, text in more.items():
    if queries.setdefault(id_, text) != text:
      raise ValueError(
        f"{path}: expected one text for query {id_!r}, got another than in an"
        " earlier split; correct one"
      )


def _make(kind: Any, texts: dict[str, str]) -> tuple[Any, ...]:
  return tuple(kind(id_, text) for id_, text in texts.items())
