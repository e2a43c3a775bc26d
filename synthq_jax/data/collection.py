"""Checks and holds a collection: documents, queries and judgements by split."""

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
  "collect",
  "checked_number",
  "is_known",
  "join_splits",
  "judge",
  "get_owner",
  "read_documents",
]

Qrels = dict[str, dict[str, int]]
"""Judgements: query id -> document id -> grade; above 0 means relevant."""

Dangling = collections.Counter[str]
"""Number of judgements that name an unknown "query" or "document"."""


MOST_GRADE = 1_000_000
"""Largest grade: trec_eval counts grades one by one, nDCG overflows beyond
2^31."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
  """A document, public unless a configuration says otherwise.

  Attributes:
    id: a name without white space and control characters.
    text: the body.
    title: a title, or "".
    client: the document's owner in federated training, or "".
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
    text: the text of the query.
    client: the id of the user or (federated) client that asked it, or "".
  """

  id: str
  text: str
  client: str = ""


@dataclasses.dataclass(frozen=True)
class StreamedDocuments:
  """Streams documents from disk; each loop over them reads them again.

  >>> texts = {"d1": "apples", "d2": "pears"}
  >>> documents = StreamedDocuments(
  ...     tuple(texts), lambda: (Document(i, t) for i, t in texts.items())
  ... )
  >>> len(documents), [document.text for document in documents]
  (2, ['apples', 'pears'])

  Attributes:
    ids: ids of all documents, in their order.
    read: returns a new iterator over the documents.
  """

  ids: Sequence[str] = dataclasses.field(repr=False)
  read: Callable[[], Iterator[Document]] = dataclasses.field(repr=False)

  def __len__(self) -> int:
    return len(self.ids)

  def __iter__(self) -> Iterator[Document]:
    """Reads the documents and refuses ids other than those of the first
    reading."""
    for document, id_ in itertools.zip_longest(self.read(), self.ids):
      if document is None or document.id != id_:
        got = (
          f"{document.id!r} at another position" if document else f"no {id_!r}"
        )
        raise ValueError(
          f"expected the documents of the first reading, got {got}: the file"
          " has changed; start again"
        )
      yield document


@dataclasses.dataclass(frozen=True)
class Collection:
  """Documents, queries and judgements of documents for queries.

  >>> tiny = Collection(
  ...     documents=(Document("d1", "apples are red"),),
  ...     queries=(Query("q1", "colour of apples"),),
  ...     qrels={"test": {"q1": {"d1": 1}}},
  ... )
  >>> tiny.pairs("test")
  [('q1', 'd1')]

  Attributes:
    documents: documents with distinct ids, in memory or streamed from their file.
    queries: queries of all splits, with distinct ids.
    qrels: split -> query id -> document id -> grade, for ids of the collection.
    split_by_record: whether each record names its split, so that the set of
      splits depends on the records.
    division: the name of the rule that made the splits, without ":", if the rule
      looks at one query alone; "" if it looks at other queries or is unknown.
    lacking: ids of judged documents that `documents` lacks. Their judgements count
      when a run is scored, as in BEIR and trec_eval, and no pair has them.
    gathered: ids of queries that a rule of splits put on one side though their
      documents were on several sides; as private as the queries.

  Raises:
    ValueError: if an id is empty, holds white space or a control character, or
      occurs twice, or a judged id is neither in the collection nor in `lacking`.
  """

  documents: tuple[Document, ...] | StreamedDocuments
  queries: tuple[Query, ...]
  qrels: dict[str, Qrels]
  split_by_record: bool = False
  division: str = ""
  gathered: frozenset[str] = frozenset()
  lacking: frozenset[str] = frozenset()

  def __post_init__(self):
    documents = _check_distinct("document", self.document_ids())
    queries = _check_distinct("query", (item.id for item in self.queries))
    for split, qrels in self.qrels.items():
      judged = {id_ for grades in qrels.values() for id_ in grades}
      _refuse_unknown("query", f"qrels[{split!r}]", qrels.keys() - queries)
      _refuse_unknown(
        "document", f"qrels[{split!r}]", judged - documents - self.lacking
      )

  def document_ids(self) -> Iterable[str]:
    """Returns the ids of the documents, in their order."""
    if isinstance(self.documents, StreamedDocuments):
      return self.documents.ids
    return (document.id for document in self.documents)

  def pairs(self, split: str) -> list[tuple[str, str]]:
    """Returns the (query id, document id) pairs of a split with a grade above 0.

    Documents that the collection lacks are in no pair.

    Args:
      split: a key of `qrels`.

    Returns:
      The pairs, in the order of `qrels`.

    Raises:
      ValueError: if the split is unknown.
    """
    return [
      (query, document)
      for query, grades in self.judgements(split).items()
      for document, grade in grades.items()
      if grade > 0 and document not in self.lacking
    ]

  def without_lacking(self, splits: Iterable[str]) -> "Collection":
    """Drops judgements of lacking documents from some splits.

    A query without any other judgement leaves the split.

    Args:
      splits: keys of `qrels`, such as the splits for training.

    Returns:
      The collection; other splits keep their judgements.
    """
    if not self.lacking:
      return self
    qrels = dict(self.qrels)
    for split in splits:
      present = {
        query: {d: g for d, g in grades.items() if d not in self.lacking}
        for query, grades in self.judgements(split).items()
      }
      qrels[split] = {
        query: grades for query, grades in present.items() if grades
      }
    return dataclasses.replace(self, qrels=qrels)

  def judgements(self, split: str) -> Qrels:
    """Returns the judgements of a split; an error lists the splits."""
    if split not in self.qrels:
      splits = sorted(self.qrels)
      if (
        self.split_by_record
      ):  # a split's name may be a cell of a private table
        splits = "those that its records name"
      raise ValueError(
        f"expected a split of {splits}, got split={split!r}; "
        "choose one of these or add its judgements"
      )
    return self.qrels[split]

  def query_by_id(self) -> Mapping[str, Query]:
    """Returns the queries by id."""
    return {query.id: query for query in self.queries}


def join_splits(data: Collection, name: str) -> Collection:
  """Joins some splits of a collection to one.

  Args:
    data: the collection.
    name: splits joined by "+", e.g. "dev+test"; a single one changes nothing.

  Returns:
    The same documents and queries; the joined split replaces its parts, with the
    name `name` and all their judgements.

  Raises:
    ValueError: if a part is no split.

  >>> qrels = {"q": {"d": 1}}
  >>> data = Collection((Document("d", "x"),), (Query("q", "y"),), {"a": qrels})
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
  """Refuses an id that run files cannot hold.

  Args:
    kind: "query" or "document", for the message.
    value: the id.
    where: "file:line", for the message.

  Returns:
    `value`.

  Raises:
    ValueError: if the id is empty or holds white space, an invisible character, or a
      control character, at which NumPy or the C code of trec_eval would end it.
  """
  is_one_word = value.split() == [value]
  is_seen = ids.strip_invisible(value) == value
  if not (is_one_word and is_seen) or _CONTROL.search(value):
    prefix = f"{where}: " if where else ""
    fault = "control characters" if is_one_word else "white space"
    fault = fault if is_seen else "invisible characters"
    raise ValueError(
      f"{prefix}expected a {kind} id without {fault}, got"
      f" {_mask_id(kind, value)}; give it another"
    )
  return value


