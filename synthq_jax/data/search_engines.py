"""Writes collections in the layouts that search engines load.

Formal guarantee: none of its own; files hold the documents and queries that are
given, and are as private as these are.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from synthq_jax import artifacts
from synthq_jax.data import files

__all__ = ["Entry", "write_bulk", "write_pyserini"]

_INDEX = {
  "settings": {
    "index": {"similarity": {"default": {"type": "BM25", "k1": 1.2, "b": 0.75}}}
  },
  "mappings": {
    "properties": {
      "contents": {"type": "text", "analyzer": "english"},
      **{
        name: {"type": "text", "index": False}
        for name in ("title", "text", "queries")
      },
    }
  },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """A document, and queries that are searched together with it.

  >>> Entry(id="d 1", title="Pie", text="", queries=("how to bake",)).contents
  'Pie how to bake'

  Attributes:
    id: any text.
    title: may be empty.
    text: may be empty.
    queries: may be none.
  """

  id: str
  title: str
  text: str
  queries: tuple[str, ...] = ()

  @property
  def contents(self) -> str:
    """What BM25 reads: title, text and queries."""
    return " ".join(filter(None, (self.title, self.text, *self.queries)))


def write_pyserini(folder: str | os.PathLike, entries: Iterable[Entry]) -> None:
  """Writes documents.jsonl, which Pyserini and Anserini index.

  Their command: `python -m pyserini.index.lucene --collection JsonCollection
  --input FOLDER --index INDEX --generator DefaultLuceneDocumentGenerator`.

  Args:
    folder: gets the file.
    entries: read once, one at a time.
  """
  files.write_lines(
    pathlib.Path(folder) / "documents.jsonl",
    (_json({"id": one.id, "contents": one.contents}) for one in entries),
  )


def write_bulk(
  folder: str | os.PathLike,
  entries: Iterable[Entry],
  *,
  most_bytes: int = 50 << 20,
) -> None:
  """Writes index.json and bulk_NNNNN.ndjson for Elasticsearch and OpenSearch.

  The first is the body of `PUT /NAME`: English words, and BM25 with the weights
  of `retrieval.bm25`. Each of the others is the body of one `POST /NAME/_bulk`
  (an `application/x-ndjson`). `contents` is what is searched.

  Args:
    folder: gets the files.
    entries: read once, one at a time.
    most_bytes: of a file, unless one entry alone has more; both servers take
      100 MiB by default.
  """
  folder = pathlib.Path(folder)
  artifacts.write_atomically(folder / "index.json", _json(_INDEX) + "\n")
  part: list[bytes] = []
  number = size = 0
  for one in entries:
    source = {**dataclasses.asdict(one), "contents": one.contents}
    action = {"index": {"_id": source.pop("id")}}
    lines = f"{_json(action)}\n{_json(source)}\n".encode()
    if part and size + len(lines) > most_bytes:
      _write_part(folder, number, part)
      part, number, size = [], number + 1, 0
    part.append(lines)
    size += len(lines)
  if part:
    _write_part(folder, number, part)


def _write_part(folder: pathlib.Path, number: int, part: list[bytes]) -> None:
  path = folder / f"bulk_{number:05}.ndjson"
  artifacts.write_atomically(path, b"".join(part))


def _json(value: Any) -> str:
  return json.dumps(value, ensure_ascii=False)
