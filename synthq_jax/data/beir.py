"""Reads and writes the BEIR layout: corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv.

References:
  Thakur et al., "BEIR: A Heterogeneous Benchmark for Zero-shot Evaluation of
  Information Retrieval Models", NeurIPS 2021 Datasets and Benchmarks.
"""

import json
import os
import pathlib
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

from synthq_jax.data import collection as collection_lib
from synthq_jax.data import files, table_files

__all__ = [
  "NEGATIVES_HEADER",
  "document_of",
  "query_of",
  "read_beir",
  "read_hub",
  "read_judgements",
  "read_key",
  "read_qrels",
  "read_written",
  "write_beir",
  "write_judged_queries",
]

_HEADER = ("query-id", "corpus-id", "score")
_UNGRADED = {*_HEADER[:2], "split"}
NEGATIVES_HEADER = _HEADER[:2]
"""Of a table of hard negatives."""


def read_beir(
  directory: str | os.PathLike,
  *,
  in_memory: bool = True,
  dangling: collection_lib.Dangling | None = None,
) -> collection_lib.Collection:
  """Reads a BEIR folder; each file may be compressed (corpus.jsonl.gz).

  A line of corpus.jsonl has `_id`, `text` and possibly `title` and `client`; a
  line of queries.jsonl has `_id`, `text` and possibly `client`, or a `user_id` in
  `metadata`. Other keys are passed over.

  Args:
    directory: the folder.
    in_memory: whether the documents are kept; if not, each is checked all the
      same, and read again by each loop over them.
    dangling: counts judgements of unknown ids, which are left out; None: they
      are refused.

  Returns:
    The collection, one split for each file of qrels.

  Raises:
    ValueError: if a file is missing or malformed, an id stands twice, a text is
      empty, or a judgement names an unknown id; the message says file:line.
  """
  directory = pathlib.Path(directory)
  corpus = files.find(directory, "corpus.jsonl")
  documents, ids = collection_lib.read_documents(
    corpus, lambda: _lines(corpus, document_of), in_memory=in_memory
  )
  asked = files.find(directory, "queries.jsonl")
  queries = collection_lib.by_id(asked, "query", _lines(asked, query_of))
  qrels = read_qrels(directory / "qrels", queries.keys(), ids, dangling)
  return collection_lib.Collection(documents, tuple(queries.values()), qrels)


def read_hub(
  directory: str | os.PathLike,
  *,
  dangling: collection_lib.Dangling | None = None,
) -> collection_lib.Collection:
  """Reads a set as BEIR has them on Hugging Face's hub, from disk.

  A folder of tables (`table_files.rows`) for each of "corpus" (_id, text and
  possibly title), "queries" (_id, text) and "qrels" or "default" (query-id,
  corpus-id, score), as they are downloaded or as `save_to_disk` writes them.
  Grades are whole numbers, also where they are stored as floats. Judgements of two
  columns, as NanoBEIR has them, are all relevant.

  Args:
    directory: the folder.
    dangling: as in `read_beir`.

  Returns:
    The collection; documents stay on disk. The splits are those that the tables
    of judgements are named after, or else a column "split" names.

  Raises:
    ValueError: as `read_beir`.
  """
  root = pathlib.Path(directory)
  judged = next(
    (root / n for n in ("qrels", "default") if (root / n).is_dir()), None
  )
  if judged is None:
    raise ValueError(
      f"{root}: expected folders corpus, queries and qrels with tables, got no"
      " qrels; for a log in one table, name it log:FILE@CORPUS"
    )
  corpus, asked = root / "corpus", root / "queries"
  documents, ids = collection_lib.read_documents(
    corpus, lambda: _made(table_files.rows(corpus), document_of)
  )
  queries = collection_lib.by_id(
    asked, "query", _made(table_files.rows(asked), query_of)
  )
  found, named, are_graded = [], [], False
  for where, row in table_files.rows(judged):
    named.append(files.field(where, row, "split", default=""))
    query, document = (_judged_id(where, row, name) for name in _HEADER[:2])
    grade = row.get(_HEADER[2], "")
    are_graded |= not row.keys() <= _UNGRADED
    if isinstance(grade, float) and grade.is_integer():
      grade = int(grade)  # some tables have 1.0
    found.append((where, query, document, str(grade)))
  if not are_graded:  # all that stands there is relevant
    found = [(*row[:3], "1") for row in found]
  by_column = table_files.by_column(judged, named)
  rows: dict[str, list[tuple[str, str, str, str]]] = {
    split: [] for split in ([] if by_column else table_files.splits(judged))
  }
  for split, row in zip(named, found, strict=True):
    rows.setdefault(split, []).append(row)
  qrels = {
    split: collection_lib.judge(each, queries, ids, dangling=dangling)
    for split, each in rows.items()
  }
  return collection_lib.Collection(
    documents, tuple(queries.values()), qrels, by_column
  )


