"""Reads click logs: a table of text pairs, or a table of clicks and a corpus.

Tables are JSONL, CSV, TSV, parquet or Arrow (`table_files`).
"""

import dataclasses
import hashlib
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from synthq_jax.data import beir, files, ids, quoting, table_files
from synthq_jax.data import collection as collection_lib
from synthq_jax.data import splits as splits_lib

__all__ = [
  "Fields",
  "check_columns",
  "check_corpus_columns",
  "queries",
  "read_jsonl",
  "read_log",
]

_QUERIES = (
  *("q", "querytext", "searchquery", "searchterm", "searchterms", "searchtext"),
  *("keyword", "keywords", "search", "term", "terms", "question", "text"),
)
"""Usual names of a column of queries, in lower case without punctuation."""
_TEXTS = (
  *("doc", "doctext", "documenttext", "passage", "passagetext", "content"),
  *("contents", "body", "answer", "text"),
)
"""Usual names of a column of documents' texts."""
_IDS = (
  *("docid", "documentid", "corpusid", "doc", "pid", "passageid", "itemid"),
  *("productid", "asin", "clickedid", "clickeddoc", "clicked", "url", "id"),
)
"""Usual names of a column of documents' ids."""
_COUNT = "(n|nb|num|number|of|total|sum|count|cnt|is|has|was)*"
_CLICKS = f"{_COUNT}click(s|ed)?{_COUNT}"
"""Usual names of a column that says how often a document was clicked."""
_LABELS = r"\w*(label|relevan(ce|t)|judge?ment|duplicate)(score)?|grade|score"
"""Usual names of a column that judges pairs; 0 says that a document is no answer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fields:
  """The names of the keys of a line.

  Three optional keys have fixed names. "title" is the document's title. "clicks" is
  the number of clicks on the document: all lines have it or none, and a line with 0
  is left out. "split" is the line's split: all lines have it or none, and a log
  with it is never divided.

  A line whose query or document is a word for nothing (`ids.is_null`) is left out,
  by that line alone.

  Attributes:
    query: the key of the query's text.
    document: the key of the document's text, or of its id if there is a corpus.
    client: the key of the user's id. By default "user" and "user_id" count, too. A
      line may have none of them, and must not have two that differ.
    quotes: the meaning of quotation marks in tab-separated tables: "csv" (they
      quote cells, as in csv.writer), "text", or "auto" (`quoting.is_quoted`).
    needs_user: whether each line must name its user, as UNIT='user' wants.
  """

  query: str = "query"
  document: str = "document"
  client: str = "client"
  quotes: str = "auto"
  needs_user: bool = False

  def __post_init__(self):
    quoting.check(self.quotes)

  @property
  def users(self) -> tuple[str, ...]:
    """Keys that may name the user: one that is chosen, else the usual ones."""
    chosen = self.client != "client"
    return (self.client,) if chosen else ("client", "user", "user_id")


def read_jsonl(
  path: str | os.PathLike,
  fields: Fields = Fields(),  # noqa: B008  (frozen)
  *,
  fractions: Mapping[str, float] = splits_lib.FRACTIONS,
  seed: int = 0,
  rows: Iterable[tuple[str, dict[str, Any]]] | None = None,
  splits: Iterable[str] = (),
) -> collection_lib.Collection:
  """Reads (query text, document text) pairs; splits them by document if needed.

  Ids are digests of the content. Documents with equal title and text are one
  document. Queries with equal client and text are one query, with one or several
  relevant documents. A document has a client if all its lines agree on it. Lines,
  or the files of a folder, may name their splits, as in `read_log`. If they do not,
  no document and no set of query words is on two sides
  (`splits.split_by_own_document`): judgements that would put words on a second
  side are left out.

  Formal guarantee:
    Ids, titles, texts and order of the documents are a function of the set of
    documents alone. If lines name no split, whether a query is in the first
    split, and with which of its documents, is a function of the query's own
    lines, `fractions` and `seed`. Take two logs with the same set of documents
    that differ in one query (all lines of one text and client). Their documents
    are equal, apart from `client`, and the queries of the first split differ in
    that one at most. The other splits may differ in more: they are private.

  Args:
    path: a table, of any kind that `table_files.rows` reads.
    fields: the names of the keys.
    fractions: split name -> share of the documents, in expectation; the first
      split is for training.
    seed: another seed gives other splits.
    rows: rows in the form of `table_files.rows`, to use instead of the file; then
      `path` is a name for messages.
    splits: the splits that such rows may name.

  Returns:
    The collection; documents in the order of their ids, queries in the order of
    the log, every grade is 1.

  Raises:
    ValueError: if a line is malformed or a text is empty (the message says
      file:line), if a split would hold no pair, or if only some lines name a
      split.
  """
  if rows is None:
    check_columns(path, fields, has_corpus=False)
    rows = _read_rows(path, fields, has_corpus=False)
    splits = table_files.find_log_splits(path)
  names = _SplitNames(path, splits)
  pairs = []
  for where, line in rows:
    _check_keys(where, line, fields, has_corpus=False)
    name = names.read(where, line)
    if _is_clicked(where, line):
      query = _parse_query(where, line, fields)
      document = _parse_document(where, line, fields, query.client)
      if not _is_null(query.text, document.text):
        pairs.append((query, document, name))
  asked = [(query, document.id, name) for query, document, name in pairs]
  _check_asked(names, asked, 'lines with "clicks" above 0')
  documents = _merge_documents(document for _, document, _ in pairs)
  return _make_collection(documents, names, asked, fractions, seed)


def read_log(
  path: str | os.PathLike,
  corpus: str | os.PathLike,
  fields: Fields = Fields(),  # noqa: B008  (frozen)
  *,
  fractions: Mapping[str, float] = splits_lib.FRACTIONS,
  seed: int = 0,
  dangling: collection_lib.Dangling | None = None,
) -> collection_lib.Collection:
  """Reads a log of queries and ids of clicked documents, and their corpus.

  Lines with equal query text and user are one query; its id is a digest of both.
  Lines belong to the split that they name. If they name none, no document and no
  set of query words is on two sides, as in `read_jsonl`.

  Formal guarantee:
    The documents are those of the corpus, whatever the log holds. If lines name
    no split, whether a query is in the first split, and with which of its
    documents, is a function of the query's own lines, of the corpus' ids, of
    `fractions` and `seed`. So one query more or less changes no other record of
    the first split. If lines name splits, each query is in the splits that its
    own lines name, and no rule divides them (`splits.where_none`).

  Args:
    path: the log, of any kind that `table_files.rows` reads; the key
      `fields.document` holds the id of a document.
    corpus: the documents, of any such kind, or a BEIR corpus.jsonl: _id or id,
      text or contents, and possibly title.
    fields: the names of the log's keys.
    fractions: split name -> share of the documents, in expectation; the first
      split is for training.
    seed: another seed gives other splits.
    dangling: counts lines of unknown documents, which are left out; None: they
      are refused.

  Returns:
    The collection; documents stay on disk, every grade is 1.

  Raises:
    ValueError: as in `read_jsonl`.
  """
  check_columns(path, fields, has_corpus=True)
  documents, document_ids = collection_lib.read_documents(
    corpus, lambda: _read_documents(corpus, fields.quotes)
  )
  names = _SplitNames(path, table_files.find_log_splits(path))
  asked = []
  for where, line in _read_rows(path, fields, has_corpus=True):
    id_ = _get_clicked_id(where, line, fields)
    name = names.read(where, line)
    if _is_clicked(where, line) and collection_lib.is_known(
      where, "document", id_, document_ids, dangling
    ):
      query = _parse_query(where, line, fields)
      if not _is_null(query.text):
        asked.append((query, id_, name))
  clicks = f'clicks on "{fields.document}" ids that {corpus} has'
  if ids.is_counted("document", ids.OTHER_FORM):
    clicks += " (it has some in other letter case or with other leading zeros)"
  if ids.is_counted("query", ids.LEFT_OUT):
    clicks += ", and queries other than NULL or nan"
  _check_asked(names, asked, clicks)
  return _make_collection(documents, names, asked, fractions, seed)


def queries(
  path: str | os.PathLike,
  fields: Fields = Fields(),  # noqa: B008  (frozen)
) -> Iterator[tuple[str, str]]:
  """Yields the id and text of each line's query, even without a click.

  Splits and documents are ignored; so is a word for nothing, as in `read_log`.

  Args:
    path: the log, of any kind that `table_files.rows` reads.
    fields: the names of the log's keys.

  Raises:
    ValueError: if a line is malformed or has no text (the message says
      file:line).
  """
  for where, line in table_files.rows(path, fields.quotes):
    query = _parse_query(where, line, fields)
    if not _is_null(query.text):
      yield query.id, query.text


def check_columns(
  path: str | os.PathLike, fields: Fields, *, has_corpus: bool
) -> None:
  """Refuses a log whose header lacks a column that `fields` names or needs.

  Only the header is read, or the first line of JSONL.

  Args:
    path: the log, of any kind that `table_files.rows` reads.
    fields: the names of the log's keys.
    has_corpus: whether the log holds ids of the documents of a corpus.

  Raises:
    ValueError: naming the log's columns and the flags to give.
  """
  where, names = table_files.columns(path)
  if not names:
    return
  _check_keys(where, names, fields, has_corpus)
  _check_other_names(where, names, fields, has_corpus)
  # A line of JSON may lack its user where users are not the unit.
  file = where.rpartition(":")[0]
  is_chosen = len(fields.users) == 1 and not table_files.is_json(file)
  if fields.needs_user or is_chosen:
    if set(fields.users) & set(names):
      return
    keys = " or ".join(f'"{key}"' for key in fields.users)
    raise ValueError(
      f"{where}: expected the user of each query under {keys}, got no such column:"
      " add one, or give --gin.prepare_data.Config.user_field=NAME"
    )


def check_corpus_columns(corpus: str | os.PathLike) -> None:
  """Refuses a corpus whose header lacks a column that documents need.

  Only the header is read, or the first line of JSONL.

  Raises:
    ValueError: naming the corpus' columns.
  """
  where, names = table_files.columns(corpus)
  if names:
    _check_corpus_names(where, names)


def _check_corpus_names(where: str, names: Collection[str]) -> None:
  _check_other_name(where, names, ("title",), "title")
  lacking = [
    f'"{key}" (or "{other}")'
    for key, other in (("_id", "id"), ("text", "contents"))
    if not {key, other} & set(names)
  ]
  if lacking:  # without a header, these are cells, which may be of people
    shown = ", ".join([*names][:12])
    shown = shown if _are_names(names) else f"{len(names)} others"
    raise ValueError(
      f"{where}: expected a key {' and '.join(lacking)}, got {shown}:"
      f" {_advise(names) or 'rename the columns, or add the header'}"
    )


def _advise(names: Collection[str]) -> str:
  """Names the remedy for an export whose columns stand elsewhere."""
  if "_source" in names:
    return "write hits of Elasticsearch by jq -c '{_id} + ._source'"
  if len(names) == 1 and next(iter(names)).startswith("#"):
    return "remove the lines above the header"
  return ""


def _read_rows(
  path: str | os.PathLike, fields: Fields, *, has_corpus: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
  """Reads a log; writers of JSON may leave out keys in its first lines."""
  seen = set()
  for where, line in table_files.rows(path, fields.quotes):
    if line.keys() - seen:
      _check_other_names(where, line, fields, has_corpus)
      seen |= line.keys()
    yield where, line


def _check_other_names(
  where: str, names: Collection[str], fields: Fields, has_corpus: bool
) -> None:
  """Refuses optional columns under a name by which they would not be read."""
  users = "|".join(re.escape(table_files.simplify(x)) for x in fields.users)
  rest = [name for name in names if name not in (fields.query, fields.document)]
  for keys, usual, flag in (
    (("clicks",), f"{_CLICKS}|{_LABELS}", ""),
    (("split",), "split", ""),
    (("title",), "" if has_corpus else "title", ""),  # a corpus has its own
    (fields.users, users, ", give --gin.prepare_data.Config.user_field=NAME"),
  ):
    _check_other_name(where, rest, keys, usual, flag)


def _check_other_name(
  where: str,
  names: Collection[str],
  keys: Collection[str],
  usual: str,
  flag: str = "",
) -> None:
  """Refuses a name that is none of the keys, and matches the pattern `usual`."""
  plain = ((name, table_files.simplify(name)) for name in names)
  others = [name for name, text in plain if text and re.fullmatch(usual, text)]
  if others and not set(keys) & set(names):
    [key, *_] = keys
    raise ValueError(
      f'{where}: expected "{key}", got "{others[0]}", which is not read: call the'
      f' column "{key}"{flag}, or use another name if it is no such column'
    )


def _check_keys(
  where: str, names: Collection[str], fields: Fields, has_corpus: bool
) -> None:
  """Refuses a line without the keys that `fields` names."""
  expected = (
    ("QUERY_FIELD", fields.query, _QUERIES),
    ("DOCUMENT_FIELD", fields.document, _IDS if has_corpus else _TEXTS),
  )
  missing = [each for each in expected if each[1] not in names]
  if not missing:
    return
  plain = {table_files.simplify(name): name for name in names}
  chosen = [key for _, key, _ in expected if key in names]
  flags = []
  for flag, _, usual in missing:
    likely = [plain[name] for name in usual if name in plain]
    rest = [name for name in names if name not in chosen]
    if len(rest) == 1:
      likely = rest
    likely = [name for name in likely if name in rest and _are_names(names)]
    chosen += likely[:1]
    flags.append(f"--gin.{flag}={likely[0] if likely else 'NAME'}")
  keys = " and ".join(f'"{key}"' for _, key, _ in missing)
  shown = f"{len(names)} others"
  help_ = "or rename the column"
  if _are_names(names):
    shown += f" ({', '.join(names)})"
  else:  # without a header, the first line of a log is a private record
    help_ = "or add the header, if the file has none"
  remedy = _advise(names) or f"give {' '.join(flags)}, {help_}"
  raise ValueError(
    f"{where}: expected the key{'s'[: len(missing) - 1]} {keys}, got {shown}:"
    f" {remedy}"
  )


def _are_names(names: Iterable[str]) -> bool:
  """Checks that all names are identifiers; few records have such cells."""
  return all(re.fullmatch(r"[A-Za-z_][A-Za-z_.-]{,30}", name) for name in names)


def _get_clicked_id(where: str, line: Mapping[str, Any], fields: Fields) -> str:
  """Returns the id of a clicked document; "" for an empty cell or null."""
  _check_keys(where, line, fields, has_corpus=True)
  return ids.get_field(where, line, fields.document, "document", default="")


class _SplitNames:
  """Collects the splits that a log's lines name, also lines without clicks."""

  def __init__(self, path: str | os.PathLike, files_: Iterable[str]):
    self.path = path
    self.files = frozenset(files_)
    self.every: list[str | None] = []
    self.have_clicks: set[bool] = set()

  def read(self, where: str, line: Mapping[str, Any]) -> str:
    """Returns and collects the split of a line; "" if it names none."""
    name = files.field(where, line, "split", default="")
    is_part = isinstance(name, table_files.FileSplit) and name not in self.files
    name = "" if is_part else name
    self.every.append(name if "split" in line and not is_part else None)
    self.have_clicks.add(line.get("clicks") not in (None, ""))
    return name


