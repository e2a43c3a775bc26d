"""Opens a collection by its name in settings, such as "beir:FOLDER".

One table of kinds serves every stage and study. A new kind is a function that
reads it and one entry in `KINDS`.
"""

import collections
import dataclasses
import hashlib
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

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
  """How the sources of one kind are named, read and digested.

  Attributes:
    form: how a setting names them, e.g. "beir:DIR"; "@" parts the place in
      two, of which "[@" leaves the second out.
    read: reads one; documents in files stay there.
    digest: returns what the content of one depends on.
    check: refuses one whose files are not there, as reading would; reads none.
    queries: yields ids and texts of all queries without reading documents; None:
      there is no way.
    most: returns how many documents one may have, in a second and before it is
      read; None where only reading tells.
    from_pairs: whether its documents are those that somebody asked about, so
      that the collection itself says that they were; a promise says so.
    named_by_text: whether a query's id is a digest of its text.
  """

  form: str
  read: Callable[["Source"], collection.Collection]
  digest: Callable[["Source"], str]
  check: Callable[["Source"], object] = lambda source: None
  most: Callable[["Source"], int | None] = lambda source: None
  from_pairs: bool
  named_by_text: bool = False
  queries: Callable[["Source"], Iterator[tuple[str, str]]] | None = None

  def fits(self, place: str) -> bool:
    """Returns whether a place has the parts that the form asks for."""
    asked = self.form.partition(":")[2]
    if "@" in asked and ("[@" not in asked or "@" in place):
      return all(place.partition("@"))
    return bool(asked) == bool(place)


@dataclasses.dataclass(frozen=True)
class Source:
  """A collection that has not been read yet.

  Attributes:
    kind: a key of `KINDS`.
    place: what follows the kind: a folder, a file or a name; "" for the demo
      set.
    seed: of splits, where the source has none of its own.
    fields: of a line, for jsonl and log.
    strict: whether judgements of unknown documents or queries are refused. Else
      they are counted: those of queries are left out, and so are lines of a log;
      other judgements of unknown documents count when a run is scored.
    divide: whether logs without splits are divided; else all is one split.
    left_out: how many name unknown ids, by kind; as private as the queries.
  """

  kind: str
  place: str
  seed: int = 0
  fields: jsonl.Fields = jsonl.Fields()  # noqa: RUF009  (frozen)
  strict: bool = False
  divide: bool = True
  left_out: collection.Dangling = dataclasses.field(
    default_factory=collections.Counter, compare=False, repr=False
  )

  @property
  def title(self) -> str:
    """Its name for a report, without its place on this machine.

    >>> [open(text).title for text in ("beir:/data/boolq/", "tfds:fiqa@/data/qrels")]
    ['boolq', 'fiqa']
    """
    if self.kind == "ir_datasets":
      return self.place
    place = self.place
    if self.kind in ("log", "newsqa", "tfds", "seqio"):
      place = place.partition("@")[0]
    return pathlib.Path(place or self.kind).name

  def read(self) -> collection.Collection:
    """Reads it; documents in files stay there.

    What was left out is counted in `left_out`. Lines on standard error say how
    much it was, and which ids were read otherwise than they are written (`ids`).
    Of a private log, these are exact counts of private records: treat the
    terminal's output as private.

    Raises:
      ValueError: if a file is missing or malformed.
    """
    self.left_out.clear()
    with ids.noting() as tally:
      data = KINDS[self.kind].read(self)
      users = {query.client for query in data.queries}
      ids.tell("user", ids.TORN, ids.count_torn(users))
    for note in (*self._losses(data), *ids.describe(tally)):
      print(f"synthq: note: {self.place}: {note}", file=sys.stderr)
    return data

  def _losses(self, data: collection.Collection) -> Iterator[str]:
    """Yields lines that say how many judgements have no known id."""
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
    """Yields ids and texts of queries; an id may come with several texts.

    Args:
      split: whose judged queries; None: all there are, which many kinds yield
        one by one without looking at documents.

    Raises:
      ValueError: if a file is missing or malformed, or there is no such split.
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
    """The shares of the splits of a log that has none."""
    return splits.FRACTIONS if self.divide else {"train": 1.0}

  @property
  def dangling(self) -> collection.Dangling | None:
    """What readers count unknown ids in; None: they refuse them."""
    return None if self.strict else self.left_out

  def digest(self) -> str:
    """Returns what the content depends on.

    Names and versions of packages for the demo set, the name for what another
    package keeps, and a digest of the content for files, so that a changed file
    is read again and a moved one is not.
    """
    return KINDS[self.kind].digest(self)

  def most_documents(self) -> int | None:
    """Returns how many documents it may have, before it is read; None: unknown."""
    try:
      return KINDS[self.kind].most(self)
    except Exception:  # what is wrong with the files, `read` says
      return None

  def check_size(self, number: int) -> None:
    """Refuses more documents than it can have, before it is read.

    Args:
      number: of documents to write queries for.

    Raises:
      ValueError: if there cannot be as many.
    """
    most = self.most_documents()
    if most is not None and number > most:
      name = ":".join(filter(None, (self.kind, self.place)))
      raise ValueError(
        "generate.Config.num_documents must be at most the size of the collection,"
        f" got {number:,}, which is more than {name} can have: set a smaller"
        " NUM_DOCUMENTS, or None"
      )

  def packages(self) -> str:
    """Names the packages and versions of the demo set; "" for others."""
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

  What lies under a URL, "beir:gs://bucket/scifact", is downloaded.

  >>> open("beir:scifact").kind
  'beir'

  Args:
    text: the form of a kind, e.g. "beir:DIR" or "tfds:NAME@QRELS": a set that
      TFDS has prepared, and the folder of its judgements.
    setting: its name, for the message.
    kinds: those that will do; None: all.
    seed: of splits, where the source has none of its own.
    fields: of a line, for jsonl and log.
    strict: whether judgements of unknown ids are refused, not counted.
    divide: whether logs without splits are divided.

  Raises:
    ValueError: if it is of no such kind.
  """
  kind, place = _named(text, setting, kinds)
  place = "@".join(map(stores.local, place.split("@")))
  return Source(kind, place, seed, fields or jsonl.Fields(), strict, divide)