def read_judgements(
  path: str | os.PathLike,
  queries: Container[str] | None = None,
  documents: Container[str] | None = None,
  dangling: collection_lib.Dangling | None = None,
) -> collection_lib.Qrels:
  """Reads qrels/SPLIT.tsv alone.

  Args:
    path: the file, plain or compressed.
    queries: the known ids; None takes any.
    documents: the known ids; None takes any.
    dangling: as in `read_beir`.

  Returns:
    Query id -> document id -> grade.

  Raises:
    ValueError: if the header is missing, a line is malformed or an id unknown.
  """
  rows = (  # no id has space around it
    (where, *(cell.strip() for cell in cells))
    for where, cells in files.headed_table(path, _HEADER)
  )
  return collection_lib.judge(rows, queries, documents, dangling=dangling)


def read_key(directory: str | os.PathLike, key: str) -> dict[str, str]:
  """Reads one more key of a BEIR corpus' lines, which `read_beir` passes over.

  Args:
    directory: the folder.
    key: such as the passage that a sentence stands in.

  Returns:
    Id -> what stands under the key, for the lines that have it.

  Raises:
    ValueError: if the file is missing, a line is malformed, or something else
      than a string stands there; the message says file:line.
  """
  path = files.find(pathlib.Path(directory), "corpus.jsonl")
  found = {}
  for where, fields in files.json_lines(path):
    value = files.field(where, fields, key, default="")
    if fields.get(key) is None:
      continue
    found[document_of(where, fields).id] = value
  return found


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
  documents, ids = collection_lib.read_documents(
    corpus, lambda: _lines(corpus, document_of)
  )
  owners: dict[str, str] = {}
  found = collection_lib.by_id(queries, "query", _written(queries, owners))
  for document in owners.values():
    if document not in ids:
      raise ValueError(
        f"{queries}: expected queries for documents of {corpus}, got one for"
        " another; give the corpus they were written for"
      )
  return collection_lib.Collection(
    documents,
    tuple(found.values()),
    {"train": {query: {document: 1} for query, document in owners.items()}},
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


def _lines(
  path: str | os.PathLike, make: Callable[[str, dict[str, Any]], Any]
) -> Iterator[tuple[str, Any]]:
  """Yields where each line stands, and what `document` or `query` makes of it."""
  return _made(files.json_lines(path), make)


def _made(
  rows: Iterable[tuple[str, dict[str, Any]]],
  make: Callable[[str, dict[str, Any]], Any],
) -> Iterator[tuple[str, Any]]:
  return ((where, make(where, fields)) for where, fields in rows)


def document_of(where: str, fields: dict[str, Any]) -> collection_lib.Document:
  """Makes a document from a line of corpus.jsonl."""
  document = collection_lib.Document(
    id=_id(where, "document", fields),
    text=files.field(where, fields, "text"),
    title=files.field(where, fields, "title", default=""),
    client=files.field(where, fields, "client", default=""),
  )
  collection_lib.check_text(where, "document", document.id, document.contents)
  return document


def query_of(where: str, fields: dict[str, Any]) -> collection_lib.Query:
  """Makes a query from a line of queries.jsonl."""
  metadata = fields.get("metadata")
  if not isinstance(metadata, dict):
    metadata = {}
  query = collection_lib.Query(
    id=_id(where, "query", fields),
    text=files.field(where, fields, "text"),
    client=collection_lib.one_owner(
      where,
      (
        files.field(where, fields, "client", default=""),
        files.field(where, metadata, "user_id", (str, int), default=""),
      ),
    ),
  )
  collection_lib.check_text(where, "query", query.id, query.text)
  return query


def _judged_id(where: str, row: dict[str, Any], name: str) -> str:
  """Returns an id of a judgement, and refuses what is none, such as a list."""
  if isinstance(value := row.get(name), float):
    return str(value)
  return str(files.field(where, row, name, (str, int))).strip()


def _id(where: str, kind: str, fields: dict[str, Any]) -> str:
  """Returns the id of a line, under "id" where mteb 2 writes it.

  Whole numbers are taken as strings.
  """
  value = fields.get("_id")
  if value is None:
    value = fields.get("id")
  if isinstance(value, int) and not isinstance(value, bool):
    value = str(value)
  fields = {**fields, "_id": value}
  return collection_lib.check_id(kind, files.field(where, fields, "_id"), where)


def read_qrels(
  directory: pathlib.Path,
  queries: Container[str],
  documents: Container[str],
  dangling: collection_lib.Dangling | None = None,
) -> dict[str, collection_lib.Qrels]:
  """Reads a folder of SPLIT.tsv files."""
  return {
    split: read_judgements(
      files.find(directory, f"{split}.tsv"), queries, documents, dangling
    )
    for split in files.splits(directory)
  }


def _written(
  path, owners: dict[str, str]
) -> Iterator[tuple[str, collection_lib.Query]]:
  """Yields the queries, and notes the document of each."""
  for where, line in files.json_lines(path):
    query = query_of(where, line)
    owners[query.id] = files.field(where, line, "document")
    yield where, query
