"""Reads SeqIO tasks and mixtures as collections: sources `seqio` and `seqio_pairs`.

A source names a registered task or mixture (`tasks`), or the folder of a cached
task that `seqio_cache_tasks` has written on Beam; the folder's task need not be
registered. Records are those of the cache: the output of a task before its
CacheDatasetPlaceholder, or else its final output. The text of a feature X is
X_pretokenized, or X if that is a string.

Beam shuffles records, tasks shuffle by a seed, and mixtures repeat. None of that
reaches the collection: records are ordered by "number", if they have it (tasks of
`tasks` do), then by their ids; equal records count once; the rates of a mixture are
ignored, but for a rate of 0, which leaves a task out. So a query is one record,
however often a task yields it.

Records of queries do not hold the documents without a query. These are read from
the split "passage", of the task itself or of CORPUS; from a CORPUS without that
split, all records of all splits are read.
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
"""Names of the splits with all queries and with all documents."""

_TEXT = "_pretokenized"
_Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Cached:
  """Reads the folder of a cached task."""

  name: str

  @functools.cached_property
  def splits(self) -> dict[str, list[pathlib.Path]]:
    """The files of each split, checked to be complete."""
    root = pathlib.Path(self.name)
    infos = sorted(root.glob("info.*.json"))
    if not (infos and (root / "COMPLETED").is_file()):
      raise ValueError(
        f"{root}: expected a cached SeqIO task (COMPLETED, info.SPLIT.json and"
        " SPLIT.tfrecord-*), got no complete one: run seqio_cache_tasks"
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
          f" {len(paths)}: copy the whole folder again"
        )
      splits[split] = paths
    return splits

  def rows(self, split: str) -> Iterator[tuple[Any, _Row]]:
    """Yields the position and columns of each record; checks their number at
    the end."""
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

  def get(self, positions: Sequence[Any]) -> Iterator[_Row]:
    """Reads records by the positions that `rows` yields."""
    streams: dict[pathlib.Path, Any] = {}
    try:
      for path, start, size in positions:
        if path not in streams:
          streams[path] = path.open("rb")
        streams[path].seek(start + 12)
        yield _parse(streams[path].read(size))
    finally:
      for stream in streams.values():
        stream.close()


@dataclasses.dataclass(frozen=True)
class _Registered:
  """Reads a task without a cache; records to be sorted are in memory."""

  task: Any

  @property
  def name(self) -> str:
    return self.task.name

  @property
  def splits(self) -> Sequence[str]:
    return self.task.splits

  def rows(self, split: str) -> Iterator[tuple[Any, _Row]]:
    """Yields the columns of each record twice: as its position for `get`, and
    as row."""
    task = self.task
    if task.supports_caching:
      dataset = task.source.get_dataset(split, shuffle=False, seed=0)
      dataset = task.preprocess_precache(dataset, seed=0)
    else:
      dataset = task.get_dataset(None, split, shuffle=False, seed=0)
    for record in dataset.as_numpy_iterator():
      row = _decode_row({n: x for n, x in record.items() if np.ndim(x) == 0})
      yield row, row

  def get(self, positions: Sequence[Any]) -> Iterator[_Row]:
    """Yields the records that `rows` yielded as positions."""
    return iter(positions)


def read(
  name: str,
  corpus: str,
  fields: jsonl.Fields,
  *,
  dangling: collection_lib.Dangling | None = None,
) -> collection_lib.Collection:
  """Reads a task with ids of queries and documents as a collection.

  Columns are query_id, query, passage_id, passage (or the names of `fields`), and
  possibly title (or TFDS' passage_metadata), client, and score, a grade whose
  default is 1. A row with only one of the ids is a query or a document.

  Args:
    name: the name of a task or mixture, or a folder.
    corpus: the name of a task with the documents; empty: `name`.
    fields: names of the columns of texts.
    dangling: as in `beir.read_beir`.

  Returns:
    The collection; documents of a cache stay on disk.

  Raises:
    ValueError: as `beir.read_beir`, or if the task is unknown, its cache is
      incomplete, or there are no documents.
  """
  documents, document_ids = _read_documents(
    corpus or name, fields, bool(corpus)
  )
  queries: dict[str, tuple[tuple[bool, int], collection_lib.Query]] = {}
  judged: dict[str, list[tuple[int, str, str, str]]] = {}
  for part, split in _iterate_splits(name):
    if split == PASSAGE:
      continue
    rows = judged.setdefault(split, []) if split != QUERY else []
    for number, (_, row) in enumerate(part.rows(split)):
      where = f"{part.name}/{split}:{number}"
      if not _has_id(where, row, "query_id"):
        continue
      line = _rename(row, "query_id", fields.query)
      query = beir.make_query(where, line)
      order = (split != QUERY, _get_number(row))
      first = queries.setdefault(query.id, (order, query))
      if first[1] != query:
        raise ValueError(
          f"{where}: expected one text and one user for each query id, got"
          " several: correct the task"
        )
      queries[query.id] = min(first, (order, query), key=lambda each: each[0])
      if split != QUERY and _has_id(where, row, "passage_id"):
        document = ids.get_field(where, row, "passage_id", "document")
        rows.append((_get_number(row), query.id, document, _get_grade(row)))
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
  return collection_lib.collect(
    documents, (query for _, query in ordered), qrels
  )


def read_pairs(
  name: str, fields: jsonl.Fields, **options: Any
) -> collection_lib.Collection:
  """Reads a task of texts without ids as `jsonl.read_jsonl` reads a log of pairs.

  Args:
    name: the name of a task or mixture, or a folder.
    fields: names of the features, e.g. query="targets", document="inputs".
    **options: options of `jsonl.read_jsonl`, whose guarantee holds here, too.

  Raises:
    ValueError: as `jsonl.read_jsonl`.
  """
  rows, parts = [], [*_iterate_splits(name)]
  for part, split in parts:
    for _, row in part.rows(split):
      if not any(isinstance(value, str) for value in row.values()):
        raise ValueError(
          f"{part.name}/{split}: expected features of text, got tokens alone: let"
          " seqio.preprocessors.tokenize keep the texts (copy_pretokenized=True)"
        )
      texts = tuple(str(row.get(x)) for x in (fields.query, fields.document))
      of_task = {"split": table_files.FileSplit(split)}
      rows.append((split, _get_number(row), texts, {**row, **of_task}))
  rows.sort(key=lambda each: each[:3])
  names = sorted({split for _, split in parts})
  lines = ((f"{name}/{split}", row) for split, _, _, row in rows)
  return jsonl.read_jsonl(name, fields, rows=lines, splits=names, **options)


def check(name: str) -> None:
  """Refuses a name that is neither a registered task nor a complete cache.

  No record of a cache is read; a task of `tasks.register` reads its source, whose
  judgements name the splits.

  Args:
    name: the name of a task or mixture, or a folder.

  Raises:
    ValueError: if the task is unknown, or its cache is incomplete.
  """
  for _ in _iterate_splits(name):
    pass


def digest(name: str) -> str | None:
  """Returns a digest of a task's records that does not depend on their order.

  Args:
    name: the name of a task or mixture, or a folder.

  Returns:
    The digest; None for a folder, since callers digest its files.
  """
  if pathlib.Path(name).is_dir():
    return None
  total = 0
  for part, split in _iterate_splits(name):
    for _, row in part.rows(split):
      text = json.dumps([split, row], sort_keys=True, default=str).encode()
      total += int.from_bytes(hashlib.sha256(text).digest(), "big")
  return f"{total % 2**256:064x}"


def _iterate_splits(name: str) -> Iterator[tuple[_Cached | _Registered, str]]:
  """Yields each task of a name with each of its splits."""
  for part in _find_tasks(name):
    for split in sorted(part.splits):
      yield part, split


def _find_tasks(name: str) -> list[_Cached | _Registered]:
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
  chosen = [provider]
  if isinstance(provider, seqio.Mixture):
    chosen = [task for task in provider.tasks if _is_drawn(provider, task)]
  return [
    _Cached(task.cache_dir)
    if task.supports_caching and task.cache_dir
    else _Registered(task)
    for task in chosen
  ]


def _is_drawn(mixture: Any, task: Any) -> bool:
  """Returns True if a mixture draws records of a task."""
  try:
    return mixture.get_rate(task) > 0
  except Exception:  # a rate that counts the records of a cache, and has none
    return True


def _read_documents(name: str, fields: jsonl.Fields, is_corpus: bool):
  """Reads documents in an order that reveals nothing about the queries."""
  all_splits = [*_iterate_splits(name)]
  chosen = [(part, split) for part, split in all_splits if split == PASSAGE]
  if not (chosen or is_corpus):
    raise ValueError(
      f"{name}: expected a split {PASSAGE!r} with all documents, got"
      f" {', '.join(sorted({split for _, split in all_splits}))}: name a task that"
      " holds them, seqio:TASK@CORPUS, or read only documents with a query,"
      " seqio_pairs:TASK"
    )
  text = PASSAGE if fields.document == "document" else fields.document
  positions, seen = [], set()
  for part, split in chosen or all_splits:
    for number, (position, row) in enumerate(part.rows(split)):
      where = f"{part.name}/{split}:{number}"
      if not _has_id(where, row, "passage_id"):
        continue
      id_ = ids.get_field(where, row, "passage_id", "document")
      if not chosen:
        if row.get("query_id"):
          raise ValueError(
            f"{where}: expected documents alone in a CORPUS without split"
            f" {PASSAGE!r}, got a query's: the documents would reveal"
            " queries; name a task of all documents"
          )
        content = json.dumps(row, sort_keys=True, default=str).encode()
        key = hashlib.sha256(content).digest()
        if key in seen:
          continue
        seen.add(key)
      positions.append((_get_number(row), id_, part, position))
  positions.sort(key=lambda each: each[:2])

  def read_all():
    for part, some in itertools.groupby(positions, lambda each: each[2]):
      for row in part.get([position for *_, position in some]):
        where = f"{part.name}:{row['passage_id']}"
        yield where, beir.make_document(where, _rename(row, "passage_id", text))

  return collection_lib.read_documents(name, read_all)


def _has_id(where: str, row: _Row, name: str) -> bool:
  """Returns True if a row has an id; refuses a task without the id's
  feature."""
  if name not in row:
    raise ValueError(
      f"{where}: expected the feature {name!r}, got {', '.join(sorted(row))}: let"
      " the task keep it, or read texts alone as seqio_pairs:TASK"
    )
  return row[name] != ""


def _rename(row: _Row, name: str, text: str) -> _Row:
  """Converts a row to a line of corpus.jsonl or queries.jsonl."""
  title = row.get("title")
  if title is None:
    title = json.loads(row.get("passage_metadata") or "{}").get("title")
  return {
    "_id": row[name],
    "text": row.get(text),
    "title": title or "",
    "client": row.get("client", "") if name == "query_id" else "",
  }


def _get_number(row: _Row) -> int:
  return int(row.get("number", -1))


def _get_grade(row: _Row) -> str:
  grade = row.get("score", 1)
  is_whole = isinstance(grade, float) and grade.is_integer()
  return str(int(grade) if is_whole else grade)


def _parse(raw: bytes) -> _Row:
  """Parses the features of a serialized example that hold a single value."""
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
  return _decode_row(row)


def _decode_row(row: _Row) -> _Row:
  """Decodes a record's columns to texts and numbers; renames X_pretokenized to X."""
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