def _make_collection(
  documents: Any,
  names: _SplitNames,
  asked: list[tuple[collection_lib.Query, str, str]],
  fractions: Mapping[str, float],
  seed: int,
) -> collection_lib.Collection:
  """Makes a collection of (query, document id, split); divides it if needed."""
  path = names.path
  by_column = table_files.has_split_column(path, names.every)
  sides = [name for _, _, name in asked]
  gathered_ids: frozenset[str] = frozenset()
  if by_column:
    qrels: dict[str, collection_lib.Qrels] = {}
  elif any(names.every):
    qrels = {split: {} for split in sorted(names.files)}
  else:
    qrels = {split: {} for split in fractions}
    pairs = [(query.text, id_) for query, id_, _ in asked]
    sides = splits_lib.split_by_own_document(pairs, fractions, seed=seed)
    _check_sides(names, sides, fractions)
    several = splits_lib.mark_several_documents(pairs)
    gathered_ids = frozenset(
      query.id for (query, _, _), is_ in zip(asked, several, strict=True) if is_
    )
  for (query, id_, _), side in zip(asked, sides, strict=True):
    if side is not None:
      qrels.setdefault(side, {}).setdefault(query.id, {})[id_] = 1
  queries = tuple({query.id: query for query, _, _ in asked}.values())
  return collection_lib.Collection(
    documents, queries, qrels, by_column, gathered=gathered_ids
  )


