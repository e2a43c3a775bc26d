"""Where SeqIO tasks get their rows: TFDS, or folders of files.

Every source yields rows with the keys of TFDS' beir: query_id, query, passage_id,
passage, passage_metadata and score. The split "query" holds queries alone,
"passage" documents alone, all others pairs.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from synthq_jax import extras
from synthq_jax.data import beir, beir_sets, files, ids, msmarco
from synthq_jax.data import collection as collection_lib

if TYPE_CHECKING:
  import seqio

__all__ = ["Folder", "MsMarco", "Source", "Synthetic", "Tfds"]

QUERY, PASSAGE = "query", "passage"
_TEXTS = ("query_id", "query", "passage_id", "passage", "passage_metadata")
_NEGATIVE = "negative"


class Source(Protocol):
  """What a task reads."""

  def data_source(self, *, negatives: bool = False) -> "seqio.DataSource":
    """Returns the rows as SeqIO reads them.

    Args:
      negatives: whether a pair comes once for each of its hard negatives;
        otherwise it comes once.

    Raises:
      ValueError: if there are no negatives.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tfds:
  """A BEIR set that TFDS prepared; looked for when it is read.

  Pitfall: its splits of pairs keep one query for each document (see
  `beir_sets`). A `Folder` has them all.
  """

  name: str
  """Of the set, such as "fiqa"."""
  data_dir: str | None = None
  """Where TFDS keeps its data; None: its default."""

  def data_source(self, *, negatives: bool = False) -> "seqio.DataSource":
    """Returns the rows as SeqIO reads them."""
    with extras.required("seqio"):
      import seqio

    if negatives:
      raise _no_negatives(self)
    config = self

    class PreparedTfds(seqio.TfdsDataSource):
      """Says how a set is prepared; SeqIO alone would find no splits."""

      def get_dataset(self, *args: Any, **kwargs: Any) -> Any:
        beir_sets.builder(config.name, config.data_dir)
        return super().get_dataset(*args, **kwargs)

      def list_shards(self, split: str) -> Any:
        beir_sets.builder(config.name, config.data_dir)
        return super().list_shards(split)

    return PreparedTfds(
      tfds_name=f"beir/{self.name}:1.0.0",
      tfds_data_dir=self.data_dir,
      splits=(QUERY, PASSAGE, *beir_sets.get(self.name).splits),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tables:
  path: str
  negatives: str = ""

  def data_source(self, *, negatives: bool = False) -> "seqio.DataSource":
    if negatives and not self.negatives:
      raise _no_negatives(self)
    splits, read = self._reader()
    return _function_source(
      lambda: read(self.path, in_memory=False),
      splits,
      self.negatives if negatives else "",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folder(_Tables):
  """A folder in the BEIR layout.

  Attributes:
    path: corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv.
    negatives: a table of hard negatives, "query-id TAB corpus-id" with that
      header, whose documents are in the folder; empty: none.
  """

  def _reader(self):
    return files.splits(pathlib.Path(self.path) / "qrels"), beir.read_beir


@dataclasses.dataclass(frozen=True, kw_only=True)
class MsMarco(_Tables):
  """A folder of MS MARCO's tables.

  Attributes:
    path: collection.tsv, queries.SPLIT.tsv and qrels.SPLIT.tsv.
    negatives: as in `Folder`.
  """

  def _reader(self):
    return files.splits(self.path, "qrels."), msmarco.read_msmarco


@dataclasses.dataclass(frozen=True, kw_only=True)
class Synthetic:
  """Queries that a generator of this project wrote; one split, "train".

  Formal guarantee:
    A function of two files. Where they are what `generate` wrote, in its public
    folder, and the public documents, whatever is trained on the rows has the
    guarantee of the generator (post-processing).
  """

  queries: str
  """queries.jsonl of generate or filter_queries: _id, text, document."""
  corpus: str
  """corpus.jsonl of prepare_data."""

  def data_source(self, *, negatives: bool = False) -> "seqio.DataSource":
    """Returns the rows as SeqIO reads them."""
    if negatives:
      raise _no_negatives(self)
    return _function_source(
      lambda: beir.read_written(self.queries, self.corpus), ["train"], ""
    )


def _no_negatives(source: Source) -> ValueError:
  return ValueError(
    f"expected a source with a table of hard negatives, got {source}; name the"
    " table in the field negatives of a Folder or MsMarco"
  )


def _function_source(
  read: Callable[[], collection_lib.Collection],
  splits: Iterable[str],
  negatives: str,
) -> "seqio.DataSource":
  """Makes a source of a collection, which is read when it is first needed."""
  with extras.required("seqio"):
    import seqio
    import tensorflow as tf

  splits = tuple(splits)
  if {QUERY, PASSAGE} & set(splits):
    raise ValueError(
      f"expected judgements of other splits than {QUERY} and {PASSAGE}, which"
      f" stand for all queries and all documents, got {splits}; rename a file"
    )
  kept: list[collection_lib.Collection] = []

  def dataset(split, shuffle_files, seed=None):
    if not kept:
      kept.append(read())
    hard = _negatives(negatives, kept[0]) if negatives else {}
    return tf.data.Dataset.from_generator(
      # Each reading starts the order anew: the same seed, the same order.
      lambda: _rows(
        kept[0],
        split,
        np.random.default_rng(seed) if shuffle_files else None,
        hard,
      ),
      output_signature={
        **{name: tf.TensorSpec((), tf.string) for name in _TEXTS},
        "score": tf.TensorSpec((), tf.float32),
        _NEGATIVE: tf.TensorSpec((), tf.string),
      },
    )

  return seqio.FunctionDataSource(dataset, (QUERY, PASSAGE, *splits))


def _rows(
  data: collection_lib.Collection,
  split: str,
  order: np.random.Generator | None,
  hard: Mapping[str, list[str]],
) -> Iterator[dict[str, Any]]:
  """Yields the rows of a split; pairs in random order where one is given."""
  if split == QUERY:
    yield from (_row(query=query) for query in data.queries)
    return
  if split == PASSAGE:
    yield from (_row(document=document) for document in data.documents)
    return
  graded = [
    (query, document, grade)
    for query, grades in data.judgements(split).items()
    for document, grade in grades.items()
  ]
  queries = data.query_by_id()
  wanted = {document for _, document, _ in graded}
  chosen = {query: hard.get(query, [""]) for query in {q for q, *_ in graded}}
  wanted |= {id_ for ids in chosen.values() for id_ in ids}
  documents = {d.id: d for d in data.documents if d.id in wanted}
  places = (
    range(len(graded)) if order is None else order.permutation(len(graded))
  )
  for place in places:
    query, document, grade = graded[place]
    for negative in chosen[query]:
      text = documents[negative].contents if negative else ""
      yield _row(queries[query], documents[document], grade, text)


def _row(
  query: collection_lib.Query | None = None,
  document: collection_lib.Document | None = None,
  grade: float = -1.0,
  negative: str = "",
) -> dict[str, Any]:
  title = document.title if document else ""
  return {
    "query_id": query.id if query else "",
    "query": query.text if query else "",
    "passage_id": document.id if document else "",
    "passage": document.text if document else "",
    "passage_metadata": json.dumps({"title": title} if title else {}),
    "score": np.float32(grade),
    _NEGATIVE: negative,
  }


def _negatives(
  path: str | os.PathLike, data: collection_lib.Collection
) -> dict[str, list[str]]:
  """Reads hard negatives; those judged relevant are refused."""
  rows = files.headed_table(path, beir.NEGATIVES_HEADER)
  queries = data.query_by_id().keys()
  documents = set(data.document_ids())
  relevant = {pair for split in data.qrels for pair in data.pairs(split)}
  found: dict[str, list[str]] = {}
  for where, cells in rows:
    query, document = map(
      ids.read, cells, ("query", "document"), (where, where)
    )
    if query not in queries or document not in documents:
      raise ValueError(
        f"{where}: expected ids of the collection, got others; remove the line"
      )
    if (query, document) in relevant:
      raise ValueError(
        f"{where}: expected a negative, got a document that is judged relevant"
        " to the query; remove the line"
      )
    found.setdefault(query, []).append(document)
  return found
