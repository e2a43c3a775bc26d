"""Writes queries and their documents as other libraries read them.

::

  | layout | read by | files |
  |---|---|---|
  | BEIR | `beir.datasets.data_loader.GenericDataLoader` | corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv |
  | parquet | `datasets.load_dataset`, mteb | queries, corpus and qrels, by split |

Both hold what a `Collection` holds, and stream its documents.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from synthq_jax import extras
from synthq_jax.data import beir
from synthq_jax.data import collection as collection_lib

__all__ = ["LAYOUTS", "Layout", "Origin"]

_ROWS = 4096
"""Of a part of a parquet file that is in memory."""


Origin = Mapping[str, Any]
"""Columns that say in each row of a table who wrote the query, and what is
promised."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """A form of a collection on disk."""

  write: Callable[[pathlib.Path, collection_lib.Collection, Origin], object]
  """Writes it into a folder."""
  use: str
  """How it is read: a block of Markdown for a card."""
  tables: Callable[[Iterable[str]], Sequence[Mapping[str, Any]]]
  """From the splits to what a card of Hugging Face's lists as its tables."""


def _write_beir(
  folder: pathlib.Path, data: collection_lib.Collection, origin: Origin
) -> None:
  del origin  # there is no place for it
  queries = (query.id for query in data.queries)
  ids = itertools.chain(data.document_ids(), queries)
  if quoted := sum(name.startswith('"') for name in ids):
    raise ValueError(
      f"expected ids that do not begin with a quotation mark, got {quoted}: BEIR's"
      " loader takes what follows for a quotation and loses judgements; rename"
      " them, or take another --format"
    )
  beir.write_beir(folder, data)


def _write_parquet(
  folder: pathlib.Path, data: collection_lib.Collection, origin: Origin
) -> None:
  """Writes three tables, with the names of columns that BEIR has on the hub."""
  texts = data.query_by_id()
  for split, judged in data.qrels.items():
    queries = (
      {
        "_id": query,
        "text": texts[query].text,
        "document": document,
        **origin,
      }
      for query, document in data.pairs(split)
    )
    _write_table(folder / "queries" / f"{split}.parquet", queries)
    rows = (
      {"query-id": query, "corpus-id": document, "score": grade}
      for query, grades in judged.items()
      for document, grade in grades.items()
    )
    _write_table(folder / "qrels" / f"{split}.parquet", rows)
  documents = (
    {"_id": item.id, "title": item.title, "text": item.text}
    for item in data.documents
  )
  _write_table(folder / "corpus" / "corpus.parquet", documents)


def _write_table(path: pathlib.Path, rows: Iterator[dict[str, Any]]) -> None:
  """Writes a parquet file, a part of it in memory at a time."""
  with extras.required("parquet"):
    import pyarrow
    from pyarrow import parquet

  path.parent.mkdir(parents=True, exist_ok=True)
  writer = None
  while chunk := list(itertools.islice(rows, _ROWS)):
    table = pyarrow.Table.from_pylist(chunk, writer and writer.schema)
    if writer is None:
      writer = parquet.ParquetWriter(path, table.schema)
    writer.write_table(table)
  if writer is not None:
    writer.close()


def _parquet_tables(splits: Iterable[str]) -> list[dict[str, Any]]:
  names = [*splits]
  return [
    _table("queries", names, "queries/{}.parquet") | {"default": True},
    _table("corpus", ["corpus"], "corpus/{}.parquet"),
    _table("qrels", names, "qrels/{}.parquet"),
  ]


def _beir_tables(splits: Iterable[str]) -> list[dict[str, Any]]:
  del splits  # tables of one card are of one kind, and judgements are none
  names = ("queries", "corpus")
  return [_table(name, [name], "{}.jsonl") for name in names]


def _table(name: str, splits: Iterable[str], path: str) -> dict[str, Any]:
  files_ = [{"split": s, "path": path.format(s)} for s in splits]
  return {"config_name": name, "data_files": files_}


LAYOUTS: dict[str, Layout] = {
  "beir": Layout(
    write=_write_beir,
    tables=_beir_tables,
    use="""```python
from beir.datasets.data_loader import GenericDataLoader

corpus, queries, qrels = GenericDataLoader("FOLDER").load(split="train")
```""",
  ),
  "hf": Layout(
    write=_write_parquet,
    tables=_parquet_tables,
    use="""```python
from datasets import load_dataset

queries = load_dataset("FOLDER", "queries", split="train")
corpus = load_dataset("FOLDER", "corpus", split="corpus")
```""",
  ),
}
"""By the name that `synthq export --format` has for it."""