def _read_documents(
  corpus: str | os.PathLike, quotes: str
) -> Iterator[tuple[str, collection_lib.Document]]:
  for number, (where, line) in enumerate(table_files.rows(corpus, quotes)):
    if not number:
      _check_corpus_names(where, line)
    part = line.get("split")
    is_file = isinstance(part, table_files.FileSplit)
    if is_file and part in ("queries", "qrels"):
      raise ValueError(
        f"{where}: expected a corpus of documents alone, which is public, got a"
        f" table of {part} in its folder: give the corpus' own file"
      )
    aliases = {
      key: line[other]
      for key, other in (("_id", "id"), ("text", "contents"))
      if line.get(key) is None and other in line
    }
    yield where, beir.make_document(where, {**line, **aliases})


def _is_clicked(where: str, line: Mapping[str, Any]) -> bool:
  """Returns True if a line has clicks above 0, or does not state its clicks."""
  value = line.get("clicks")
  if value is None or value == "":
    return True
  try:
    if isinstance(value, str):
      collection_lib.checked_number(value)
    clicks = float(value)
    if not math.isfinite(clicks):
      raise ValueError(value)
    return clicks > 0
  except (TypeError, ValueError):
    raise ValueError(
      f'{where}: expected a number under "clicks", got another value;'
      " correct the line"
    ) from None


