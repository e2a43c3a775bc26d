"""Splits queries so that equal documents and equal queries are on one side.

A retriever could memorize a document or query that is in both train and test.
There are two ways to separate the splits:

- `split_by_document` keeps every pair: pairs that share a document or a set of
  query words, directly or through other pairs, form a group, and a group goes to
  one side as a whole. One pair that links two groups moves all of their pairs,
  so this way is for public queries.
- `split_by_own_document` sends a pair to the side of its document, whatever the
  other pairs are, and leaves out pairs whose words are on an earlier side.

If the unit of privacy is a person, `by_user` sends all queries of a user to one
side.

If a source declares one split for all queries, `where_none` sends each query with
all of its documents to the side of its words, or of its id. A document may then be
on several sides, as in MS MARCO.
"""

import dataclasses
import hashlib
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from synthq_jax.data import collection, ids, word_patterns

__all__ = [
  "FRACTIONS",
  "by_user",
  "choose_document",
  "split_by_document",
  "split_by_own_document",
  "mark_several_documents",
  "token_set",
  "where_none",
]

FRACTIONS = {"train": 0.8, "dev": 0.1, "test": 0.1}
"""The usual shares of train, dev and test."""

_WORD = re.compile(word_patterns.WORD)


def token_set(text: str) -> frozenset[str]:
  """Returns the set of a text's words in lower case.

  A text without any word counts as one word. Letters that Unicode encodes in two
  ways are equal (NFC).

  >>> sorted(token_set("To be, or not to be?"))
  ['be', 'not', 'or', 'to']
  """
  text = word_patterns.compose(text)
  return frozenset(_WORD.findall(text.lower())) or frozenset([text.strip()])


def split_by_document(
  pairs: Sequence[tuple[str, str]],
  fractions: Mapping[str, float] = FRACTIONS,
  *,
  seed: int = 0,
) -> list[str]:
  """Assigns every (query, document) pair to the side of its group.

  Two pairs with the same document, or with queries of the same `token_set`,
  always go to the same side. A hash of the group's documents and the seed draws
  the side: neither the order of the pairs nor Python's hash seed matters. The
  shares hold in expectation, over groups.

  >>> pairs = [("red apple", "a"), ("Apple, red", "b"), ("sour", "b")]
  >>> len(set(split_by_document(pairs)))
  1

  Args:
    pairs: query text and document (its text or id).
    fractions: split name -> share; the shares are positive and add to 1.
    seed: another seed gives other splits.

  Returns:
    One split name per pair.

  Raises:
    ValueError: if the shares are not positive or do not add to 1.
  """
  side_of = _make_side_of(fractions, seed)
  if not pairs:
    return []
  group = _find_groups(pairs)
  key: dict[int, str] = {}
  for label, (_, document) in zip(group, pairs, strict=True):
    key[label] = min(key.get(label, document), document)
  side = {label: side_of(text) for label, text in key.items()}
  return [side[label] for label in group]


def split_by_own_document(
  pairs: Sequence[tuple[str, str]],
  fractions: Mapping[str, float] = FRACTIONS,
  *,
  seed: int = 0,
) -> list[str | None]:
  """Assigns every (query, document) pair to the side of its document.

  A hash of the document and the seed draws the side. A pair is left out if a query
  on an earlier side has the same `token_set`, so that no query is on two sides.

  Formal guarantee:
    Whether a pair is on the first side is a function of its own document, the
    fractions and the seed: a query that is added, removed or replaced moves no
    other query to the first side or away from it. The later sides depend on the
    queries of earlier ones, and are as private as those.

  >>> pairs = [("red apple", "a"), ("Apple, red", "b"), ("sour", "b")]
  >>> split_by_own_document(pairs, seed=3)
  ['train', None, 'test']

  Args:
    pairs: query text and document (its text or id).
    fractions: split name -> share; the shares are positive and add to 1. The
      first split is for training.
    seed: another seed gives other splits.

  Returns:
    One split name per pair, or None if the pair is left out.

  Raises:
    ValueError: if the shares are not positive or do not add to 1.
  """
  side_of = _make_side_of(fractions, seed)
  sides = [side_of(document) for _, document in pairs]
  words = [token_set(query) for query, _ in pairs]
  position = {name: number for number, name in enumerate(fractions)}
  first: dict[frozenset[str], int] = {}
  for own, side in zip(words, sides, strict=True):
    first[own] = min(first.get(own, position[side]), position[side])
  return [
    side if position[side] == first[own] else None
    for own, side in zip(words, sides, strict=True)
  ]


