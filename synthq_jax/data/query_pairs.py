"""Reads queries and pairs of queries that people labelled from files."""

import collections
import dataclasses
import functools
import itertools
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from synthq_jax.data import files, ids, quoting, table_files

__all__ = [
  "LabelledPair",
  "is_header",
  "labelled_pairs",
  "query_log",
  "variants",
  "verified",
]

Path = str | os.PathLike

_OTHER = "Different Topic"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelledPair:
  """A query and a topic, and what a person said of them.

  Attributes:
    query_id: the query's id.
    query: the query's text.
    topic: the topic's number.
    variant: a query that a person wrote after reading the topic.
    different_topic: whether a label says that the query has another topic; other
      labels do not matter then.
  """

  query_id: str
  query: str
  topic: str
  variant: str
  different_topic: bool


def labelled_pairs(path: Path) -> tuple[LabelledPair, ...]:
  """Reads labelled pairs in the layout of the annotations of SPIRE 2022.

  Args:
    path: JSONL with "query-id", "query", "topic", "variant" and "other_label", an
      empty list or ["Different Topic"]; other keys are not read.

  Returns:
    The pairs, in the order of the file.

  Raises:
    ValueError: if a line lacks a key or has an unknown label (the message says
      file:line).
  """
  return tuple(
    _parse_pair(where, line) for where, line in files.json_lines(path)
  )


def _parse_pair(where: str, line: Mapping[str, Any]) -> LabelledPair:
  labels = files.field(where, line, "other_label", list)
  if any(label != _OTHER for label in labels):
    raise ValueError(
      f'{where}: expected labels of {[_OTHER]} under "other_label", got another'
      " one; correct it"
    )
  return LabelledPair(
    query_id=ids.get_field(where, line, "query-id", "query"),
    query=files.field(where, line, "query", str),
    topic=str(files.field(where, line, "topic", (int, str))),
    variant=files.field(where, line, "variant", str),
    different_topic=bool(labels),
  )


def query_log(path: Path, quotes: str = "auto") -> Iterator[tuple[str, str]]:
  """Yields the queries of a log, which may be larger than memory.

  Tab-separated files without a header have the columns of MS MARCO (id, query) or
  ORCAS (id, query, document, address). ORCAS has a line for each click: a line that
  repeats id and text of the line before is skipped. `is_header` recognises a
  header, and the columns that it names "query" or "text" and "id", "query_id" or
  "user" are read, wherever they stand. `quoting.is_quoted` decides whether cells
  are quoted. JSON lines (`table_files.is_json`) are objects with such keys; .csv,
  .parquet and .arrow tables have such columns.

  Args:
    path: the file, plain or compressed.
    quotes: as in `quoting.is_quoted`.

  Yields:
    The id and text of each query.

  Raises:
    ValueError: if a line has no id or no text (the message says file:line), the
      columns of ids and queries are unclear, or the first lines look like a run,
      judgements or triples.
  """
  if os.path.isdir(path):
    raise ValueError(
      f"{path}: expected a file, got a folder: name a file in it, or its kind, as"
      f" in beir:{path}"
    )
  if table_files.is_json(path):
    rows = _read_objects(files.json_lines(path))
  elif _is_named(path):
    rows = _read_objects(table_files.rows(path))
  else:
    rows = _read_table(path, quotes)
  before = None
  for query in _refuse_empty(rows):
    if query != before:
      yield query
    before = query


def _refuse_empty(
  rows: Iterator[tuple[str, str, str]],
) -> Iterator[tuple[str, str]]:
  for where, name, text in rows:
    if not name or not text.strip():
      raise ValueError(
        f"{where}: expected an id and a query, got an empty one; fill it or"
        " remove the line"
      )
    if "\n" in name or "\r" in name:
      raise ValueError(
        f"{where}: expected an id of one line, got a line break in it; give the"
        " query another"
      )
    ids.add_count("query", ids.GARBLED, int(ids.is_garbled(text)))
    yield name, text


def variants(path: Path) -> Iterator[tuple[str, str]]:
  """Yields queries that people wrote after reading a topic.

  Args:
    path: a line for each query: id of the topic, tab, query; or JSONL with "topic"
      and "variant", as in labelled pairs. A topic may have several.

  Yields:
    The topic's id and the query.

  Raises:
    ValueError: if a line has no id or no text (the message says file:line).
  """
  if not table_files.is_json(path):
    yield from _refuse_empty(_read_table(path))
    return
  yield from _refuse_empty(
    (
      where,
      ids.get_field(where, line, "topic", "topic"),
      files.field(where, line, "variant"),
    )
    for where, line in files.json_lines(path)
  )