def _parse_query(
  where: str, line: Mapping[str, Any], fields: Fields
) -> collection_lib.Query:
  text = _get_text(where, line, fields.query)
  ids.add_count("query", ids.GARBLED, int(ids.is_garbled(text)))
  client = collection_lib.get_owner(
    where,
    (
      ids.get_field(where, line, key, "user", default="")
      for key in fields.users
    ),
  )
  return collection_lib.Query(_make_id("q", client, text), text, client)


def _parse_document(
  where: str, line: Mapping[str, Any], fields: Fields, client: str
) -> collection_lib.Document:
  text = _get_text(where, line, fields.document)
  title = files.field(where, line, "title", default="")
  id_ = _make_id("d", title, text)
  return collection_lib.Document(id_, text, title, client)


def _is_null(query: str, document: str = "") -> bool:
  """Returns True for a pair with a word for nothing, and counts it."""
  texts = (("query", query), ("document", document))
  return any(ids.count_null(kind, text, ids.LEFT_OUT) for kind, text in texts)


def _make_id(kind: str, *parts: str) -> str:
  """Returns an id that is a digest of the content.

  Each part is preceded by its length, so that ("ab", "c") and ("a", "bc") differ.
  """
  text = "".join(f"{len(part)}:{part}" for part in parts)
  return kind + hashlib.sha256(text.encode()).hexdigest()[:16]