def check(
  text: str,
  setting: str = "source",
  *,
  kinds: Iterable[str] | None = None,
  fields: jsonl.Fields | None = None,
) -> None:
  """Refuses a source that cannot be one; reads headers, and downloads nothing.

  Args:
    text: as in `open`; what lies under a URL is taken to be there.
    setting: its name, for the message.
    kinds: those that will do; None: all.
    fields: of a line, for jsonl and log.

  Raises:
    ValueError: if it is of no such kind, or its files or columns are not there.
  """
  kind, place = _named(text, setting, kinds)
  if not is_remote(text):
    KINDS[kind].check(Source(kind, place, fields=fields or jsonl.Fields()))


def kind_of(text: str) -> Kind:
  """Returns the kind of a source that a stored result names.

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
  """Says whether some of a source lies under a URL.

  >>> is_remote("beir:gs://bucket/fiqa"), is_remote("log:a.csv@b.jsonl")
  (True, False)
  """
  return any(map(object_store.is_url, text.partition(":")[2].split("@")))


def _named(
  text: str, setting: str, kinds: Iterable[str] | None
) -> tuple[str, str]:
  """Returns kind and place of a source, or says which kinds there are."""
  kind, _, place = text.partition(":")
  known = {name: KINDS[name] for name in kinds or KINDS}
  if kind not in known or not known[kind].fits(place):
    *forms, last = (each.form for each in known.values())
    raise ValueError(
      f"{setting} must be {', '.join(forms)} or {last}, got source={text!r}"
    )
  return kind, place


def _of_files(source: Source, place: str | None = None) -> str:
  """Digests a file, or all files of a folder by their names below it."""
  root = pathlib.Path(source.place if place is None else place)
  paths = [root] if root.is_file() else file_lists.below(root)
  state = hashlib.sha256()
  for path in paths:
    state.update(path.relative_to(root).as_posix().encode() + b"\0")
    with path.open("rb") as stream:
      state.update(hashlib.file_digest(stream, "sha256").digest())
  return state.hexdigest()


def _parts(source: Source) -> tuple[str, str]:
  """Returns what stands before and behind the "@" of a place.

  A set that TFDS prepared, and its judgements' folder; a log, and its corpus.
  Where the form has no "@", one is part of a name.
  """
  if "@" not in KINDS[source.kind].form:
    return source.place, ""
  first, _, second = source.place.partition("@")
  return first, second


def _reading(
  read: Callable[..., collection.Collection], **options: Any
) -> Callable[[Source], collection.Collection]:
  """Returns what reads a source by its place, and counts unknown ids."""
  return lambda source: read(source.place, dangling=source.dangling, **options)


def _beir_queries(source: Source) -> Iterator[tuple[str, str]]:
  return query_pairs.query_log(files.find(source.place, "queries.jsonl"))


def _msmarco_queries(source: Source) -> Iterator[tuple[str, str]]:
  for split in files.splits(source.place, "queries."):
    path = files.find(source.place, f"queries.{split}.tsv")
    yield from query_pairs.query_log(path, "text")


def _log_queries(source: Source) -> Iterator[tuple[str, str]]:
  return jsonl.queries(_parts(source)[0], source.fields)


def _lines(name: str) -> Callable[[Source], int]:
  """Returns what counts the lines of a file in a source's folder."""
  return lambda source: files.most_lines(files.find(source.place, name))


def _check_files(
  *names: str, judged: str, under: str = ""
) -> Callable[[Source], None]:
  """Returns what refuses a folder without these files and judgements."""

  def check_folder(source: Source) -> None:
    for name in names:
      files.find(source.place, name)
    files.splits(pathlib.Path(source.place, under), judged)

  return check_folder