def _mask_id(kind: str, id_: str) -> str:
  """Returns an id for a message; query ids may be private and become "one"."""
  return repr(id_) if kind == "document" else "one"


def by_id(
  source: object, kind: str, items: Iterable[tuple[str, Any]], keep: bool = True
) -> dict[str, Any]:
  """Collects documents or queries by id, or only their ids.

  Args:
    source: a path or name, for messages.
    kind: "document" or "query".
    items: the position and value of each document or query.
    keep: whether to keep the values; if not, they are None.

  Raises:
    ValueError: if there are none, or an id occurs twice.
  """
  collected: dict[str, Any] = {}
  for where, item in items:
    if item.id in collected:
      raise ValueError(
        f"{where}: expected distinct {kind} ids, got {_mask_id(kind, item.id)}"
        " again; rename or remove one"
      )
    collected[item.id] = item if keep else None
  if not collected:
    raise ValueError(f"{source}: expected a {kind} a line, got none; fill it")
  return collected


def read_documents(
  source: object,
  read: Callable[[], Iterable[tuple[str, Document]]],
) -> tuple[StreamedDocuments, Container[str]]:
  """Reads documents once and checks them; each loop over them reads them again.

  Documents without text stay, since leaving them out would change a collection
  such as BEIR's FiQA. A note on standard error counts them.

  Args:
    source: a path or name, for messages.
    read: starts to read; yields the position of each document, and the document.

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

  documents = by_id(source, "document", counted(), keep=False)
  if empty == len(documents):
    raise ValueError(
      f"{source}: expected documents with text, got none in {empty:,}: check"
      " the name of its column"
    )
  if empty:
    print(
      f"synthq: note: {source}: {empty:,} of {len(documents):,} documents have no"
      " text; they stay, as in BEIR, and no query is written for them",
      file=sys.stderr,
    )
  streamed = StreamedDocuments(
    tuple(documents), lambda: (item for _, item in read())
  )
  return streamed, documents.keys()


def check_text(where: str, text: str) -> None:
  """Refuses a query without text, and counts a word for nothing."""
  if not text.strip():
    raise ValueError(
      f"{where}: expected text in query, got none; fill it, or remove the line"
      " and its judgements"
    )
  ids.count_null("query", text)


def get_owner(where: str, names: Iterable[str | float]) -> str:
  """Returns the one user that several fields name, or "".

  Names are normalized by the rule of `ids`, so that one person is one user.

  >>> get_owner("log:1", ("", 7, " 7", 7.0))
  '7'

  Args:
    where: "file:line", for the message.
    names: the user's id in each field, "" for an empty field.

  Raises:
    ValueError: if the fields name several users.
  """
  users = {ids.read(name, "user", where) for name in names} - {""}
  if len(users) > 1:
    raise ValueError(
      f"{where}: expected one user of a query, got {len(users)} names under"
      " several keys; keep one of them"
    )
  return users.pop() if users else ""


def judge(
  rows: Iterable[tuple[str, str, str, str]],
  queries: Container[str] | None = None,
  documents: Container[str] | None = None,
  *,
  dangling: Dangling | None = None,
) -> Qrels:
  """Collects judgements by query.

  >>> judge([("qrels.tsv:1", "q1", "d7", "2")], {"q1"}, {"d7"})
  {'q1': {'d7': 2}}

  Args:
    rows: position ("file:line"), query id, document id and grade.
    queries: the known query ids; None admits any.
    documents: the known document ids; None admits any.
    dangling: counts judgements of unknown ids. Judgements of unknown queries are
      left out, those of unknown documents stay (`collect`). None: both are
      refused.

  Returns:
    Query id -> document id -> grade.

  Raises:
    ValueError: if an id is unknown, a grade is no whole number or beyond a million,
      or a pair has two grades.
  """
  qrels: Qrels = {}
  for where, query, document, grade in rows:
    if not is_known(where, "query", query, queries, dangling):
      continue
    is_known(where, "document", document, documents, dangling)
    value = _parse_grade(where, grade)
    grades = qrels.setdefault(query, {})
    if grades.setdefault(document, value) != value:
      raise ValueError(
        f"{where}: expected one grade for a query and a document, got another"
        " than above; keep one"
      )
  return qrels


def collect(
  documents: StreamedDocuments,
  queries: Iterable[Query],
  qrels: dict[str, Qrels],
  *,
  split_by_record: bool = False,
) -> Collection:
  """Makes a collection; judged documents that it lacks are its `lacking` ones."""
  judged = {
    id_
    for queries_judged in qrels.values()
    for grades in queries_judged.values()
    for id_ in grades
  }
  return Collection(
    documents,
    tuple(queries),
    qrels,
    split_by_record,
    lacking=frozenset(judged.difference(documents.ids)),
  )


def _check_distinct(kind: str, names: Iterable[str]) -> set[str]:
  """Returns the ids as a set after checking each; refuses duplicates."""
  seen: set[str] = set()
  for value in names:
    if check_id(kind, value) in seen:
      raise ValueError(
        f"expected distinct {kind} ids, got {_mask_id(kind, value)} twice; rename"
        " or remove one"
      )
    seen.add(value)
  return seen


def _refuse_unknown(kind: str, where: str, unknown: set[str]) -> None:
  """Refuses judgements of unknown ids."""
  if unknown:
    raise ValueError(
      f"{where}: expected ids of the collection, got unknown {kind} ids; add"
      " them or remove the judgements"
    )


def is_known(
  where: str,
  kind: str,
  id_: str,
  ids_in_collection: Container[str] | None,
  dangling: Dangling | None = None,
) -> bool:
  """Returns True if a judged id is in the collection; counts or refuses others.

  Args:
    where: "file:line", for the message.
    kind: "query" or "document".
    id_: the id.
    ids_in_collection: the ids of the collection; None admits any.
    dangling: counts unknown ids by kind; None: they are refused.

  Raises:
    ValueError: if the id is unknown and `dangling` is None.
  """
  if ids_in_collection is None or id_ in ids_in_collection:
    return True
  if dangling is None:
    raise ValueError(
      f"{where}: expected the id of a known {kind}, got another; add that"
      f" {kind} or remove the line"
    )
  dangling[kind] += 1
  if ids.has_other_form(id_, ids_in_collection):
    ids.add_count(kind, ids.OTHER_FORM)
  return False


def checked_number(text: str) -> str:
  """Returns the text of a number after refusing forms that only Python reads.

  Python reads 1_0 as 10, and digits of other scripts.

  >>> checked_number("-1.5")
  '-1.5'

  Raises:
    ValueError: if the text has such a form.
  """
  if "_" in text or not text.isascii():
    raise ValueError("expected a number in ASCII digits")
  return text


def _parse_grade(where: str, text: str) -> int:
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