def _get_text(where: str, line: Mapping[str, Any], name: str) -> str:
  if name not in line:
    raise ValueError(
      f'{where}: expected the key "{name}", got {len(line)} others; rename the'
      " key, give --gin.QUERY_FIELD=NAME or add the header"
    )
  text = files.field(where, line, name, default="").strip()
  if not text:
    raise ValueError(
      f'{where}: expected text under "{name}", got none; fill it or remove '
      "the line"
    )
  return text


def _merge_documents(
  documents: Iterable[collection_lib.Document],
) -> tuple[collection_lib.Document, ...]:
  """Merges equal documents; the client is "" unless all of them agree on it.

  The documents are in the order of their ids. The order of the lines would be
  published with the documents and reveal the documents of the first queries.
  """
  merged: dict[str, collection_lib.Document] = {}
  for document in documents:
    first = merged.setdefault(document.id, document)
    if first.client != document.client:
      merged[document.id] = dataclasses.replace(first, client="")
  return tuple(merged[name] for name in sorted(merged))


def _check_asked(names: _SplitNames, asked: list[Any], words: str) -> None:
  """Refuses a log without any pair, or with clicks in some lines alone."""
  if not names.every:
    raise ValueError(f"{names.path}: expected lines, got none; fill it")
  if len(names.have_clicks) > 1:
    raise ValueError(
      f'{names.path}: expected "clicks" in all lines or in none, got it in some:'
      " write 0 where nobody clicked, and 1 for a click or a judgement"
    )
  if not asked:
    raise ValueError(
      f"{names.path}: expected {words}, got none in all its lines; give"
      " others, or name other columns"
    )


def _check_sides(
  names: _SplitNames,
  sides: list[str | None],
  fractions: Mapping[str, float],
) -> None:
  """Refuses a log whose division leaves a split empty."""
  empty = [split for split in fractions if split not in sides]
  if empty:
    raise ValueError(
      f"{names.path}: expected pairs in every split, got none in {empty}; give"
      f' more documents, another seed, or a column "split" that names the'
      " split of each line"
    )
