"""A collection in memory: documents, queries, judgements by split."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = [
  "Collection",
  "Document",
  "Qrels",
  "Query",
  "StreamedDocuments",
  "check_id",
  "join_splits",
]

Qrels = dict[str, dict[str, int]]
"""Judgements: query id -> document id -> grade; above 0 means relevant."""


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
  """A document, public unless a configuration says otherwise.

  Attributes:
    id: a name without white space.
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
    id: a name without white space.
    text: what was asked.
    client: who asked it where there are clients (federated), or "".
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
    """Returns how many there are."""
    return len(self.ids)

  def __iter__(self) -> Iterator[Document]:
    """Reads them, and refuses others than those it was made for."""
    expected = iter(self.ids)
    for document in self.read():
      if next(expected, None) != document.id:
        raise ValueError(
          f"expected the documents of the first reading, got {document.id!r}"
          " in another place: the file changed meanwhile; start again"
        )
      yield document
    missing = next(expected, None)
    if missing is not None:
      raise ValueError(
        f"expected the documents of the first reading, got no {missing!r}: the"
        " file changed meanwhile; start again"
      )


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

  Raises:
    ValueError: if an id is empty, holds white space, stands twice or is judged
      without being there.
  """

  documents: tuple[Document, ...] | StreamedDocuments
  queries: tuple[Query, ...]
  qrels: dict[str, Qrels]

  def __post_init__(self):
    """Checks the ids."""
    documents = _distinct("document", self.document_ids())
    queries = _distinct("query", (item.id for item in self.queries))
    for split, qrels in self.qrels.items():
      judged = {id_ for grades in qrels.values() for id_ in grades}
      _known("query", f"qrels[{split!r}]", qrels.keys() - queries)
      _known("document", f"qrels[{split!r}]", judged - documents)

  def document_ids(self) -> Iterable[str]:
    """Returns the ids of the documents, in their order."""
    if isinstance(self.documents, StreamedDocuments):
      return self.documents.ids
    return (document.id for document in self.documents)

  def pairs(self, split: str) -> list[tuple[str, str]]:
    """Returns (query id, document id) of a split where the grade is above 0.

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
      if grade > 0
    ]

  def judgements(self, split: str) -> Qrels:
    """Returns the judgements of a split, or says which splits there are."""
    if split not in self.qrels:
      raise ValueError(
        f"expected a split of {sorted(self.qrels)}, got split={split!r}; "
        "choose one of these or add its judgements"
      )
    return self.qrels[split]

  def split_queries(self, split: str) -> tuple[Query, ...]:
    """Returns the judged queries of a split, in the order of `queries`."""
    judged = self.judgements(split)
    return tuple(query for query in self.queries if query.id in judged)

  def document_by_id(self) -> Mapping[str, Document]:
    """Returns the documents by their id."""
    return {document.id: document for document in self.documents}

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
    ValueError: if it is empty or holds white space.
  """
  if value.split() != [value]:
    prefix = f"{where}: " if where else ""
    raise ValueError(
      f"{prefix}expected a {kind} id without white space, got {value!r}; "
      "give it another"
    )
  return value


def _distinct(kind: str, ids: Iterable[str]) -> set[str]:
  """Returns the ids as a set after checking each."""
  seen: set[str] = set()
  for value in ids:
    if check_id(kind, value) in seen:
      raise ValueError(
        f"expected distinct {kind} ids, got {value!r} twice; rename or "
        "remove one"
      )
    seen.add(value)
  return seen


def _known(kind: str, where: str, unknown: set[str]) -> None:
  """Refuses judgements of what is not in the collection."""
  if unknown:
    raise ValueError(
      f"{where}: expected ids of the collection, got {len(unknown)} unknown "
      f"{kind} ids such as {min(unknown)!r}; add them or remove the "
      "judgements"
    )