def mark_several_documents(pairs: Sequence[tuple[str, str]]) -> list[bool]:
  """Marks pairs whose query has the words of a query for another document.

  `split_by_own_document` keeps such a query on the first of the sides of all these
  documents, so that training sees it with a higher probability than others.

  >>> mark_several_documents([("red apple", "a"), ("Apple, red", "b"), ("x", "b")])
  [True, True, False]

  Args:
    pairs: query text and document.
  """
  documents: dict[frozenset[str], set[str]] = {}
  for query, document in pairs:
    documents.setdefault(token_set(query), set()).add(document)
  return [len(documents[token_set(query)]) > 1 for query, _ in pairs]


def where_none(
  data: collection.Collection,
  *,
  seed: int = 0,
  secret: str = "",
) -> collection.Collection:
  """Splits the queries of a source that declares one split for all of them.

  A note on standard error reports it. A collection with several splits stays as it
  is. So does one whose records name their splits: there, one record with another
  name would decide whether all queries are divided.

  Formal guarantee: whether queries are divided is a function of the names of the
  source's files and of whether it has a column of splits. A query's side is then a
  function of its own words, the fractions and the seed; no other query changes it.
  With a secret, the side is a keyed hash of the query's id: sides of different ids
  are independent draws by the fractions, whatever the texts are.

  Args:
    data: the collection.
    seed: another seed gives other splits.
    secret: a key, for splits of which something is published; equal words may then
      be on two sides. Empty: words and seed decide.

  Returns:
    The collection, with a split for each of the fractions, and the name of
    this rule as its `division`.
  """
  if data.split_by_record or len(data.qrels) != 1:
    return data
  [(name, judged)] = data.qrels.items()
  side_of = _make_side_of(FRACTIONS, f"{secret} id" if secret else seed)
  basis = "ids" if secret else "words"
  sides: dict[str, collection.Qrels] = {side: {} for side in FRACTIONS}
  for query in data.queries:
    if query.id in judged:
      words = " ".join(sorted(token_set(query.text)))
      side = side_of(query.id if secret else words)
      sides[side][query.id] = judged[query.id]
  shares = ", ".join(f"{side} {share:.0%}" for side, share in FRACTIONS.items())
  print(
    f"synthq: note: all judgements are of one split, {name!r}: queries are"
    f" divided ({shares}) by a hash of their {basis}",
    file=sys.stderr,
  )
  key = _describe_key(secret) if secret else f"seed {seed}"
  return dataclasses.replace(
    data, qrels=sides, division=f"{basis}, {key}, {_describe_fractions()}"
  )


def by_user(
  data: collection.Collection,
  *,
  most: int,
  secret: str,
) -> collection.Collection:
  """Splits users and keeps at most K queries of each, all on the user's side.

  The source's own splits are joined first; queries without a relevant document
  are left out. Equal words of two users may be on two sides.

  Formal guarantee: which queries of a user are kept, and on which side, is a
  function of that user's own queries and judgements, of `most`, the fractions and
  the secret. Adding or removing all queries of one user changes nothing for any
  other query.

  Args:
    data: a collection whose queries name their user (`Query.client`).
    most: K, the largest number of queries of a user; the queries with the smallest
      keyed hashes are kept.
    secret: the key of the hashes.

  Returns:
    The collection, with a split for each of the fractions, and a `division` that
    names the rule and, by a digest, the secret.

  Raises:
    ValueError: if a query names no user or a word for none ("nan"), or two user
      ids differ only in leading zeros or letter case.
  """
  side_of = _make_side_of(FRACTIONS, f"{secret} user")
  judged: collection.Qrels = {}
  for split in data.qrels.values():
    for query, grades in split.items():
      judged[query] = judged.get(query, {}) | grades
  queries_by_user: dict[str, list[collection.Query]] = {}
  all_queries = tuple(
    dataclasses.replace(query, client=ids.read(query.client, "user"))
    for query in data.queries
  )
  ids.check_whole((query.client for query in all_queries), "UNIT='user'")
  for query in all_queries:
    grades = judged.get(query.id, {})
    if any(g > 0 and d not in data.lacking for d, g in grades.items()):
      queries_by_user.setdefault(query.client, []).append(query)
  if "" in queries_by_user:
    raise ValueError(
      "expected a user id with every query for UNIT='user', got some without:"
      ' add a column "user" to a log, or name its user column in'
      ' prepare_data.Config.user_field, or "metadata": {"user_id": ...} to'
      " queries.jsonl"
    )
  sampled_ids = {
    query.id
    for queries in queries_by_user.values()
    for query in sorted(
      queries,
      key=lambda query: (_hash_to_unit(f"{secret} query", query.id), query.id),
    )[:most]
  }
  queries = tuple(query for query in all_queries if query.id in sampled_ids)
  sides: dict[str, collection.Qrels] = {side: {} for side in FRACTIONS}
  for query in queries:
    sides[side_of(query.client)][query.id] = judged[query.id]
  return dataclasses.replace(
    data,
    queries=queries,
    qrels=sides,
    split_by_record=False,
    gathered=frozenset(),
    division=f"users, {_describe_key(secret)}, {_describe_fractions()}",
  )


