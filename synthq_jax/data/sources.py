"""Opens a collection by its name in settings, such as "beir:FOLDER".

One table of kinds serves every stage and study. A new kind is a function that
reads it and one entry in `KINDS`.
"""

import collections
import dataclasses
import hashlib
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator

from synthq_jax.data import (
  beir,
  beir_sets,
  collection,
  environment_docs,
  files,
  ids,
  ir_datasets_sets,
  jsonl,
  msmarco,
  newsqa,
  query_pairs,
  splits,
  table_files,
  task_records,
)
from synthq_jax.storage import file_lists, object_store, stores

__all__ = [
  "KINDS",
  "OF_LINES",
  "OF_USERS",
  "Kind",
  "Source",
  "check",
  "is_remote",
  "kind_of",
  "open",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
  """The functions that read, check and digest the sources of one kind.

  Attributes:
    form: the pattern of a source's name, e.g. "beir:DIR". "@" separates two parts
      of the location; "[@PART]" is optional.
    read: reads a source; documents in files stay on disk.
    digest: returns a text that changes with the content of a source.
    check: refuses a source with missing files, as reading would; reads no
      documents.
    queries: yields ids and texts of all queries without reading documents; None
      if the kind cannot do so.
    most: returns the largest possible number of documents, in a second and before
      reading; None if only reading can tell.
    most_queries: the same of queries.
    from_pairs: whether each document has a query, so that the collection itself
      reveals which documents somebody asked about; a privacy statement says so.
    named_by_text: whether a query's id is a digest of its text.
  """

  form: str
  read: Callable[["Source"], collection.Collection]
  digest: Callable[["Source"], str]
  check: Callable[["Source"], object] = lambda source: None
  most: Callable[["Source"], int | None] = lambda source: None
  most_queries: Callable[["Source"], int | None] = lambda source: None
  from_pairs: bool
  named_by_text: bool = False
  queries: Callable[["Source"], Iterator[tuple[str, str]]] | None = None

  def fits(self, location: str) -> bool:
    """Returns True if a location has the parts that the form asks for."""
    parts = self.form.partition(":")[2]
    if "@" in parts and ("[@" not in parts or "@" in location):
      return all(location.partition("@"))
    return bool(parts) == bool(location)


@dataclasses.dataclass(frozen=True)
class Source:
  """A collection that has not been read yet.

  Attributes:
    kind: a key of `KINDS`.
    location: the text behind the kind: a folder, a file or a name; "" for the
      demo set.
    seed: seed of the splits, if the source has none of its own.
    fields: names of the keys of a line, for logs and pairs.
    strict: whether to refuse judgements of unknown documents or queries. If not,
      they are counted; judgements of unknown queries and lines of a log are left
      out, other judgements of unknown documents count when a run is scored.
    divide: whether to divide a log without splits; if not, it is one split.
    left_out: number of judgements with unknown ids, by kind of id; as private as
      the queries.
  """

  kind: str
  location: str
  seed: int = 0
  fields: jsonl.Fields = jsonl.Fields()  # noqa: RUF009  (frozen)
  strict: bool = False
  divide: bool = True
  left_out: collection.Dangling = dataclasses.field(
    default_factory=collections.Counter, compare=False, repr=False
  )

  @property
  def title(self) -> str:
    """The name of the source in a report, without the path on this machine.

    >>> [open(text).title for text in ("beir:/data/boolq/", "tfds:fiqa@/data/qrels")]
    ['boolq', 'fiqa']
    """
    if self.kind == "ir_datasets":
      return self.location
    path = self.location
    if self.kind in ("log", "tfds", "seqio"):
      path = _split_location(self)[0]
    return pathlib.Path(path or self.kind).name

  def read(self) -> collection.Collection:
    """Reads the collection; documents in files stay on disk.

    `left_out` counts the judgements that are left out. Lines on standard error
    report these counts and the ids that were normalized (`ids`). For a private
    log these are exact counts of private records: treat the terminal's output as
    private.

    Raises:
      ValueError: if a file is missing or malformed.
    """
    self.left_out.clear()
    with ids.noting() as tally:
      data = KINDS[self.kind].read(self)
      users = {query.client for query in data.queries}
      ids.add_count("user", ids.TORN, ids.count_torn(users))
    for note in (*self._describe_losses(data), *ids.describe(tally)):
      print(f"synthq: note: {self.location}: {note}", file=sys.stderr)
    return data

  def _describe_losses(self, data: collection.Collection) -> Iterator[str]:
    """Yields notes with the number of judgements that have unknown ids."""
    left_out = dict(self.left_out)
    if data.lacking:
      number = left_out.pop("document", 0)
      yield (
        f"{number:,} judgements name documents that the corpus lacks: they count"
        " when a run is scored, as in BEIR and trec_eval; --strict stops there"
      )
    if left_out:
      kinds = " and ".join(sorted(left_out))
      numbers = " and ".join(f"{n:,}" for _, n in sorted(left_out.items()))
      yield (
        f"left out judgements of unknown {kinds} ids: {numbers}; --strict stops"
        " there"
      )

  def queries(self, split: str | None = None) -> Iterator[tuple[str, str]]:
    """Yields ids and texts of queries; an id may have several texts.

    Args:
      split: a split, to get only its judged queries; None: all queries, which
        many kinds yield one by one without reading documents.

    Raises:
      ValueError: if a file is missing or malformed, or the split is unknown.
    """
    direct = KINDS[self.kind].queries
    if split is None and direct is not None:
      yield from direct(self)
      return
    data = self.read()
    judged = None if split is None else data.judgements(split)
    for query in data.queries:
      if judged is None or query.id in judged:
        yield query.id, query.text

  @property
  def fractions(self) -> dict[str, float]:
    """The share of each split of a log that names no splits."""
    return splits.FRACTIONS if self.divide else {"train": 1.0}

  @property
  def dangling(self) -> collection.Dangling | None:
    """The counter of unknown ids for readers; None: they refuse such ids."""
    return None if self.strict else self.left_out

  def digest(self) -> str:
    """Returns a text that changes with the content.

    It holds names and versions of packages for the demo set, the name of a set
    that another package keeps, and a digest of files. So a changed file is read
    again, and a moved one is not.
    """
    return KINDS[self.kind].digest(self)

  def most_documents(self) -> int | None:
    """Returns the largest possible number of documents; None if it is
    unknown."""
    return self._estimate(KINDS[self.kind].most)

  def most_queries(self) -> int | None:
    """Returns the largest possible number of queries; None if it is unknown."""
    return self._estimate(KINDS[self.kind].most_queries)

  def _estimate(self, most: Callable[["Source"], int | None]) -> int | None:
    try:
      return most(self)
    except Exception:  # `read` reports faults of the files
      return None

  def check_size(self, number: int) -> None:
    """Refuses a number of documents that the source cannot have, without reading it.

    Args:
      number: number of documents to write queries for.

    Raises:
      ValueError: if the source has fewer documents for certain.
    """
    most = self.most_documents()
    if most is not None and number > most:
      name = ":".join(filter(None, (self.kind, self.location)))
      raise ValueError(
        "generate.Config.num_documents must be at most the size of the collection,"
        f" got {number:,}, which is more than {name} can have: set a smaller"
        " NUM_DOCUMENTS, or None"
      )

  def packages(self) -> str:
    """Returns the packages and versions of the demo set; "" for other
    sources."""
    return self.digest() if self.kind == "environment_docs" else ""


def open(  # noqa: A001
  text: str,
  setting: str = "source",
  *,
  kinds: Iterable[str] | None = None,
  seed: int = 0,
  fields: jsonl.Fields | None = None,
  strict: bool = False,
  divide: bool = True,
) -> Source:
  """Returns the source that a setting names; nothing is read yet.

  The files under a URL, such as "beir:gs://bucket/scifact", are downloaded.

  >>> open("beir:scifact").kind
  'beir'

  Args:
    text: a source in the form of its kind, e.g. "beir:DIR" or "tfds:NAME@QRELS":
      a set that TFDS has prepared, and the folder of its judgements.
    setting: the setting's name, for the message.
    kinds: names of the admitted kinds; None: all kinds.
    seed: seed of the splits, if the source has none of its own.
    fields: names of the keys of a line, for logs and pairs.
    strict: whether to refuse judgements of unknown ids instead of counting them.
    divide: whether to divide a log without splits.

  Raises:
    ValueError: if the text fits the form of no admitted kind.
  """
  kind, location = _parse(text, setting, kinds)
  location = "@".join(map(stores.local, location.split("@")))
  return Source(kind, location, seed, fields or jsonl.Fields(), strict, divide)


def check(
  text: str,
  setting: str = "source",
  *,
  kinds: Iterable[str] | None = None,
  fields: jsonl.Fields | None = None,
) -> None:
  """Refuses a source that cannot be read; reads only headers, downloads nothing.

  Args:
    text: as in `open`; files under a URL are not checked.
    setting: the setting's name, for the message.
    kinds: names of the admitted kinds; None: all kinds.
    fields: names of the keys of a line, for logs and pairs.

  Raises:
    ValueError: if the text fits the form of no admitted kind, or files or columns
      are missing.
  """
  kind, location = _parse(text, setting, kinds)
  if not is_remote(text):
    KINDS[kind].check(Source(kind, location, fields=fields or jsonl.Fields()))


def kind_of(text: str) -> Kind:
  """Returns the kind of the source that a stored result names.

  Args:
    text: as in `open`.

  Raises:
    ValueError: if this version knows no such kind.
  """
  name = text.partition(":")[0]
  if name not in KINDS:
    raise ValueError(
      f"expected data of a source of {', '.join(KINDS)}, got {name!r} of another"
      " version: delete the folder of the result, and it is made again"
    )
  return KINDS[name]


def is_remote(text: str) -> bool:
  """Returns True if a part of a source lies under a URL.

  >>> is_remote("beir:gs://bucket/fiqa"), is_remote("log:a.csv@b.jsonl")
  (True, False)
  """
  return any(map(object_store.is_url, text.partition(":")[2].split("@")))


def _parse(
  text: str, setting: str, kinds: Iterable[str] | None
) -> tuple[str, str]:
  """Splits a source's name into kind and location; an error lists the forms."""
  kind, _, location = text.partition(":")
  admitted = {name: KINDS[name] for name in kinds or KINDS}
  if kind not in admitted or not admitted[kind].fits(location):
    *forms, last = (each.form for each in admitted.values())
    raise ValueError(
      f"{setting} must be {', '.join(forms)} or {last}, got source={text!r}"
    )
  return kind, location


def _digest_files(source: Source, path: str | None = None) -> str:
  """Returns a digest of a file, or of a folder's files and their names."""
  root = pathlib.Path(source.location if path is None else path)
  files_ = [root] if root.is_file() else file_lists.below(root)
  state = hashlib.sha256()
  for file in files_:
    state.update(file.relative_to(root).as_posix().encode() + b"\0")
    with file.open("rb") as stream:
      state.update(hashlib.file_digest(stream, "sha256").digest())
  return state.hexdigest()


def _split_location(source: Source) -> tuple[str, str]:
  """Splits a location at "@" if its kind has two parts, such as log and corpus.

  If the form of the kind has no "@", it is part of a name, and the second part is
  "". Folders may have an "@", too: the one between existing paths counts.
  """
  if "@" not in KINDS[source.kind].form:
    return source.location, ""
  names = source.location.split("@")
  pairs = [
    ("@".join(names[:n]), "@".join(names[n:])) for n in range(1, len(names))
  ]
  existing = [pair for pair in pairs if all(map(os.path.exists, pair))]
  return (existing or pairs or [(source.location, "")])[0]


def _make_reader(
  read: Callable[..., collection.Collection],
) -> Callable[[Source], collection.Collection]:
  """Makes a function that reads a source by its location and counts unknown
  ids."""
  return lambda source: read(source.location, dangling=source.dangling)


def _read_msmarco_queries(source: Source) -> Iterator[tuple[str, str]]:
  for split in files.splits(source.location, "queries."):
    path = files.find(source.location, f"queries.{split}.tsv")
    yield from query_pairs.query_log(path, "text")


def _read_log_queries(source: Source) -> Iterator[tuple[str, str]]:
  return jsonl.queries(_split_location(source)[0], source.fields)


def _make_line_counter(name: str) -> Callable[[Source], int]:
  """Makes a function that counts the lines of a file in a source's folder."""
  return lambda source: files.get_max_lines(files.find(source.location, name))


def _make_folder_check(
  *names: str, judged: str, under: str = ""
) -> Callable[[Source], None]:
  """Makes a function that refuses a folder without these files and
  judgements."""

  def check_folder(source: Source) -> None:
    for name in names:
      files.find(source.location, name)
    files.splits(pathlib.Path(source.location, under), judged)

  return check_folder


def _check_tables(source: Source) -> None:
  log, corpus = _split_location(source)
  for path in filter(None, (log, corpus)):
    table_files.check(path)
  jsonl.check_columns(log, source.fields, has_corpus=bool(corpus))
  if corpus:
    jsonl.check_corpus_columns(corpus)


def _check_file(source: Source) -> None:
  if not pathlib.Path(source.location).is_file():
    raise ValueError(
      f"expected a file, got {source.location}: no such file; check the path"
    )


def _find_corpus(source: Source) -> pathlib.Path:
  return table_files.find(source.location, "corpus")


def _check_tasks(source: Source) -> None:
  for task in filter(None, _split_location(source)):
    task_records.check(task)


def _digest_tasks(source: Source) -> str:
  return " ".join(
    task_records.digest(task) or _digest_files(source, task)
    for task in filter(None, _split_location(source))
  )


def _digest_prepared(source: Source) -> str:
  name, qrels = _split_location(source)
  return f"{name} {_digest_files(source, qrels)}"


KINDS: dict[str, Kind] = {
  "environment_docs": Kind(
    form="environment_docs",
    read=lambda source: environment_docs.build(seed=source.seed),
    digest=lambda source: environment_docs.digest(),
    most=lambda source: environment_docs.most_documents(),
    from_pairs=True,
  ),
  "beir": Kind(
    form="beir:DIR",
    read=_make_reader(beir.read_beir),
    digest=_digest_files,
    most=_make_line_counter("corpus.jsonl"),
    most_queries=_make_line_counter("queries.jsonl"),
    check=_make_folder_check(
      "corpus.jsonl", "queries.jsonl", judged="", under="qrels"
    ),
    from_pairs=False,
    queries=lambda source: query_pairs.query_log(
      files.find(source.location, "queries.jsonl")
    ),
  ),
  "msmarco": Kind(
    form="msmarco:DIR",
    read=_make_reader(msmarco.read_msmarco),
    digest=_digest_files,
    most=_make_line_counter("collection.tsv"),
    check=_make_folder_check("collection.tsv", judged="qrels."),
    from_pairs=False,
    queries=_read_msmarco_queries,
  ),
  "hf": Kind(
    form="hf:DIR",
    read=_make_reader(beir.read_hub),
    digest=_digest_files,
    most=lambda source: table_files.get_max_rows(_find_corpus(source)),
    check=lambda source: table_files.check(_find_corpus(source)),
    from_pairs=False,
  ),
  "log": Kind(
    form="log:FILE@CORPUS",
    read=lambda source: jsonl.read_log(
      *_split_location(source),
      source.fields,
      fractions=source.fractions,
      seed=source.seed,
      dangling=source.dangling,
    ),
    digest=lambda source: " ".join(
      _digest_files(source, part) for part in _split_location(source)
    ),
    most=lambda source: table_files.get_max_rows(_split_location(source)[1]),
    most_queries=lambda source: table_files.get_max_rows(
      _split_location(source)[0]
    ),
    check=_check_tables,
    from_pairs=False,
    named_by_text=True,
    queries=_read_log_queries,
  ),
  "jsonl": Kind(
    form="jsonl:FILE",
    read=lambda source: jsonl.read_jsonl(
      source.location,
      source.fields,
      fractions=source.fractions,
      seed=source.seed,
    ),
    digest=_digest_files,
    most=lambda source: table_files.get_max_rows(source.location),
    most_queries=lambda source: table_files.get_max_rows(source.location),
    check=_check_tables,
    from_pairs=True,
    named_by_text=True,
    queries=_read_log_queries,
  ),
  "newsqa": Kind(
    form="newsqa:FILE",
    read=lambda source: newsqa.as_collection(newsqa.read(source.location)),
    digest=_digest_files,
    check=_check_file,
    from_pairs=True,
  ),
  "ir_datasets": Kind(
    form="ir_datasets:ID",
    read=_make_reader(ir_datasets_sets.read),
    digest=lambda source: source.location,  # the package checks its downloads
    most=lambda source: ir_datasets_sets.num_documents(source.location),
    check=lambda source: ir_datasets_sets.num_documents(source.location),
    from_pairs=False,
    queries=lambda source: ir_datasets_sets.queries(source.location),
  ),
  "tfds": Kind(
    form="tfds:NAME@QRELS",
    read=lambda source: beir_sets.read(
      *_split_location(source), dangling=source.dangling
    ),
    digest=_digest_prepared,
    check=lambda source: files.splits(_split_location(source)[1]),
    from_pairs=False,
  ),
  "seqio": Kind(
    form="seqio:TASK[@CORPUS]",
    read=lambda source: task_records.read(
      *_split_location(source), source.fields, dangling=source.dangling
    ),
    digest=_digest_tasks,
    check=_check_tasks,
    from_pairs=False,
  ),
  "seqio_pairs": Kind(
    form="seqio_pairs:TASK",
    read=lambda source: task_records.read_pairs(
      source.location,
      source.fields,
      fractions=source.fractions,
      seed=source.seed,
    ),
    digest=_digest_tasks,
    check=_check_tasks,
    from_pairs=True,
    named_by_text=True,
  ),
}
"""Kinds of sources by name, which is the first word of a setting."""

OF_LINES = ("jsonl", "log", "seqio_pairs")
"""Kinds of sources whose key of the user's id a setting may name."""

OF_USERS = ("beir", "hf", "seqio", *OF_LINES)
"""Kinds of sources whose queries may each name a user."""