def verified(path: Path) -> Iterator[tuple[str, str]]:
  """Yields the ids of pairs that people judged near-duplicates, each pair once.

  Args:
    path: labelled pairs (JSONL, see `labelled_pairs`), without those on another
      topic; or a line for each pair: id of the topic, tab, id of the query.

  Yields:
    The topic's id and the query's id.

  Raises:
    ValueError: if a line is malformed (the message says file:line).
  """
  yield from dict.fromkeys(_read_verified(path))


def _read_verified(path: Path) -> Iterator[tuple[str, str]]:
  if not table_files.is_json(path):
    for number, (where, row) in enumerate(files.table(path, columns=2)):
      if number or not is_header(row):
        topic, query = row
        yield ids.read(topic, "topic", where), ids.read(query, "query", where)
    return
  for pair in labelled_pairs(path):
    if not pair.different_topic:
      yield pair.topic, pair.query_id


def _is_named(path: Path) -> bool:
  """Returns True if a table's columns are found by their names alone."""
  name = pathlib.PurePath(files.remove_suffix(pathlib.Path(path).name))
  if name.suffix.lower() != ".csv":
    return name.suffix.lower() in (".parquet", ".arrow")
  return not any(
    "\t" in line for _, line in itertools.islice(files.lines(path), 1)
  )


_HEADERS = ("id", "queryid", "qid", "anonid")
"""Names of a column of ids that no id has."""
_USERS = tuple("userid user sessionid session clientid client searchid".split())
"""Names of a column that serves as the ids of queries."""
_IDS = tuple(
  "topicid topic number num docid pid passageid documentid corpusid".split()
)
"""Names of columns of other ids."""
_INDICES = ("", "index", "unnamed0")
"""Names of the first column if pandas wrote the index of its table."""
_QUERIES = tuple(
  "query querytext searchquery question searchterm text keywords".split()
)
"""Names of a column of queries, the surest first."""
_TEXTS = (
  *_QUERIES,
  *"queryid title variant passage contents document body".split(),
)
"""Names of columns of texts; with a name of an id, a line is a header."""


def is_header(cells: Sequence[str]) -> bool:
  """Returns True if the first cells of a table are names of its columns.

  Letter case and punctuation do not count: "Query ID" equals "query-id".

  >>> is_header(["AnonID", "Query"]), is_header(["user", "boat"])
  (True, False)
  >>> is_header(["time", "user", "query"]), is_header(["query", "document"])
  (True, True)

  Args:
    cells: the cells of the first line.
  """
  names = [*map(table_files.simplify, cells)]
  if names[0] in _HEADERS:
    return True
  if names[0] in _QUERIES and len({*names}) > 1:
    return True
  has_id = not {*names}.isdisjoint((*_HEADERS, *_USERS, *_IDS))
  has_id |= names[0] in _INDICES
  return has_id and not {*names}.isdisjoint(_TEXTS)


@functools.lru_cache(64)
def _find_columns(cells: tuple[str, ...]) -> tuple[int | None, int | None]:
  """Returns the positions of ids and of queries that names of columns tell."""
  names = [*map(table_files.simplify, cells)]
  id_, query = (
    next((names.index(each) for each in accepted if each in names), None)
    for accepted in ((*_HEADERS, *_USERS), _QUERIES)
  )
  return (cells.index("_id") if "_id" in cells else id_), query


def _read_header(where: str, cells: Sequence[str]) -> tuple[int, int]:
  """Returns the columns of ids and of queries; by default the first and second."""
  id_, query = _find_columns(tuple(cells))
  if query is None and (
    len(cells) == 2 or table_files.simplify(cells[1]) in _TEXTS
  ):
    query = 1
  if id_ is None and query:
    id_ = 0
  if id_ is None or query is None:
    raise _explain_lack(where, id_, query)
  return id_, query


def _explain_lack(where: str, id_: Any, query: Any) -> ValueError:
  lacking = "query" if query is None else "id"
  return ValueError(
    f'{where}: expected columns "id" and "query", or the like, got none for the'
    f" {lacking}: rename or add it; a log of queries and documents without ids is"
    " read as log:FILE@CORPUS"
  )


