"""BEIR sets that TensorFlow Datasets has prepared on this machine.

Pitfall: where a document is judged for several queries, the splits of
judgements that TFDS' builder writes (version 1.0.0) keep ONE of them and drop
the others without a word. Pairs for training are merely fewer then; scores would
be wrong. So `read` takes judgements from the qrels files of the download.
"""

import json
import os
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from synthq_jax.data import _beir_rows, _tfds, beir_sets
from synthq_jax.data import collection as collection_lib

if TYPE_CHECKING:
  import tensorflow_datasets as tfds

__all__ = ["builder", "read"]


def builder(
  name: str, data_dir: str | os.PathLike | None = None
) -> "tfds.core.DatasetBuilder":
  """Returns the builder of a prepared set.

  Args:
    name: of the set, such as "fiqa".
    data_dir: where TFDS keeps its data; None: its default, or TFDS_DATA_DIR.

  Raises:
    ValueError: if there is no such set, or it is not prepared; the message says
      the command that prepares it.
  """
  import tensorflow_datasets as tfds

  beir_sets.get(name)
  place = None if data_dir is None else os.fspath(data_dir)
  made = tfds.builder(f"beir/{name}", data_dir=place)
  if not made.is_prepared():
    raise ValueError(
      f"{made.data_dir}: expected beir/{name} prepared by TFDS, got nothing; run"
      f" {_tfds.how_to_prepare(f'beir/{name}', place)}, or read its BEIR folder"
      " instead"
    )
  return made


def read(
  name: str,
  qrels: str | os.PathLike,
  *,
  data_dir: str | os.PathLike | None = None,
) -> collection_lib.Collection:
  """Reads a prepared set; its documents stay on disk.

  Args:
    name: of the set, such as "fiqa".
    qrels: the folder with the judgements of the download (test.tsv and others):
      those of TFDS lack some, see the module.
    data_dir: where TFDS keeps its data; None: its default.

  Returns:
    The collection, its splits named as the files are.

  Raises:
    ValueError: as `builder`, or if an id stands twice, a text is empty or a
      judgement names an unknown id.
  """
  made = builder(name, data_dir)
  where = f"beir/{name}"
  queries = _beir_rows.by_id(where, "query", _queries(made))
  documents = _beir_rows.by_id(where, "document", _documents(made), keep=False)
  judged = _beir_rows.read_qrels(
    pathlib.Path(qrels), queries.keys(), documents.keys()
  )
  return collection_lib.Collection(
    collection_lib.StreamedDocuments(
      tuple(documents), lambda: (item for _, item in _documents(made))
    ),
    tuple(queries.values()),
    judged,
  )


def _queries(made) -> Iterator[tuple[str, collection_lib.Query]]:
  for where, row in _rows(made, "query"):
    yield (
      where,
      _beir_rows.query(where, {"_id": row["query_id"], "text": row["query"]}),
    )


def _documents(made) -> Iterator[tuple[str, collection_lib.Document]]:
  for where, row in _rows(made, "passage"):
    metadata = json.loads(row["passage_metadata"] or "{}")
    yield (
      where,
      _beir_rows.document(
        where,
        {
          "_id": row["passage_id"],
          "title": metadata.get("title", ""),
          "text": row["passage"],
        },
      ),
    )


def _rows(made, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields where a row stands, and its fields as text."""
  import tensorflow_datasets as tfds

  for number, row in enumerate(tfds.as_numpy(made.as_dataset(split))):
    fields = {
      name: value.decode() if isinstance(value, bytes) else value
      for name, value in row.items()
    }
    yield f"{made.name}/{split}:{number}", fields
