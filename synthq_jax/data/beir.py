"""The BEIR layout: corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv.

References:
  Thakur et al., "BEIR: A Heterogeneous Benchmark for Zero-shot Evaluation of
  Information Retrieval Models", NeurIPS 2021 Datasets and Benchmarks.
"""

import itertools
import json
import os
import pathlib
from collections.abc import Container, Iterator
from typing import Any

from synthq_jax.data import collection as collection_lib
from synthq_jax.data import files, judgements

__all__ = ["read_beir", "write_beir", "write_judged_queries"]

_HEADER = ("query-id", "corpus-id", "score")
_SUFFIXES = (".tsv", ".tsv.gz")


def read_beir(
  directory: str | os.PathLike, *, in_memory: bool = True
) -> collection_lib.Collection:
  """Reads a BEIR folder; each file may be gzipped (corpus.jsonl.gz).

  A line of corpus.jsonl has `_id`, `text` and possibly `title` and `client`; a
  line of queries.jsonl has `_id`, `text` and possibly `client`. Other keys are
  passed over.

  Args:
    directory: the folder.
    in_memory: whether the documents are kept; if not, each is checked all the
      same, and read again by each loop over them.

  Returns:
    The collection, one split for each file of qrels.

  Raises:
    ValueError: if a file is missing or malformed, an id stands twice, a text is
      empty, or a judgement names an unknown id; the message says file:line.
  """
  directory = pathlib.Path(directory)
  corpus = files.find(directory, "corpus.jsonl")
  documents = _items(corpus, "document", _document, keep=in_memory)
  queries = _items(files.find(directory, "queries.jsonl"), "query", _query)
  qrels = {
    split: _read_qrels(path, queries.keys(), documents.keys())
    for split, path in _qrels_files(directory / "qrels").items()
  }
  streamed = collection_lib.StreamedDocuments(
    tuple(documents),
    lambda: itertools.starmap(_document, files.json_lines(corpus)),
  )
  return collection_lib.Collection(
    tuple(documents.values()) if in_memory else streamed,
    tuple(queries.values()),
    qrels,
  )


def write_beir(
  directory: str | os.PathLike, collection: collection_lib.Collection
) -> None:
  """Writes a collection so that `read_beir` gives it back.

  Args:
    directory: a new folder, or one that holds these same files.
    collection: what to write.

  Raises:
    ValueError: if the folder holds files that `read_beir` would mix in, such
      as judgements of another split.
  """
  directory = pathlib.Path(directory)
  write_judged_queries(directory, collection)
  files.write_lines(
    directory / "corpus.jsonl",
    (
      _line(_id=item.id, title=item.title, text=item.text, client=item.client)
      for item in collection.documents
    ),
  )


def write_judged_queries(
  directory: str | os.PathLike, collection: collection_lib.Collection
) -> None:
  """Writes queries and judgements alone: `write_beir` without its documents.

  Args:
    directory: as in `write_beir`.
    collection: whose queries.

  Raises:
    ValueError: as in `write_beir`.
  """
  directory = pathlib.Path(directory)
  _refuse_strangers(directory, collection)
  files.write_lines(
    directory / "queries.jsonl",
    (
      _line(_id=item.id, text=item.text, client=item.client)
      for item in collection.queries
    ),
  )
  for split, qrels in collection.qrels.items():
    rows = (
      f"{query}\t{document}\t{grade}"
      for query, grades in qrels.items()
      for document, grade in grades.items()
    )
    path = directory / "qrels" / f"{split}.tsv"
    files.write_lines(path, ["\t".join(_HEADER), *rows])


def _line(**fields: str) -> str:
  """Returns a JSON object; an empty client is left out."""
  kept = {
    name: value for name, value in fields.items() if value or name != "client"
  }
  return json.dumps(kept, ensure_ascii=False)


def _items(
  path: pathlib.Path, kind: str, make: Any, keep: bool = True
) -> dict[str, Any]:
  """Reads documents or queries by id, or their ids alone."""
  items: dict[str, Any] = {}
  for where, fields in files.json_lines(path):
    item = make(where, fields)
    if item.id in items:
      raise ValueError(
        f"{where}: expected distinct {kind} ids, got {item.id!r} again; "
        "rename or remove one"
      )
    items[item.id] = item if keep else None
  if not items:
    raise ValueError(f"{path}: expected a {kind} a line, got none; fill it")
  return items


def _document(where: str, fields: dict[str, Any]) -> collection_lib.Document:
  """Makes a document from a line of corpus.jsonl."""
  document = collection_lib.Document(
    id=_id(where, "document", fields),
    text=_string(where, fields, "text"),
    title=_string(where, fields, "title", default=""),
    client=_string(where, fields, "client", default=""),
  )
  _refuse_empty(where, "document", document.id, document.contents)
  return document


def _query(where: str, fields: dict[str, Any]) -> collection_lib.Query:
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


def _qrels_files(directory: pathlib.Path) -> dict[str, pathlib.Path]:
  """Returns the judgement files by split."""
  if not directory.is_dir():
    raise ValueError(
      f"{directory}: expected a folder with SPLIT.tsv files, got none; add "
      "judgements"
    )
  names = sorted(path.name for path in directory.iterdir())
  splits = [files.unsuffixed(name, *_SUFFIXES) for name in names]
  found = {
    split: files.find(directory, f"{split}.tsv")
    for split in splits
    if split is not None and not split.startswith(".")
  }
  if not found:
    raise ValueError(
      f"{directory}: expected SPLIT.tsv files, got {names[:8]}; add judgements"
    )
  return found


def _read_qrels(
  path: pathlib.Path, queries: Container[str], documents: Container[str]
) -> collection_lib.Qrels:
  """Reads one split's judgements."""
  return judgements.from_rows(_body(path), queries, documents)


def _body(path: pathlib.Path) -> Iterator[tuple[str, str, str, str]]:
  """Yields where, query, document and grade after checking the header."""
  rows = files.table(path, columns=3)
  where, header = next(rows, (f"{path}:1", []))
  if tuple(header) != _HEADER:
    raise ValueError(
      f"{where}: expected the header {' '.join(_HEADER)} separated by tabs, "
      f"got {' '.join(header)!r}; add it"
    )
  for where, (query, document, grade) in rows:
    yield where, query, document, grade


def _refuse_strangers(
  directory: pathlib.Path, collection: collection_lib.Collection
) -> None:
  """Refuses a folder where older files would mix with the new ones."""
  own = {"corpus.jsonl", "queries.jsonl"}
  own |= {f"qrels/{split}.tsv" for split in collection.qrels}
  patterns = ("corpus.jsonl*", "queries.jsonl*", "qrels/*.tsv*")
  there = {
    str(path.relative_to(directory))
    for pattern in patterns
    for path in directory.glob(pattern)
    if not path.name.startswith(".")
  }
  if there - own:
    raise ValueError(
      f"{directory}: expected a new folder, got {sorted(there - own)} of "
      "another collection; remove them or write elsewhere"
    )