def _read_table(
  path: Path, quotes: str = "auto"
) -> Iterator[tuple[str, str, str]]:
  rows = quoting.rows(path, quotes)
  first = next(rows, None)
  if first is None:
    return
  columns, is_named = (0, 1), len(first[1]) > 1 and is_header(first[1])
  _check_cells(*first, columns)
  if is_named:
    columns = _read_header(*first)
  else:
    rows = itertools.chain([first], rows)
  rows = _refuse_misplaced(path, rows, columns, is_named)
  # Where a line has two cells, one of more may be a query with a tab.
  width, widths = len(first[1]) if is_named else 2, set[bool]()
  for where, row in rows:
    _check_cells(where, row, columns)
    is_wide = any(map(str.strip, row[width:]))
    if len(row) == width or is_wide:
      widths.add(is_wide)
    if is_wide if is_named else len(widths) > 1:
      raise ValueError(
        f"{where}: expected as many cells as above, got {len(row)}: write a tab"
        " inside a query as a space, or name all columns in a header"
      )
    name, text = (row[column] for column in columns)
    yield where, ids.read(name, "query", where), text


def _check_cells(
  where: str, row: Sequence[str], columns: tuple[int, int]
) -> None:
  """Refuses lines with too few cells, and files whose lines end otherwise."""
  if len(row) <= max(columns):
    lacking = "a line without a tab" if len(row) == 1 else "too few cells"
    remedy = "separate them"
    if row[0].lstrip()[:1] in ("<", "{", "["):
      lacking = "markup or JSON"
      remedy = "name JSON lines .jsonl, and write topics of TREC as JSON lines"
    raise ValueError(
      f"{where}: expected an id, a tab and a query, got {lacking}; {remedy}"
    )
  text = "".join(row)
  if "\r" in text and "\r" in text.replace("\r\n", ""):
    raise ValueError(
      f"{where}: expected lines that end with a line feed, got carriage returns"
      " alone; convert the file (tr '\\r' '\\n')"
    )


_LOOKED_AT = 64
"""Number of first lines that `_refuse_misplaced` reads."""


def _refuse_misplaced(
  path: Path,
  rows: Iterator[tuple[str, list[str]]],
  columns: tuple[int, int],
  is_named: bool,
) -> Iterator[tuple[str, list[str]]]:
  """Refuses a table whose column of queries holds none, by its first 64 lines.

  Of users, ids or a run a leakage check would report "clean". A table of three
  lines and more is refused if its first eight ids have several words or their
  queries are numbers or times. Without a header it is also refused if all queries
  are one word of ASCII, and either half of the cells of a later column have several
  words, or all are addresses or numbers behind the same letters.
  """
  first = [*itertools.islice(rows, _LOOKED_AT)]
  cells = [row for _, row in first if len(row) > max(columns)]
  pairs = [[row[column].strip() for column in columns] for row in cells]
  if len(cells) >= 3 and (
    all(_is_doubtful(*pair) for pair in pairs[:8])
    or (not is_named and _are_labels(cells))
  ):
    raise ValueError(
      f"{path}: expected an id and a query a line, got numbers, times, single words"
      " or addresses as all queries, or several words as all ids; give the columns"
      ' in this order, or a header that names them "id" and "query"'
    )
  return itertools.chain(first, rows)


def _is_doubtful(id_: str, query: str) -> bool:
  """Returns True for a query that is a number or a time, or an id of words."""
  words = re.findall(r"[^\W\d_]+", id_) if " " in id_ else []
  return len(words) > 1 or bool(re.fullmatch(r"Q0|-?\d[\d.:/TZ -]*", query))


def _are_labels(rows: Sequence[Sequence[str]]) -> bool:
  """Returns True if the second cells are single words that describe others."""
  kinds = set()
  for text in (row[1].strip() for row in rows):
    if not re.fullmatch(r"[!-~]+", text):
      return False
    numbered = re.fullmatch(r"([A-Za-z]+[-_:]?)\d+|(https?://)\S+", text)
    kinds.add(numbered[1] or numbered[2] if numbered else "other")
  columns = collections.Counter(
    i for row in rows for i, cell in enumerate(row) if i > 1 and _is_text(cell)
  )
  is_beside_texts = 2 * max(columns.values(), default=0) >= len(rows)
  return is_beside_texts or (len(kinds) == 1 and kinds != {"other"})


def _is_text(cell: str) -> bool:
  """Returns True for a cell of several words, or of letters beyond ASCII."""
  several = " " in cell and len(re.findall(r"[^\W\d_]+", cell)) > 1
  return several or not cell.isascii()


def _read_objects(
  rows: Iterator[tuple[str, dict[str, Any]]],
) -> Iterator[tuple[str, str, str]]:
  for where, line in rows:
    keys = [key for key, value in line.items() if value is not None]
    id_, query = _find_columns(tuple(keys))
    if id_ is None or query is None:
      raise _explain_lack(where, id_, query)
    if line.get("text") is not None and line.get("query") is not None:
      raise ValueError(
        f'{where}: expected the query under "text" or "query", got both: leave one'
        " out, or rename it"
      )
    name = ids.get_field(where, line, keys[id_], "query")
    yield where, name, files.field(where, line, keys[query])
