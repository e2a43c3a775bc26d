"""Writes collections in layouts that other libraries read.

::

  | layout | read by | files |
  |---|---|---|
  | BEIR | `beir.datasets.data_loader.GenericDataLoader` | corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv |
  | parquet | `datasets.load_dataset`, mteb | queries, corpus and qrels, by split |

Both layouts hold a whole `Collection`; its documents are streamed.
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
"""Number of rows of a parquet file that are in memory at a time."""


Origin = Mapping[str, Any]
"""Columns that name the query's author and privacy claim in each row of a
table."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """A layout of a collection on disk."""

  write: Callable[[pathlib.Path, collection_lib.Collection, Origin], object]
  """Writes a collection to a folder."""
  use: str
  """Code that reads the folder, as a block of Markdown for a card."""
  tables: Callable[[Iterable[str]], Sequence[Mapping[str, Any]]]
  """Makes the list of tables for a Hugging Face card from the splits."""


def _write_beir(
  folder: pathlib.Path, data: collection_lib.Collection, origin: Origin
) -> None:
  del origin  # the layout has no columns for it
  queries = (query.id for query in data.queries)
  ids = itertools.chain(data.document_ids(), queries)
  if quoted := sum(name.startswith('"') for name in ids):
    raise ValueError(
      f"expected ids that do not begin with a quotation mark, got {quoted}: BEIR's"
      " loader reads the rest as a quotation and loses judgements; rename them, or"
      " take another --format"
    )
  beir.write_beir(folder, data)


def _write_parquet(
  folder: pathlib.Path, data: collection_lib.Collection, origin: Origin
) -> None:
  """Writes three tables, with the column names of BEIR's sets on the hub."""
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
  """Writes a parquet file with a part of its rows in memory at a time."""
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


def _list_parquet_tables(splits: Iterable[str]) -> list[dict[str, Any]]:
  names = [*splits]
  return [
    _make_table("queries", names, "queries/{}.parquet") | {"default": True},
    _make_table("corpus", ["corpus"], "corpus/{}.parquet"),
    _make_table("qrels", names, "qrels/{}.parquet"),
  ]


def _make_table(name: str, splits: Iterable[str], path: str) -> dict[str, Any]:
  files_ = [{"split": s, "path": path.format(s)} for s in splits]
  return {"config_name": name, "data_files": files_}


LAYOUTS: dict[str, Layout] = {
  "beir": Layout(
    write=_write_beir,
    # A card's tables share one file type, which qrels (.tsv) lack.
    tables=lambda _: [
      _make_table(name, [name], "{}.jsonl") for name in ("queries", "corpus")
    ],
    use="""```python
from beir.datasets.data_loader import GenericDataLoader

corpus, queries, qrels = GenericDataLoader("FOLDER").load(split="train")
```""",
  ),
  "hf": Layout(
    write=_write_parquet,
    tables=_list_parquet_tables,
    use="""```python
from datasets import load_dataset

queries = load_dataset("FOLDER", "queries", split="train")
corpus = load_dataset("FOLDER", "corpus", split="corpus")
```""",
  ),
}
"""Layouts by their name in `synthq export --format`."""
