"""Rows of the BEIR layout, checked: documents, queries and judgements."""

import os
import pathlib
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

from synthq_jax.data import collection as collection_lib
from synthq_jax.data import files, judgements

__all__ = [
  "HEADER",
  "NEGATIVES_HEADER",
  "by_id",
  "document",
  "lines",
  "query",
  "read_judgements",
  "read_qrels",
]

HEADER = ("query-id", "corpus-id", "score")
NEGATIVES_HEADER = HEADER[:2]
"""Of a table of hard negatives."""


def by_id(
  source: object, kind: str, found: Iterable[tuple[str, Any]], keep: bool = True
) -> dict[str, Any]:
  """Gathers documents or queries by id, or their ids alone.

  Args:
    source: a path or name, for messages.
    kind: "document" or "query".
    found: where each stands, and what it is.
    keep: whether the values are kept; if not, they are None.

  Raises:
    ValueError: if there are none, or an id stands twice.
  """
  items: dict[str, Any] = {}
  for where, item in found:
    if item.id in items:
      raise ValueError(
        f"{where}: expected distinct {kind} ids, got {item.id!r} again; "
        "rename or remove one"
      )
    items[item.id] = item if keep else None
  if not items:
    raise ValueError(f"{source}: expected a {kind} a line, got none; fill it")
  return items


def lines(
  path: str | os.PathLike, make: Callable[[str, dict[str, Any]], Any]
) -> Iterator[tuple[str, Any]]:
  """Yields where each line stands, and what `document` or `query` makes of it."""
  for where, fields in files.json_lines(path):
    yield where, make(where, fields)


def document(where: str, fields: dict[str, Any]) -> collection_lib.Document:
  """Makes a document from a line of corpus.jsonl."""
  document = collection_lib.Document(
    id=_id(where, "document", fields),
    text=_string(where, fields, "text"),
    title=_string(where, fields, "title", default=""),
    client=_string(where, fields, "client", default=""),
  )
  _refuse_empty(where, "document", document.id, document.contents)
  return document


def query(where: str, fields: dict[str, Any]) -> collection_lib.Query:
  """Makes a query from a line of queries.jsonl."""
  query = collection_lib.Query(
    id=_id(where, "query", fields),
    text=_string(where, fields, "text"),
    client=_string(where, fields, "client", default=""),
  )
  _refuse_empty(where, "query", query.id, query.text)
  return query


def _refuse_empty(where: str, kind: str, id_: str, text: str) -> None:
  if not text.strip():
    raise ValueError(
      f"{where}: expected text in {kind} {id_!r}, got none; fill it, or "
      "remove the line and its judgements"
    )


def _id(where: str, kind: str, fields: dict[str, Any]) -> str:
  """Returns the id of a line; whole numbers are taken as strings."""
  value = fields.get("_id")
  if isinstance(value, int) and not isinstance(value, bool):
    value = str(value)
  fields = {**fields, "_id": value}
  return collection_lib.check_id(kind, _string(where, fields, "_id"), where)


def _string(
  where: str, fields: dict[str, Any], name: str, default: str | None = None
) -> str:
  """Returns a field that holds a string; null stands for the default."""
  value = fields.get(name)
  value = default if value is None else value
  if not isinstance(value, str):
    raise ValueError(
      f'{where}: expected a string under "{name}", got {fields.get(name)!r} '
      f"among the keys {sorted(fields)}; correct the line"
    )
  return value


def read_qrels(
  directory: pathlib.Path, queries: Container[str], documents: Container[str]
) -> dict[str, collection_lib.Qrels]:
  """Reads a folder of SPLIT.tsv files."""
  return {
    split: read_judgements(
      files.find(directory, f"{split}.tsv"), queries, documents
    )
    for split in files.splits(directory)
  }


def read_judgements(
  path: pathlib.Path,
  queries: Container[str] | None = None,
  documents: Container[str] | None = None,
) -> collection_lib.Qrels:
  """Reads the judgements of one split; None takes any id."""
  return judgements.from_rows(_body(path), queries, documents)


def _body(path: pathlib.Path) -> Iterator[tuple[str, str, str, str]]:
  """Yields where, query, document and grade."""
  for where, (query, document, grade) in files.headed_table(path, HEADER):
    yield where, query, document, grade
