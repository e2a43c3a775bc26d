"""Holds a collection: documents, queries and judgements by split, checked."""

import collections
import dataclasses
import itertools
import re
import sys
from collections.abc import (
  Callable,
  Container,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
from typing import Any

from synthq_jax.data import ids

__all__ = [
  "MOST_GRADE",
  "Collection",
  "Dangling",
  "Document",
  "Qrels",
  "Query",
  "StreamedDocuments",
  "by_id",
  "check_id",
  "check_text",
  "checked_number",
  "is_known",
  "join_splits",
  "judge",
  "lacking",
  "one_owner",
  "read_documents",
]

Qrels = dict[str, dict[str, int]]
"""Judgements: query id -> document id -> grade; above 0 means relevant."""

Dangling = collections.Counter[str]
"""How many judgements name an unknown "query" or "document"."""


MOST_GRADE = 1_000_000
"""trec_eval counts grades one by one, and nDCG overflows beyond 2^31."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
  """A document, public unless a configuration says otherwise.

  Attributes:
    id: a name without white space and control characters.
    text: the body.
    title: a title, or "".
    client: whose document it is where there are clients (federated), or "".
  """

  id: str
  text: str
  title: str = ""
  client: str = ""

  @property
  def contents(self) -> str:
    """Title and body as one string, which models and indexes read.

    >>> Document("d1", "A fruit.", title="Apple").contents
    'Apple A fruit.'
    """
    return f"{self.title} {self.text}".strip()


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
  """A query, private unless a configuration says otherwise.

  Attributes:
    id: a name without white space and control characters.
    text: what was asked.
    client: who asked it where there are clients (federated) or users, or "".
  """

  id: str
  text: str
  client: str = ""


@dataclasses.dataclass(frozen=True)
class StreamedDocuments:
  """Documents that stay on disk and are read again by each loop over them.

  >>> texts = {"d1": "apples", "d2": "pears"}
  >>> documents = StreamedDocuments(
  ...     tuple(texts), lambda: (Document(i, t) for i, t in texts.items())
  ... )
  >>> len(documents), [document.text for document in documents]
  (2, ['apples', 'pears'])

  Attributes:
    ids: of all documents, in their order.
    read: starts to read them.
  """

  ids: Sequence[str] = dataclasses.field(repr=False)
  read: Callable[[], Iterator[Document]] = dataclasses.field(repr=False)

  def __len__(self) -> int:
    return len(self.ids)

  def __iter__(self) -> Iterator[Document]:
    """Reads them, and refuses others than those it was made for."""
    for document, id_ in itertools.zip_longest(self.read(), self.ids):
      if document is None or document.id != id_:
        got = f"{document.id!r} in another place" if document else f"no {id_!r}"
        raise ValueError(
          f"expected the documents of the first reading, got {got}: the file"
          " changed meanwhile; start again"
        )
      yield document


@dataclasses.dataclass(frozen=True)
class Collection:
  """Documents, queries and which document answers which query.

  >>> tiny = Collection(
  ...     documents=(Document("d1", "apples are red"),),
  ...     queries=(Query("q1", "colour of apples"),),
  ...     qrels={"test": {"q1": {"d1": 1}}},
  ... )
  >>> tiny.pairs("test")
  [('q1', 'd1')]

  Attributes:
    documents: with distinct ids, in memory or streamed from their file.
    queries: with distinct ids, of all splits.
    qrels: split -> query id -> document id -> grade, with ids found above.
    split_by_record: whether each record names its split, so that which splits
      there are depends on the records.
    division: names the rule that made the splits, where it looks at one query
      alone, and has no ":"; empty: it looks at others, or nobody knows.
    lacking: judged documents that are not there. Their judgements count when a
      run is scored, as in BEIR and trec_eval, and no pair has them.
    gathered: queries that a rule of splits put on one side where their documents
      were on several; as private as the queries.

  Raises:
    ValueError: if an id is empty, holds white space or a control character,
      stands twice, or is judged without being there or in `lacking`.
  """

  documents: tuple[Document, ...] | StreamedDocuments
  queries: tuple[Query, ...]
  qrels: dict[str, Qrels]
  split_by_record: bool = False
  division: str = ""
  gathered: frozenset[str] = frozenset()
  lacking: frozenset[str] = frozenset()

  def __post_init__(self):
    documents = _distinct("document", self.document_ids())
    queries = _distinct("query", (item.id for item in self.queries))
    for split, qrels in self.qrels.items():
      judged = {id_ for grades in qrels.values() for id_ in grades}
      _known("query", f"qrels[{split!r}]", qrels.keys() - queries)
      _known("document", f"qrels[{split!r}]", judged - documents - self.lacking)

  def document_ids(self) -> Iterable[str]:
    """Returns the ids of the documents, in their order."""
    if isinstance(self.documents, StreamedDocuments):
      return self.documents.ids
    return (document.id for document in self.documents)

  def pairs(self, split: str) -> list[tuple[str, str]]:
    """Returns (query id, document id) of a split where the grade is above 0.

    Documents that the collection lacks are in no pair.

    Args:
      split: a key of `qrels`.

    Returns:
      The pairs, in the order of `qrels`.

    Raises:
      ValueError: if there is no such split.
    """
    return [
      (query, document)
      for query, grades in self.judgements(split).items()
      for document, grade in grades.items()
      if grade > 0 and document not in self.lacking
    ]

  def without_lacking(self, splits: Iterable[str]) -> "Collection":
    """Drops judgements of documents that are not there from some splits.

    A query that is left without any is in the split no more.

    Args:
      splits: keys of `qrels`, such as those that are trained on.

    Returns:
      The collection; other splits keep their judgements.
    """
    if not self.lacking:
      return self
    qrels = dict(self.qrels)
    for split in splits:
      known = {
        query: {d: g for d, g in grades.items() if d not in self.lacking}
        for query, grades in self.judgements(split).items()
      }
      qrels[split] = {
        query: grades for query, grades in known.items() if grades
      }
    return dataclasses.replace(self, qrels=qrels)

  def judgements(self, split: str) -> Qrels:
    """Returns the judgements of a split, or says which splits there are."""
    if split not in self.qrels:
      known = sorted(self.qrels)
      if self.split_by_record:  # a name may be a cell of a private table
        known = "those that its records name"
      raise ValueError(
        f"expected a split of {known}, got split={split!r}; "
        "choose one of these or add its judgements"
      )
    return self.qrels[split]

  def query_by_id(self) -> Mapping[str, Query]:
    """Returns the queries by their id."""
    return {query.id: query for query in self.queries}


def join_splits(data: Collection, name: str) -> Collection:
  """Returns a collection in which some splits are one.

  Args:
    data: the collection.
    name: splits joined by "+", e.g. "dev+test"; a single one changes nothing.

  Returns:
    The same documents and queries; the joined split has the name `name` and the
    judgements of its parts, which are no splits any more.

  Raises:
    ValueError: if there is no split of a part's name.

  >>> one = {"q": {"d": 1}}
  >>> data = Collection((Document("d", "x"),), (Query("q", "y"),), {"a": one})
  >>> join_splits(data, "a").qrels == data.qrels
  True
  """
  parts = name.split("+")
  if len(parts) == 1:
    return data
  joined: Qrels = {}
  for part in parts:
    for query, grades in data.judgements(part).items():
      joined[query] = joined.get(query, {}) | grades
  rest = {k: v for k, v in data.qrels.items() if k not in parts}
  return dataclasses.replace(data, qrels={**rest, name: joined})


def check_id(kind: str, value: str, where: str = "") -> str:
  """Returns an id that run files can hold, or says what is wrong with it.

  Args:
    kind: "query" or "document", for the message.
    value: the id.
    where: "file:line", for the message.

  Returns:
    `value`.

  Raises:
    ValueError: if it is empty or holds white space, a character that nobody
      sees, or a control character, at which NumPy or the C code of trec_eval
      would end it.
  """
  is_one_word = value.split() == [value]
  is_seen = ids.strip_invisible(value) == value
  if not (is_one_word and is_seen) or _CONTROL.search(value):
    prefix = f"{where}: " if where else ""
    what = "control characters" if is_one_word else "white space"
    what = what if is_seen else "characters that nobody sees"
    raise ValueError(
      f"{prefix}expected a {kind} id without {what}, got"
      f" {_shown(kind, value)}; give it another"
    )
  return value


def _shown(kind: str, id_: str) -> str:
  """Returns what a message may say of an id in a corpus or a list of queries."""
  return repr(id_) if kind == "document" else "one"


def by_id(
  source: object, kind: str, found: Iterable[tuple[str, Any]], keep: bool = True
) -> dict[str, Any]:
  """Gathers documents or queries by id, or their ids alone.

  Args:
    source: a path or name, for messages.
    kind: "document" or "query".
    found: where each stands, and what it is.
    keep: whether the values are kept; if not, they are None.

  Raises:
    ValueError: if there are none, or an id stands twice.
  """
  items: dict[str, Any] = {}
  for where, item in found:
    if item.id in items:
      raise ValueError(
        f"{where}: expected distinct {kind} ids, got {_shown(kind, item.id)}"
        " again; rename or remove one"
      )
    items[item.id] = item if keep else None
  if not items:
    raise ValueError(f"{source}: expected a {kind} a line, got none; fill it")
  return items


def read_documents(
  source: object,
  read: Callable[[], Iterable[tuple[str, Document]]],
  *,
  in_memory: bool = False,
) -> tuple[tuple[Document, ...] | StreamedDocuments, Container[str]]:
  """Reads documents once, checks them, and keeps them or leaves them there.

  Documents without text stay: BEIR's FiQA has some, and who left them out would
  search another collection. A note on standard error counts them.

  Args:
    source: a path or name, for messages.
    read: starts to read: where each stands, and what it is.
    in_memory: whether they are kept; if not, each loop reads them again.

  Returns:
    The documents, and their ids.

  Raises:
    ValueError: as in `by_id`, or if no document has text.
  """
  empty = 0

  def counted() -> Iterator[tuple[str, Document]]:
    nonlocal empty
    for where, document in read():
      empty += not document.contents
      yield where, document

  found = by_id(source, "document", counted(), keep=in_memory)
  if empty == len(found):
    raise ValueError(
      f"{source}: expected documents with text, got none in {empty:,}: check"
      " under which name it stands"
    )
  if empty:
    print(
      f"synthq: note: {source}: {empty:,} of {len(found):,} documents have no"
      " text; they stay, as in BEIR, and no query is written for them",
      file=sys.stderr,
    )
  if in_memory:
    return tuple(found.values()), found.keys()
  streamed = StreamedDocuments(
    tuple(found), lambda: (item for _, item in read())
  )
  return streamed, found.keys()


def check_text(where: str, text: str) -> None:
  """Refuses a query without text."""
  if not text.strip():
    raise ValueError(
      f"{where}: expected text in query, got none; fill it, or remove the line"
      " and its judgements"
    )


def one_owner(where: str, names: Iterable[str | float]) -> str:
  """Returns the one that is named, or "".

  Names are read by the rule of `ids`: else one person is several users.

  >>> one_owner("log:1", ("", 7, " 7", 7.0))
  '7'

  Args:
    where: "file:line", for the message.
    names: of who asked, empty where a field is.

  Raises:
    ValueError: if there are several.
  """
  found = {ids.read(name, "user", where) for name in names} - {""}
  if len(found) > 1:
    raise ValueError(
      f"{where}: expected one user of a query, got {len(found)} names under"
      " several keys; keep one of them"
    )
  return found.pop() if found else ""


def judge(
  rows: Iterable[tuple[str, str, str, str]],
  queries: Container[str] | None = None,
  documents: Container[str] | None = None,
  *,
  dangling: Dangling | None = None,
) -> Qrels:
  """Gathers judgements by query.

  >>> judge([("qrels.tsv:1", "q1", "d7", "2")], {"q1"}, {"d7"})
  {'q1': {'d7': 2}}

  Args:
    rows: where it stands ("file:line"), query id, document id and grade.
    queries: the known query ids; None takes any.
    documents: the known document ids; None takes any.
    dangling: counts judgements of unknown ids: those of unknown queries are left
      out, those of unknown documents stay (`lacking`); None: they are refused.

  Returns:
    Query id -> document id -> grade.

  Raises:
    ValueError: if an id is unknown, a grade is no whole number or above a
      million, or a pair has two grades.
  """
  qrels: Qrels = {}
  for where, query, document, grade in rows:
    if not is_known(where, "query", query, queries, dangling):
      continue
    is_known(where, "document", document, documents, dangling)
    value = _grade(where, grade)
    grades = qrels.setdefault(query, {})
    if grades.setdefault(document, value) != value:
      raise ValueError(
        f"{where}: expected one grade for a query and a document, got another"
        " than above; keep one"
      )
  return qrels


def lacking(
  qrels: Mapping[str, Qrels], documents: Container[str]
) -> frozenset[str]:
  """Returns the judged documents that a collection lacks.

  >>> sorted(lacking({"test": {"q1": {"d1": 1, "gone": 1}}}, {"d1"}))
  ['gone']

  Args:
    qrels: split -> query id -> document id -> grade.
    documents: the known ids.
  """
  return frozenset(
    id_
    for judged in qrels.values()
    for grades in judged.values()
    for id_ in grades
    if id_ not in documents
  )


def _distinct(kind: str, names: Iterable[str]) -> set[str]:
  """Returns the ids as a set after checking each."""
  seen: set[str] = set()
  for value in names:
    if check_id(kind, value) in seen:
      raise ValueError(
        f"expected distinct {kind} ids, got {_shown(kind, value)} twice; rename"
        " or remove one"
      )
    seen.add(value)
  return seen


def _known(kind: str, where: str, unknown: set[str]) -> None:
  """Refuses judgements of what is not in the collection."""
  if unknown:
    raise ValueError(
      f"{where}: expected ids of the collection, got unknown {kind} ids; add"
      " them or remove the judgements"
    )


def is_known(
  where: str,
  kind: str,
  id_: str,
  known: Container[str] | None,
  dangling: Dangling | None = None,
) -> bool:
  """Says whether a judged id is in the collection; counts or refuses others.

  Args:
    where: "file:line", for the message.
    kind: "query" or "document".
    id_: the id.
    known: the ids of the collection; None takes any.
    dangling: counts by kind what is unknown; None: it is refused.

  Raises:
    ValueError: if it is unknown and refused.
  """
  if known is None or id_ in known:
    return True
  if dangling is None:
    raise ValueError(
      f"{where}: expected the id of a known {kind}, got another; add that"
      f" {kind} or remove the line"
    )
  dangling[kind] += 1
  if ids.has_other_form(id_, known):
    ids.tell(kind, ids.OTHER_FORM)
  return False


def checked_number(text: str) -> str:
  """Returns a text that other programs read as the same number.

  Python alone takes 1_0 for 10, and digits of other scripts.

  >>> checked_number("-1.5")
  '-1.5'

  Raises:
    ValueError: for such a text.
  """
  if "_" in text or not text.isascii():
    raise ValueError("expected a number in ASCII digits")
  return text


def _grade(where: str, text: str) -> int:
  try:
    grade = int(checked_number(text))
  except ValueError:
    raise ValueError(
      f"{where}: expected a whole number as the grade, got another text; write"
      " 1 for relevant, 0 for not"
    ) from None
  if abs(grade) > MOST_GRADE:
    raise ValueError(
      f"{where}: expected a grade of at most {MOST_GRADE:,}, got a greater"
      " number; write 1 for relevant, 0 for not"
    )
  return grade