def _check_tables(source: Source) -> None:
  log, corpus = _parts(source)
  for path in filter(None, (log, corpus)):
    table_files.check(path)
  jsonl.check_columns(log, source.fields, has_corpus=bool(corpus))


def _check_stories(source: Source) -> None:
  path, lists = map(pathlib.Path, _parts(source))
  if not path.is_file():
    raise ValueError(
      f"expected a file, got {path}: no such file; check the path"
    )
  if not lists.is_dir():  # "" is the folder that we are in
    raise ValueError(
      f"expected a directory, got {lists}: no such directory; check the path"
    )


def _beside_a_corpus(form: str, read: Callable[..., Any]) -> Kind:
  """Returns the kind of folders whose documents are one table, `corpus`."""

  def corpus(source: Source) -> pathlib.Path:
    return pathlib.Path(source.place, "corpus")

  return Kind(
    form=form,
    read=_reading(read),
    digest=_of_files,
    most=lambda source: table_files.most_rows(corpus(source)),
    check=lambda source: table_files.check(corpus(source)),
    from_pairs=False,
  )


def _check_tasks(source: Source) -> None:
  for place in filter(None, _parts(source)):
    task_records.check(place)


def _digest_tasks(source: Source) -> str:
  return " ".join(
    task_records.digest(place) or _of_files(source, place)
    for place in filter(None, _parts(source))
  )


def _digest_prepared(source: Source) -> str:
  name, qrels = _parts(source)
  return f"{name} {_of_files(source, qrels)}"


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
    read=_reading(beir.read_beir, in_memory=False),
    digest=_of_files,
    most=_lines("corpus.jsonl"),
    check=_check_files(
      "corpus.jsonl", "queries.jsonl", judged="", under="qrels"
    ),
    from_pairs=False,
    queries=_beir_queries,
  ),
  "msmarco": Kind(
    form="msmarco:DIR",
    read=_reading(msmarco.read_msmarco, in_memory=False),
    digest=_of_files,
    most=_lines("collection.tsv"),
    check=_check_files("collection.tsv", judged="qrels."),
    from_pairs=False,
    queries=_msmarco_queries,
  ),
  "anserini": _beside_a_corpus("anserini:DIR", msmarco.read_anserini),
  "hf": _beside_a_corpus("hf:DIR", beir.read_hub),
  "log": Kind(
    form="log:FILE@CORPUS",
    read=lambda source: jsonl.read_log(
      *_parts(source),
      source.fields,
      fractions=source.fractions,
      seed=source.seed,
      dangling=source.dangling,
    ),
    digest=lambda source: " ".join(
      _of_files(source, place) for place in _parts(source)
    ),
    most=lambda source: table_files.most_rows(_parts(source)[1]),
    check=_check_tables,
    from_pairs=False,
    named_by_text=True,
    queries=_log_queries,
  ),
  "jsonl": Kind(
    form="jsonl:FILE",
    read=lambda source: jsonl.read_jsonl(
      source.place,
      source.fields,
      fractions=source.fractions,
      seed=source.seed,
    ),
    digest=_of_files,
    most=lambda source: table_files.most_rows(source.place),
    check=_check_tables,
    from_pairs=True,
    named_by_text=True,
    queries=_log_queries,
  ),
  "newsqa": Kind(
    form="newsqa:FILE[@LISTS]",
    read=lambda source: newsqa.as_collection(newsqa.from_place(source.place)),
    digest=lambda source: " ".join(
      _of_files(source, part) for part in source.place.split("@")
    ),
    check=_check_stories,
    from_pairs=True,
  ),
  "ir_datasets": Kind(
    form="ir_datasets:ID",
    read=_reading(ir_datasets_sets.read),
    digest=lambda source: source.place,  # the package checks its downloads
    most=lambda source: ir_datasets_sets.num_documents(source.place),
    check=lambda source: ir_datasets_sets.num_documents(source.place),
    from_pairs=False,
    queries=lambda source: ir_datasets_sets.queries(source.place),
  ),
  "tfds": Kind(
    form="tfds:NAME@QRELS",
    read=lambda source: beir_sets.read(
      *_parts(source), dangling=source.dangling
    ),
    digest=_digest_prepared,
    check=lambda source: files.splits(_parts(source)[1]),
    from_pairs=False,
  ),
  "seqio": Kind(
    form="seqio:TASK[@CORPUS]",
    read=lambda source: task_records.read(
      *_parts(source), source.fields, dangling=source.dangling
    ),
    digest=_digest_tasks,
    check=_check_tasks,
    from_pairs=False,
  ),
  "seqio_pairs": Kind(
    form="seqio_pairs:TASK",
    read=lambda source: task_records.read_pairs(
      source.place,
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
"""The kinds of sources, by the word that settings begin with."""

OF_LINES = ("jsonl", "log", "seqio_pairs")
"""The kinds whose fields have names that settings choose."""

OF_USERS = ("beir", "hf", "seqio", *OF_LINES)
"""The kinds whose queries may name who asked, each query by itself."""
