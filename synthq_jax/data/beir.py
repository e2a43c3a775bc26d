"""The BEIR layout: corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv.

References:
  Thakur et al., "BEIR: A Heterogeneous Benchmark for Zero-shot Evaluation of
  Information Retrieval Models", NeurIPS 2021 Datasets and Benchmarks.
"""

import json
import os
import pathlib
from collections.abc import Iterable

from synthq_jax.data import _beir_rows, files
from synthq_jax.data import collection as collection_lib

__all__ = [
  "read_beir",
  "read_judgements",
  "read_key",
  "write_beir",
  "write_judged_queries",
  "write_negatives",
]


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
  documents = _beir_rows.by_id(
    corpus,
    "document",
    _beir_rows.lines(corpus, _beir_rows.document),
    keep=in_memory,
  )
  asked = files.find(directory, "queries.jsonl")
  queries = _beir_rows.by_id(
    asked, "query", _beir_rows.lines(asked, _beir_rows.query)
  )
  qrels = _beir_rows.read_qrels(
    directory / "qrels", queries.keys(), documents.keys()
  )
  streamed = collection_lib.StreamedDocuments(
    tuple(documents),
    lambda: (item for _, item in _beir_rows.lines(corpus, _beir_rows.document)),
  )
  return collection_lib.Collection(
    tuple(documents.values()) if in_memory else streamed,
    tuple(queries.values()),
    qrels,
  )


def read_judgements(path: str | os.PathLike) -> collection_lib.Qrels:
  """Reads qrels/SPLIT.tsv alone, whatever ids it holds.

  Args:
    path: the file, plain or gzipped.

  Returns:
    Query id -> document id -> grade.

  Raises:
    ValueError: if the header is missing or a line is malformed.
  """
  return _beir_rows.read_judgements(pathlib.Path(path))


def read_key(
  directory: str | os.PathLike, key: str, *, name: str = "corpus.jsonl"
) -> dict[str, str]:
  """Reads one more key of a BEIR folder's lines, which `read_beir` passes over.

  Args:
    directory: the folder.
    key: such as the passage that a sentence stands in, or a query's kind.
    name: "corpus.jsonl" or "queries.jsonl".

  Returns:
    Id -> what stands under the key, for the lines that have it.

  Raises:
    ValueError: if the file is missing, a line is malformed, or something else
      than a string stands there; the message says file:line.
  """
  path = files.find(pathlib.Path(directory), name)
  make = _beir_rows.query if name == "queries.jsonl" else _beir_rows.document
  found = {}
  for where, fields in files.json_lines(path):
    value = fields.get(key)
    if value is None:
      continue
    if not isinstance(value, str):
      raise ValueError(
        f'{where}: expected a string under "{key}", got a '
        f"{type(value).__name__}; correct the line"
      )
    found[make(where, fields).id] = value
  return found


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
    files.write_lines(path, ["\t".join(_beir_rows.HEADER), *rows])


def write_negatives(
  path: str | os.PathLike, pairs: Iterable[tuple[str, str]]
) -> None:
  """Writes a table of hard negatives, which `task_sources.Folder` reads.

  Args:
    path: the file; it appears only when complete.
    pairs: query id and document id.
  """
  rows = ("\t".join(pair) for pair in pairs)
  files.write_lines(path, ["\t".join(_beir_rows.NEGATIVES_HEADER), *rows])


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
