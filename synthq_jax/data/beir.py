"""Reads and writes the BEIR layout: corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv.

References:
  Thakur et al., "BEIR: A Heterogeneous Benchmark for Zero-shot Evaluation of
  Information Retrieval Models", NeurIPS 2021 Datasets and Benchmarks.
"""

import itertools
import json
import os
import pathlib
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

from synthq_jax.data import collection as collection_lib
from synthq_jax.data import files, quoting, table_files
from synthq_jax.data import ids as ids_lib

__all__ = [
  "make_document",
  "make_query",
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


def read_beir(
  directory: str | os.PathLike,
  *,
  dangling: collection_lib.Dangling | None = None,
) -> collection_lib.Collection:
  """Reads a BEIR folder; each file may be compressed (corpus.jsonl.gz).

  A line of corpus.jsonl has `_id`, `text` and possibly `title` and `client`; a
  line of queries.jsonl has `_id`, `text` and possibly `client`, or a `user_id` in
  `metadata`. Other keys are ignored.

  Args:
    directory: the folder.
    dangling: counts judgements of unknown ids, see `collection.judge`; None:
      they are refused.

  Returns:
    The collection, with one split for each file of qrels; documents stay on disk.

  Raises:
    ValueError: if a file is missing or malformed, an id occurs twice, a query
      is empty, or a judgement names an unknown id; the message says file:line.
  """
  directory = pathlib.Path(directory)
  corpus = files.find(directory, "corpus.jsonl")
  documents, ids = collection_lib.read_documents(
    corpus, lambda: _read_lines(corpus, make_document)
  )
  path = files.find(directory, "queries.jsonl")
  queries = collection_lib.by_id(path, "query", _read_lines(path, make_query))
  qrels = read_qrels(directory / "qrels", queries.keys(), ids, dangling)
  return collection_lib.collect(documents, queries.values(), qrels)


def read_hub(
  directory: str | os.PathLike,
  *,
  dangling: collection_lib.Dangling | None = None,
) -> collection_lib.Collection:
  """Reads a downloaded set in the layout of BEIR's sets on Hugging Face's hub.

  It has three folders of tables (`table_files.rows`), as the hub or
  `save_to_disk` writes them: "corpus" (_id, text and possibly title), "queries"
  (_id, text), and "qrels", "default" or "data" (query-id, corpus-id, score). The
  first two may be single files, such as mteb's corpus.jsonl. Grades are whole
  numbers, possibly stored as floats. Judgements without a score, as in NanoBEIR,
  all have grade 1.

  Args:
    directory: the folder.
    dangling: as in `read_beir`.

  Returns:
    The collection; documents stay on disk. The names of the
    tables of judgements give the splits, unless a column "split" names them.

  Raises:
    ValueError: as `read_beir`.
  """
  root = pathlib.Path(directory)
  names = ("qrels", "default", "data")  # push_to_hub calls "default" "data"
  judged = next((root / n for n in names if (root / n).is_dir()), None)
  if judged is None:
    raise ValueError(
      f"{root}: expected folders corpus, queries and qrels with tables, got no"
      " qrels; for a log in one table, name it log:FILE@CORPUS"
    )
  corpus, query_folder = (
    table_files.find(root, name) for name in ("corpus", "queries")
  )
  documents, ids = collection_lib.read_documents(
    corpus, lambda: _make_items(table_files.rows(corpus), make_document)
  )
  queries = collection_lib.by_id(
    query_folder,
    "query",
    _make_items(table_files.rows(query_folder), make_query),
  )
  judgements, named, are_graded = [], [], False
  for where, row in table_files.rows(judged):
    named.append(files.field(where, row, "split", default=""))
    query = ids_lib.get_field(where, row, _HEADER[0], "query")
    document = ids_lib.get_field(where, row, _HEADER[1], "document")
    grade = row.get(_HEADER[2], "")
    are_graded |= not row.keys() <= _UNGRADED
    if isinstance(grade, float) and grade.is_integer():
      grade = int(grade)  # some tables have 1.0
    judgements.append((where, query, document, str(grade)))
  if not are_graded:  # such tables list only relevant documents
    judgements = [(*row[:3], "1") for row in judgements]
  by_column = table_files.has_split_column(judged, named)
  rows: dict[str, list[tuple[str, str, str, str]]] = {
    split: [] for split in ([] if by_column else table_files.splits(judged))
  }
  for split, row in zip(named, judgements, strict=True):
    rows.setdefault(split, []).append(row)
  qrels = {
    split: collection_lib.judge(each, queries, ids, dangling=dangling)
    for split, each in rows.items()
  }
  return collection_lib.collect(
    documents, queries.values(), qrels, split_by_record=by_column
  )


def read_judgements(
  path: str | os.PathLike,
  queries: Container[str] | None = None,
  documents: Container[str] | None = None,
  dangling: collection_lib.Dangling | None = None,
) -> collection_lib.Qrels:
  """Reads the judgements of one file, qrels/SPLIT.tsv.

  Args:
    path: the file, plain or compressed; `quoting.is_quoted` decides whether cells
      are quoted.
    queries: the known query ids; None admits any.
    documents: the known document ids; None admits any.
    dangling: as in `read_beir`.

  Returns:
    Query id -> document id -> grade.

  Raises:
    ValueError: if the header is missing, a line is malformed or an id unknown.
  """
  lines = files.table(path, columns=len(_HEADER))
  if quoting.is_quoted(path, unclear=False):  # as BEIR's own code writes them
    header = (f"{path}:1", table_files.columns(path)[1])
    quoted = table_files.rows(path, "csv")
    cells = ((where, [*row.values()]) for where, row in quoted)
    lines = itertools.chain([header], cells)
  where, first = next(lines, (f"{path}:1", []))
  if first != [*_HEADER]:
    raise ValueError(
      f"{where}: expected the header {' '.join(_HEADER)} separated by tabs, got"
      " another line; add it"
    )
  rows = (
    (
      where,
      ids_lib.read(query, "query", where),
      ids_lib.read(document, "document", where),
      grade,
    )
    for where, (query, document, grade) in lines
  )
  return collection_lib.judge(rows, queries, documents, dangling=dangling)


def read_key(directory: str | os.PathLike, key: str) -> dict[str, str]:
  """Reads a key of a BEIR corpus that `read_beir` ignores.

  Args:
    directory: the folder.
    key: a key of corpus.jsonl, such as one for the passage of a sentence.

  Returns:
    Document id -> value of the key, for the lines that have it.

  Raises:
    ValueError: if the file is missing, a line is malformed, or a value is no
      string; the message says file:line.
  """
  path = files.find(pathlib.Path(directory), "corpus.jsonl")
  values = {}
  for where, fields in files.json_lines(path):
    value = files.field(where, fields, key, default="")
    if fields.get(key) is None:
      continue
    values[make_document(where, fields).id] = value
  return values


def read_written(
  queries: str | os.PathLike, corpus: str | os.PathLike
) -> collection_lib.Collection:
  """Reads generated queries as a collection with the split "train".

  Args:
    queries: JSON lines with _id, text and document, the id of the document for
      which the query was generated.
    corpus: corpus.jsonl with these documents; they stay on disk.

  Returns:
    The collection; every grade is 1.

  Raises:
    ValueError: if a line is malformed, an id occurs twice, a text is empty or a
      document is unknown; the message says file:line.
  """
  documents, ids = collection_lib.read_documents(
    corpus, lambda: _read_lines(corpus, make_document)
  )
  owners: dict[str, str] = {}
  queries_by_id = collection_lib.by_id(
    queries, "query", _read_generated(queries, owners)
  )
  for document in owners.values():
    if document not in ids:
      raise ValueError(
        f"{queries}: expected queries for documents of {corpus}, got one for"
        " another; give the corpus for which they were written"
      )
  return collection_lib.Collection(
    documents,
    tuple(queries_by_id.values()),
    {"train": {query: {document: 1} for query, document in owners.items()}},
  )


def write_beir(
  directory: str | os.PathLike, collection: collection_lib.Collection
) -> None:
  """Writes a collection to a folder that `read_beir` can read.

  Args:
    directory: a new folder, or one with an older copy of the same files.
    collection: the collection to write.

  Raises:
    ValueError: if the folder holds files that `read_beir` would mix in, such
      as judgements of another split.
  """
  directory = pathlib.Path(directory)
  write_judged_queries(directory, collection)
  files.write_lines(
    directory / "corpus.jsonl",
    (
      _format_line(
        _id=item.id, title=item.title, text=item.text, client=item.client
      )
      for item in collection.documents
    ),
  )


def write_judged_queries(
  directory: str | os.PathLike, collection: collection_lib.Collection
) -> None:
  """Writes only queries and judgements: `write_beir` without documents.

  Args:
    directory: as in `write_beir`.
    collection: the collection of the queries.

  Raises:
    ValueError: as in `write_beir`.
  """
  directory = pathlib.Path(directory)
  _refuse_strangers(directory, collection)
  files.write_lines(
    directory / "queries.jsonl",
    (
      _format_line(_id=item.id, text=item.text, client=item.client)
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


def _format_line(**fields: str) -> str:
  """Formats a JSON object as a line, without an empty client."""
  present = {
    name: value for name, value in fields.items() if value or name != "client"
  }
  return json.dumps(present, ensure_ascii=False)


def _refuse_strangers(
  directory: pathlib.Path, collection: collection_lib.Collection
) -> None:
  """Refuses a folder where older files would mix with the new ones."""
  expected = {"corpus.jsonl", "queries.jsonl"}
  expected |= {f"qrels/{split}.tsv" for split in collection.qrels}
  patterns = ("corpus.jsonl*", "queries.jsonl*", "qrels/*.tsv*")
  existing = {
    str(path.relative_to(directory))
    for pattern in patterns
    for path in directory.glob(pattern)
    if not path.name.startswith(".")
  }
  if existing - expected:
    raise ValueError(
      f"{directory}: expected a new folder, got {sorted(existing - expected)} of "
      "another collection; remove them or write elsewhere"
    )


def _read_lines(
  path: str | os.PathLike, make: Callable[[str, dict[str, Any]], Any]
) -> Iterator[tuple[str, Any]]:
  """Yields the position of each line, and the document or query made of it."""
  return _make_items(files.json_lines(path), make)


def _make_items(
  rows: Iterable[tuple[str, dict[str, Any]]],
  make: Callable[[str, dict[str, Any]], Any],
) -> Iterator[tuple[str, Any]]:
  return ((where, make(where, fields)) for where, fields in rows)


def make_document(
  where: str, fields: dict[str, Any]
) -> collection_lib.Document:
  """Makes a document from a line of corpus.jsonl; null is an empty text."""
  empty = {"default": ""} if "text" in fields else {}
  document = collection_lib.Document(
    id=_get_id(where, "document", fields),
    text=files.field(where, fields, "text", **empty),
    title=files.field(where, fields, "title", default=""),
    client=ids_lib.get_field(where, fields, "client", "user", default=""),
  )
  ids_lib.count_null("document", document.text)
  ids_lib.count_null("title", document.title)
  return document


def make_query(where: str, fields: dict[str, Any]) -> collection_lib.Query:
  """Makes a query from a line of queries.jsonl."""
  metadata = fields.get("metadata")
  if not isinstance(metadata, dict):
    metadata = {}
  query = collection_lib.Query(
    id=_get_id(where, "query", fields),
    text=files.field(where, fields, "text"),
    client=collection_lib.get_owner(
      where,
      (
        ids_lib.get_field(where, fields, "client", "user", default=""),
        ids_lib.get_field(where, metadata, "user_id", "user", default=""),
      ),
    ),
  )
  collection_lib.check_text(where, query.text)
  return query


def _get_id(where: str, kind: str, fields: dict[str, Any]) -> str:
  """Returns the id of a line, under "_id" or, as mteb 2 writes it, "id"."""
  key = "id" if fields.get("_id") is None and "id" in fields else "_id"
  if fields.get(key) is None:
    files.field(where, fields, key)
  name = ids_lib.get_field(where, fields, key, kind)
  return collection_lib.check_id(kind, name, where)


def read_qrels(
  directory: pathlib.Path,
  queries: Container[str],
  documents: Container[str],
  dangling: collection_lib.Dangling | None = None,
) -> dict[str, collection_lib.Qrels]:
  """Reads the judgements of a folder of SPLIT.tsv files, by split."""
  return {
    split: read_judgements(
      files.find(directory, f"{split}.tsv"), queries, documents, dangling
    )
    for split in files.splits(directory)
  }


def _read_generated(
  path, owners: dict[str, str]
) -> Iterator[tuple[str, collection_lib.Query]]:
  """Yields the queries and adds the document of each to `owners`."""
  for where, line in files.json_lines(path):
    query = make_query(where, line)
    if line.get("document") is None:
      files.field(where, line, "document")
    owners[query.id] = ids_lib.get_field(where, line, "document", "document")
    yield where, query
