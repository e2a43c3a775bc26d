"""Reads SeqIO tasks and mixtures as collections: sources `seqio` and `seqio_pairs`.

A place is the name of a task or mixture that something has registered (`tasks`),
or the folder of a cached task as `seqio_cache_tasks` writes it on Beam, which is
read as it lies: no task has to be registered. Records are those of the cache:
what a task yields before its CacheDatasetPlaceholder, or else in the end. A
feature X is its text: X_pretokenized, or X where that is a string.

Beam shuffles records, tasks shuffle by a seed, and mixtures repeat. None of that
reaches the collection: records are ordered by "number" where they have it (tasks
of `tasks` do), then by their ids; equal ones count once; rates of a mixture say
nothing. So a query is one record, however often a task yields it.

What a task cannot tell are documents that nobody asked about. They are read from
the split "passage", of the task itself or of CORPUS; a CORPUS without that split
is all records of all its splits.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from synthq_jax import extras
from synthq_jax.data import beir, ids, jsonl, table_files, vocabulary
from synthq_jax.data import collection as collection_lib

__all__ = ["PASSAGE", "QUERY", "check", "digest", "read", "read_pairs"]

QUERY, PASSAGE = "query", "passage"
"""The splits that hold all queries and all documents."""

_TEXT = "_pretokenized"
_Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Cached:
  """The folder of a cached task."""

  name: str

  @functools.cached_property
  def splits(self) -> dict[str, list[pathlib.Path]]:
    """The files of each split, all of them there."""
    root = pathlib.Path(self.name)
    infos = sorted(root.glob("info.*.json"))
    if not (infos and (root / "COMPLETED").is_file()):
      raise ValueError(
        f"{root}: expected a cached SeqIO task (COMPLETED, info.SPLIT.json and"
        " SPLIT.tfrecord-*), got none that is complete: run seqio_cache_tasks"
        " --output_format=tfrecord again"
      )
    splits = {}
    for info in infos:
      split = info.name.removeprefix("info.").removesuffix(".json")
      paths = [
        path
        for pattern in (
          f"{split}.tfrecord-*-of-*",
          f"cached_{split}.tfrecord-*",
        )
        for path in sorted(root.glob(pattern))
      ]
      expected = json.loads(info.read_text()).get("num_shards", len(paths))
      if len(paths) != expected or not paths:
        raise ValueError(
          f"{root}: expected {expected} files {split}.tfrecord-*, got"
          f" {len(paths)}: copy the folder again, whole"
        )
      splits[split] = paths
    return splits

  def rows(self, split: str) -> Iterator[tuple[Any, _Row]]:
    """Yields where each record is and its columns, and counts the records."""
    with extras.required("seqio"), vocabulary.native_stderr():
      import tensorflow as tf

    count = 0
    for path in self.splits[split]:
      start = 0
      for raw in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
        yield (path, start, len(raw)), _parse(raw)
        start += len(raw) + 16  # a length and two checksums
        count += 1
    stats = pathlib.Path(self.name, f"stats.{split}.json")
    expected = json.loads(stats.read_text()) if stats.is_file() else {}
    if expected.get("examples", count) != count:
      raise ValueError(
        f"{self.name}: expected {expected['examples']} records in split {split!r},"
        f" as {stats.name} says, got {count}: cache the task again"
      )

  def get(self, places: Sequence[Any]) -> Iterator[_Row]:
    """Yields records by where they are."""
    opened: dict[pathlib.Path, Any] = {}
    try:
      for path, start, size in places:
        if path not in opened:
          opened[path] = path.open("rb")
        opened[path].seek(start + 12)
        yield _parse(opened[path].read(size))
    finally:
      for stream in opened.values():
        stream.close()


@dataclasses.dataclass(frozen=True)
class _Registered:
  """A task that is not cached; records that have to be sorted are in memory."""

  task: Any

  @property
  def name(self) -> str:
    return self.task.name

  @property
  def splits(self) -> Sequence[str]:
    return self.task.splits

  def rows(self, split: str) -> Iterator[tuple[Any, _Row]]:
    """Yields the columns of each record, for `get`, and once more."""
    task = self.task
    if task.supports_caching:
      dataset = task.source.get_dataset(split, shuffle=False, seed=0)
      dataset = task.preprocess_precache(dataset, seed=0)
    else:
      dataset = task.get_dataset(None, split, shuffle=False, seed=0)
    for record in dataset.as_numpy_iterator():
      row = _texts({n: x for n, x in record.items() if np.ndim(x) == 0})
      yield row, row

  def get(self, places: Sequence[Any]) -> Iterator[_Row]:
    """Yields records that `rows` gave."""
    return iter(places)


def read(
  name: str,
  corpus: str,
  fields: jsonl.Fields,
  *,
  dangling: collection_lib.Dangling | None = None,
) -> collection_lib.Collection:
  """Reads a task with ids as a BEIR folder is read.

  Columns are query_id, query, passage_id, passage (or those that `fields` names)
  and possibly title, or TFDS' passage_metadata, client, and score, the grade,
  without which it is 1. Rows of one side alone are a query or a document.

  Args:
    name: of a task or mixture, or a folder.
    corpus: of one that holds the documents; empty: `name`.
    fields: names of the columns of texts.
    dangling: as in `beir.read_beir`.

  Returns:
    The collection; documents of a cache stay on disk.

  Raises:
    ValueError: as `beir.read_beir`, or if there is no such task, a cache is not
      complete, or there are no documents.
  """
  documents, document_ids = _read_documents(
    corpus or name, fields, bool(corpus)
  )
  queries: dict[str, tuple[tuple[bool, int], collection_lib.Query]] = {}
  judged: dict[str, list[tuple[int, str, str, str]]] = {}
  for part, split in _splits(name):
    if split == PASSAGE:
      continue
    rows = judged.setdefault(split, []) if split != QUERY else []
    for number, (_, row) in enumerate(part.rows(split)):
      where = f"{part.name}/{split}:{number}"
      if not _has(where, row, "query_id"):
        continue
      line = _rename(row, "query_id", fields.query)
      query = beir.query_of(where, line)
      order = (split != QUERY, _number(row))
      first = queries.setdefault(query.id, (order, query))
      if first[1] != query:
        raise ValueError(
          f"{where}: expected one text and one user for each query id, got"
          " several: correct the task"
        )
      queries[query.id] = min(first, (order, query), key=lambda each: each[0])
      if split != QUERY and _has(where, row, "passage_id"):
        document = ids.get_field(where, row, "passage_id", "document")
        rows.append((_number(row), query.id, document, _grade(row)))
  if not queries:
    raise ValueError(f"{name}: expected records with a query, got none")
  ordered = sorted(queries.values(), key=lambda each: (each[0], each[1].id))
  qrels = {
    split: collection_lib.judge(
      ((f"{name}/{split}", *rest) for _, *rest in sorted(set(rows))),
      queries.keys(),
      document_ids,
      dangling=dangling,
    )
    for split, rows in judged.items()
  }
  return collection_lib.Collection(
    documents,
    tuple(query for _, query in ordered),
    qrels,
    lacking=collection_lib.lacking(qrels, document_ids),
  )


def read_pairs(
  name: str, fields: jsonl.Fields, **options: Any
) -> collection_lib.Collection:
  """Reads a task of texts alone as a log of pairs is read, split by split.

  Args:
    name: of a task or mixture, or a folder.
    fields: names of the features, e.g. query="targets", document="inputs".
    **options: of `jsonl.read_jsonl`, whose guarantee this is.

  Raises:
    ValueError: as `jsonl.read_jsonl`.
  """
  rows, parts = [], [*_splits(name)]
  for part, split in parts:
    for _, row in part.rows(split):
      texts = tuple(str(row.get(x)) for x in (fields.query, fields.document))
      of_task = {"split": table_files.OfFile(split)}
      rows.append((split, _number(row), texts, {**row, **of_task}))
  rows.sort(key=lambda each: each[:3])
  names = sorted({split for _, split in parts})
  lines = ((f"{name}/{split}", row) for split, _, _, row in rows)
  return jsonl.read_jsonl(name, fields, rows=lines, splits=names, **options)


def check(name: str) -> None:
  """Refuses a name under which nothing is registered or cached.

  Reads no record of a cache; a task of `tasks.register` reads its source, whose
  judgements name the splits.

  Args:
    name: of a task or mixture, or a folder.

  Raises:
    ValueError: if there is no such task, or a cache is not complete.
  """
  for _ in _splits(name):
    pass


def digest(name: str) -> str | None:
  """Digests the records of a task that is not cached, in whatever order.

  Args:
    name: of a task or mixture, or a folder.

  Returns:
    The digest; None for a folder, whose files say it.
  """
  if pathlib.Path(name).is_dir():
    return None
  total = 0
  for part, split in _splits(name):
    for _, row in part.rows(split):
      text = json.dumps([split, row], sort_keys=True, default=str).encode()
      total += int.from_bytes(hashlib.sha256(text).digest(), "big")
  return f"{total % 2**256:064x}"


def _splits(name: str) -> Iterator[tuple[_Cached | _Registered, str]]:
  """Yields each task behind a name with each of its splits."""
  for part in _parts(name):
    for split in sorted(part.splits):
      yield part, split


def _parts(name: str) -> list[_Cached | _Registered]:
  if pathlib.Path(name).is_dir():
    return [_Cached(name)]
  with extras.required("seqio"), vocabulary.native_stderr():
    import seqio

  try:
    provider = seqio.get_mixture_or_task(name)
  except ValueError:
    raise ValueError(
      f"{name}: expected a SeqIO task or mixture that is registered, or the"
      " folder of a cached task, got neither: import the module that registers"
      " it (import my_tasks in a gin file, or --gin.MIXTURE_OR_TASK_MODULE with"
      " data/seqio.gin)"
    ) from None
  is_mixture = isinstance(provider, seqio.Mixture)
  return [
    _Cached(task.cache_dir)
    if task.supports_caching and task.cache_dir
    else _Registered(task)
    for task in (provider.tasks if is_mixture else [provider])
  ]


def _read_documents(name: str, fields: jsonl.Fields, is_corpus: bool):
  """Reads documents, in an order that says nothing of who asked."""
  every = [*_splits(name)]
  chosen = [(part, split) for part, split in every if split == PASSAGE]
  if not (chosen or is_corpus):
    raise ValueError(
      f"{name}: expected a split {PASSAGE!r} with all documents, got"
      f" {', '.join(sorted({split for _, split in every}))}: name a task that"
      " holds them, seqio:TASK@CORPUS, or take those of the pairs alone,"
      " seqio_pairs:TASK"
    )
  text = PASSAGE if fields.document == "document" else fields.document
  places, seen = [], set()
  for part, split in chosen or every:
    for number, (place_of, row) in enumerate(part.rows(split)):
      where = f"{part.name}/{split}:{number}"
      if not _has(where, row, "passage_id"):
        continue
      id_ = ids.get_field(where, row, "passage_id", "document")
      if not chosen:
        if row.get("query_id"):
          raise ValueError(
            f"{where}: expected documents alone in a CORPUS without split"
            f" {PASSAGE!r}, got a query's: the documents would say who asked;"
            " name a task of all documents"
          )
        same = json.dumps(row, sort_keys=True, default=str).encode()
        key = hashlib.sha256(same).digest()
        if key in seen:
          continue
        seen.add(key)
      places.append((_number(row), id_, part, place_of))
  places.sort(key=lambda each: each[:2])

  def read_all():
    for part, some in itertools.groupby(places, lambda each: each[2]):
      for row in part.get([place_of for *_, place_of in some]):
        where = f"{part.name}:{row['passage_id']}"
        yield where, beir.document_of(where, _rename(row, "passage_id", text))

  return collection_lib.read_documents(name, read_all)


def _has(where: str, row: _Row, name: str) -> bool:
  """Says whether a row has a side; a task without ids is refused."""
  if name not in row:
    raise ValueError(
      f"{where}: expected the feature {name!r}, got {', '.join(sorted(row))}: let"
      " the task keep it, or read texts alone as seqio_pairs:TASK"
    )
  return row[name] != ""


def _rename(row: _Row, name: str, text: str) -> _Row:
  """Returns a row as a line of corpus.jsonl or queries.jsonl."""
  title = row.get("title")
  if title is None:
    title = json.loads(row.get("passage_metadata") or "{}").get("title")
  return {
    "_id": row[name],
    "text": row.get(text),
    "title": title or "",
    "client": row.get("client", "") if name == "query_id" else "",
  }


def _number(row: _Row) -> int:
  return int(row.get("number", -1))


def _grade(row: _Row) -> str:
  grade = row.get("score", 1)
  whole = isinstance(grade, float) and grade.is_integer()
  return str(int(grade) if whole else grade)


def _parse(raw: bytes) -> _Row:
  """Returns the single values of a serialized example."""
  with extras.required("seqio"):
    import tensorflow as tf

  row = {}
  for name, feature in tf.train.Example.FromString(
    raw
  ).features.feature.items():
    kind = feature.WhichOneof("kind")
    values = getattr(feature, kind).value if kind else ()
    if len(values) == 1:
      row[name] = values[0]
  return _texts(row)


def _texts(row: _Row) -> _Row:
  """Returns the columns of a record as text and numbers, without its tokens."""
  plain = {
    name: value.decode()
    if isinstance(value, bytes)
    else getattr(value, "item", lambda value=value: value)()
    for name, value in row.items()
  }
  texts = {
    name.removesuffix(_TEXT): text
    for name, text in plain.items()
    if name.endswith(_TEXT)
  }
  rest = {name: x for name, x in plain.items() if not name.endswith(_TEXT)}
  return {**rest, **texts}