def choose_document(
  relevant: Iterable[str], query: str, *, seed: int = 0, by_text: bool = False
) -> str:
  """Chooses one of a query's documents by a hash of the query's own key.

  With a stream of random numbers, a query's choice would depend on the queries
  before it, and one query more would change many records.

  >>> choose_document({"d1", "d2"}, "q1")
  'd1'

  Args:
    relevant: the documents' ids.
    query: the query's id.
    seed: another seed gives other choices.
    by_text: whether the id is a digest of the text. Then the documents are the key:
      a change of the text must not change the document, since some mechanisms
      protect texts alone.
  """
  ordered = sorted(relevant)
  key = " ".join(ordered) if by_text else query
  digest = hashlib.sha256(f"{seed} {key}".encode()).digest()
  return ordered[int.from_bytes(digest[:8], "big") % len(ordered)]


def _describe_key(secret: str) -> str:
  """Returns a name for a secret in a division: a digest."""
  digest = hashlib.sha256(f"division {secret}".encode()).hexdigest()
  return f"key {digest[:12]}"


def _describe_fractions() -> str:
  return " ".join(f"{side} {share:g}" for side, share in FRACTIONS.items())


def _make_side_of(
  fractions: Mapping[str, float], seed: int | str
) -> Callable[[str], str]:
  _check_fractions(fractions)
  names = list(fractions)
  bounds = np.cumsum(list(fractions.values()))[:-1]
  return lambda text: names[
    np.searchsorted(bounds, _hash_to_unit(seed, text), "right")
  ]


def _find_groups(pairs: Sequence[tuple[str, str]]) -> list[int]:
  """Returns the number of each pair's group, a connected component."""
  queries = _number_values([token_set(query) for query, _ in pairs])
  documents = _number_values([document for _, document in pairs])
  num_queries, num_documents = queries.max() + 1, documents.max() + 1
  size = num_queries + num_documents
  edges = sparse.coo_array(
    (np.ones(len(pairs), bool), (queries, documents + num_queries)),
    shape=(size, size),
  )
  _, labels = csgraph.connected_components(edges, directed=False)
  return labels[queries].tolist()


def _number_values(values: Sequence[Hashable]) -> np.ndarray:
  """Numbers distinct values in the order of their first appearance."""
  number: dict[Hashable, int] = {}
  return np.array([number.setdefault(value, len(number)) for value in values])


def _hash_to_unit(seed: int | str, text: str) -> float:
  """Hashes the arguments to a number in [0, 1)."""
  digest = hashlib.sha256(f"{seed}\n{text}".encode()).digest()
  return int.from_bytes(digest[:6], "big") / 2**48


def _check_fractions(fractions: Mapping[str, float]) -> None:
  shares = list(fractions.values())
  if not shares or min(shares) <= 0 or abs(sum(shares) - 1) > 1e-9:
    raise ValueError(
      "expected positive shares that add to 1, got "
      f"fractions={dict(fractions)}; change them"
    )
